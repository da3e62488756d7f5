"""The supervisor's end of systemd's notification socket: one socket per unit.

A unit's own socket says who speaks, so nobody's word counts for another. Only what the services
use of sd_notify(3) is understood; the rest is ignored, as systemd ignores what it does not know.
"""

import asyncio
import os
import socket
from array import array
from collections.abc import Callable
from pathlib import Path

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected


class FdStore:
    """The descriptors that a unit has given away for its next life: (name, fd)."""

    def __init__(self) -> None:
        self._held: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> list[tuple[str, int]]:
        return list(self._held)

    def add(self, name: str, fd: int) -> None:
        """Takes `fd` over. The same file under the same name is held once."""
        if len(self._held) >= limits.FD_STORE_MAX or any(
            other == name and _same_file(fd, held) for other, held in self._held
        ):
            os.close(fd)
            return
        self._held.append((name, fd))

    def remove(self, name: str) -> None:
        for other, fd in self._held:
            if other == name:
                os.close(fd)
        self._held = [(other, fd) for other, fd in self._held if other != name]

    def clear(self) -> None:
        for _, fd in self._held:
            os.close(fd)
        self._held.clear()


class NotifySocket:
    """Calls `told(field, value)` for each line of each message; descriptors go to `store`."""

    def __init__(self, path: Path, store: FdStore, told: Callable[[str, str], None]) -> None:
        if len(os.fsencode(path)) > limits.SOCKET_PATH_MAX:
            raise ConfigRejected(
                f"{path}: a socket's path has at most {limits.SOCKET_PATH_MAX} bytes; "
                "choose a shorter temporary folder (TMPDIR)"
            )
        self.path = path
        self._store = store
        self._told = told
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.read)

    def read(self) -> None:
        """Take in everything that has arrived."""
        while True:
            try:
                text, ancillary, flags, _ = self._socket.recvmsg(
                    limits.NOTIFY_BYTES_MAX,
                    socket.CMSG_SPACE(4 * limits.NOTIFY_FDS_MAX),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return
            fds = _descriptors(ancillary)
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                _close(fds)
                continue
            self._take(text.decode(errors="replace"), fds)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _take(self, text: str, fds: list[int]) -> None:
        fields = dict(line.partition("=")[::2] for line in text.splitlines())
        name = fields.get("FDNAME", "stored")
        if fields.get("FDSTORE") == "1":
            for fd in fds:
                self._store.add(name, fd)
            fds = []
        if fields.get("FDSTOREREMOVE") == "1":
            self._store.remove(name)
        _close(fds)  # BARRIER=1: closing its descriptor is the confirmation.
        for field, value in fields.items():
            self._told(field, value)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)
