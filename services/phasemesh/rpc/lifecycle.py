"""The end of a process: the first SIGTERM or SIGINT begins the drain, and nothing cuts it short.

Further signals are noted and ignored. A terminal's Ctrl-C reaches every process of the group and a supervisor
then sends its own SIGTERM, so a second signal is no sign of impatience; the drain is bounded by settings, and
SIGKILL is there.
"""

from __future__ import annotations

import asyncio
import logging
import signal

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger(__name__)


async def wait_for_signal() -> signal.Signals:
    """Wait for SIGTERM or SIGINT, and return which it was.

    Installs handlers on the running loop, which must be the main thread's, and leaves them in place. Call it
    after `ray.init`, which installs a SIGTERM handler of its own and would replace them.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[signal.Signals] = loop.create_future()

    def received(number: signal.Signals) -> None:
        if first.done():
            _log.info("signal ignored, already draining", extra={"signal": number.name})
            return
        _log.info("signal received, draining", extra={"signal": number.name})
        first.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
    return await first
