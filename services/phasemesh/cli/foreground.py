"""Ctrl-C for this process alone, also when another program started it.

A terminal sends Ctrl-C to the whole foreground group. Under `make run` that is make too, which then dies of
the signal whatever we do, and reports 130 for a mesh that drained and exited with 0.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_OFF = (signal.SIGTTOU, signal.SIGTSTP)


@contextmanager
def terminal_to_ourselves() -> Iterator[None]:
    """Be the terminal's foreground group while the body runs, if a launcher shares our group with us.

    A shell gives each command a group of its own, so nothing changes there; nor without a terminal. Ctrl-Z is
    off meanwhile: it would stop us but not the launcher, and no shell would take the terminal back.
    """
    group = os.getpgrp()
    try:
        shared = group != os.getpid() and os.tcgetpgrp(sys.stdin.fileno()) == group
        if shared:
            # A background process that moves the terminal is stopped by SIGTTOU unless it ignores that.
            before = [(number, signal.signal(number, signal.SIG_IGN)) for number in _OFF]
            os.setpgid(0, 0)
            os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    except (OSError, ValueError, AttributeError):  # no terminal, or stdin is closed (then it is None)
        shared = False
    try:
        yield
    finally:
        if shared:
            with suppress(OSError):  # the terminal is gone, or the launcher is
                os.tcsetpgrp(sys.stdin.fileno(), group)
                os.setpgid(0, group)
            for number, handler in before:
                signal.signal(number, handler)
