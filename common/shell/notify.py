"""systemd's notification protocol: readiness, watchdog, and the descriptor store.

The same code works under systemd and under the embedded supervisor: both listen on the socket that
NOTIFY_SOCKET names. A descriptor given to the store (FDSTORE=1) outlives this process, kill -9
included, and is handed back at the next start (LISTEN_FDS, LISTEN_FDNAMES): a region of shared
memory survives its aggregator that way. See sd_notify(3) and sd_listen_fds(3).
"""

import array
import asyncio
import contextlib
import fcntl
import os
import select
import socket
from collections.abc import Callable
from typing import Final

from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, Rejected

_FIRST_FD: Final = 3
_NAME_MAX: Final = 255


class SdNotify:
    """Speaks to the supervisor; does nothing where there is none (`address` empty)."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self.watchdog_s = watchdog_s
        """The supervisor expects `watchdog()` within this time; 0: it expects none."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls) -> "SdNotify":
        """Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, and removes them: children of this
        process are not to speak in its name."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", "")
        meant = pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 1e6 if usec.isdigit() and meant else 0.0)

    @property
    def present(self) -> bool:
        return self._socket is not None

    def ready(self, status: str = "") -> None:
        self._tell(f"READY=1\nSTATUS={_line(status)}" if status else "READY=1")

    def status(self, text: str) -> None:
        self._tell(f"STATUS={_line(text)}")

    def watchdog(self) -> None:
        self._tell("WATCHDOG=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    async def store(self, fd: int, name: str) -> None:
        """Keep a descriptor under `name` beyond this process's life. `store` returns when it is
        handed over; `barrier` returns when it is kept."""
        await self._send(f"FDSTORE=1\nFDNAME={_fd_name(name)}", fd)

    async def remove(self, name: str) -> None:
        """Let the supervisor forget every descriptor stored under `name`."""
        await self._send(f"FDSTOREREMOVE=1\nFDNAME={_fd_name(name)}")

    async def barrier(self) -> None:
        """Return when the supervisor has acted on everything sent before. Raises DeadlineExceeded
        after NOTIFY_S."""
        if self._socket is None:
            return
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            await self._send("BARRIER=1", theirs)
            os.close(theirs)
            theirs = -1
            await _until(lambda: _hung_up(ours), "the supervisor has not confirmed within")
        finally:
            os.close(ours)
            if theirs >= 0:
                os.close(theirs)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, text: str) -> None:
        """Telling is best effort: a watchdog's message that finds the queue full is sent again
        soon, and a supervisor that is gone ends this process by other means."""
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.sendto(text.encode(), self._address)

    async def _send(self, text: str, fd: int | None = None) -> None:
        if self._socket is None:
            return
        ancillary = []
        if fd is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        listener = self._socket

        def sent() -> bool:
            try:
                listener.sendmsg([text.encode()], ancillary, 0, self._address)
            except BlockingIOError:  # The supervisor's queue is full: it reads a moment later.
                return False
            return True

        await _until(sent, "the supervisor has not taken a message within")


def stored_descriptors() -> list[tuple[str, int]]:
    """The descriptors that the supervisor kept for this service: (name, fd), ours from now on.

    Works once: the variables are removed, so that children do not take them for theirs.
    """
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    found = []
    for index in range(int(count)):
        fd = _FIRST_FD + index
        flags = fcntl.fcntl(fd, fcntl.F_GETFD)
        fcntl.fcntl(fd, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
        found.append((names[index] if index < len(names) else "unknown", fd))
    return found


def _line(text: str) -> str:
    return text.replace("\n", " ")


def _fd_name(name: str) -> str:
    if not 0 < len(name) <= _NAME_MAX or ":" in name or not name.isprintable():
        raise Rejected(f"descriptor name {name!r}: 1 to {_NAME_MAX} printable characters, no ':'")
    return name


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


async def _until(done: Callable[[], bool], what: str) -> None:
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + limits.NOTIFY_S
    while not done():
        if loop.time() >= give_up_s:
            raise DeadlineExceeded(f"{what} {limits.NOTIFY_S} s")
        await asyncio.sleep(0.001)
