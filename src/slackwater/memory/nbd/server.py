"""The NBD server: a Unix socket, and the clients behind it."""

import asyncio
import contextlib
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Final

import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.nbd.connection import Connection
from slackwater.memory.nbd.handshake import Export
from slackwater.memory.pages.device import Device
from slackwater.memory.prefetch.readahead import ReadAhead
from slackwater.memory.store import PAGE_BYTES

_ACCEPT_AGAIN_S: Final = 1.0
_log = structlog.get_logger()


class NbdServer:
    """Make it on the loop, `start`, `close`."""

    def __init__(self, path: Path, device: Device, ahead: ReadAhead, name: str = "") -> None:
        self.path = path
        self._device = device
        self._ahead = ahead
        self._export = Export(name, device.page_count * PAGE_BYTES)
        self._connections: dict[Connection, None] = {}
        """The oldest first; those that shake hands among them."""
        self._served: set[Connection] = set()
        self._room = threading.Lock()
        self._turn = asyncio.Lock()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._sock = _listen(path)
        self._inode = os.stat(path).st_ino
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None

    @property
    def clients(self) -> int:
        return len(self._connections)

    @property
    def open_requests(self) -> int:
        """Begun by the program for clients, and not answered."""
        return sum(connection.open_requests for connection in self._connections)

    def start(self) -> None:
        accept = self._device.background.guarded(self._accept)
        self._loop.add_reader(self._sock.fileno(), accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # No descriptor is left, say: those who are here are served on.
            _log.error("nbd.not-accepted", reason=error.strerror)
            self._loop.remove_reader(self._sock.fileno())
            self._again = self._loop.call_later(_ACCEPT_AGAIN_S, self.start)
            return
        shaking = [one for one in self._connections if one not in self._served]
        for oldest in shaking[: max(0, len(shaking) + 1 - limits.NBD_HANDSHAKES_MAX)]:
            oldest.hang_up()
        connection = Connection(
            sock, self._export, self._device, self._ahead, self._turn, self._admit, self._ended,
        )  # fmt: skip
        self._connections[connection] = None
        self._quiet.clear()
        connection.start()

    def _admit(self, connection: Connection) -> bool:
        """Whether a client that has shaken hands is served; asked by its own thread."""
        with self._room:
            if len(self._served) >= limits.NBD_CONNECTIONS_MAX:
                reason = f"{limits.NBD_CONNECTIONS_MAX} clients are served"
                _log.warning("nbd.refused", reason=reason)
                return False
            self._served.add(connection)
            return True

    def _ended(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        with self._room:
            self._served.discard(connection)
        if not self._connections:
            self._quiet.set()

    async def close(self) -> None:
        """No new client; those that are here are cut off, what they began is finished. Cancelled:
        it is given up."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self._inode:
                self.path.unlink()
        for connection in tuple(self._connections):
            connection.hang_up()
        try:
            await self._quiet.wait()
        except asyncio.CancelledError:
            for connection in self._connections:
                connection.give_up()
            raise


def _listen(path: Path) -> socket.socket:
    """Mode 0600: whoever may open it may read and write every page."""
    if len(os.fsencode(path)) > limits.SOCKET_PATH_MAX:
        raise ConfigRejected(
            f"socket path {path} has over {limits.SOCKET_PATH_MAX} bytes: choose a shorter one"
        )
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigRejected(f"{path} exists and is not a socket: choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ConfigRejected(f"a living server listens on {path}: choose another path")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(limits.NBD_HANDSHAKES_MAX)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigRejected(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(old)
    return sock
