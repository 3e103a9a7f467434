"""The one error of a port that can't be listened on; it names the port."""

from __future__ import annotations


class BindError(OSError):
    """A port can't be listened on: another process has it, or the address isn't this machine's."""

    def __init__(self, what: str, host: str, port: int, cause: str) -> None:
        super().__init__(
            f"{what} can't listen on {host}:{port}: {cause}; stop the process that has the port, or choose "
            "another one (0 takes a free one)"
        )


def authority(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
