"""Sockets in the file system: who is at the other end, and files that appear in one step."""

import asyncio
import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.transport.listeners import BACKLOG

PATH_BYTES_MAX: Final = 107
"""Bytes of a path that fit a sockaddr_un, with its closing zero."""
_BACKLOG_WAIT_S: Final = 0.01
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(process, user) of the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_process(sock: socket.socket) -> int:
    return credentials(sock)[0]


def checked(path: str) -> str:
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigRejected(
            f"socket path {path} has {len(os.fsencode(path))} bytes, at most {PATH_BYTES_MAX} fit: "
            "choose a shorter directory"
        )
    return path


@contextlib.contextmanager
def within(path: str) -> Iterator[str]:
    """Name a socket file by its folder's descriptor: so it fits, however long its path is. Raises
    OSError."""
    target = Path(path)
    folder = os.open(target.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{target.name}"
    finally:
        os.close(folder)


async def connect(sock: socket.socket, path: str) -> None:
    """A Unix connect succeeds or fails at once, and says "again" where the backlog is full: which
    the event loops take for success. The caller sets a deadline."""
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            await asyncio.sleep(_BACKLOG_WAIT_S)


class PathTaken(ConfigRejected):
    """A living process listens there."""


def bind(path: str, mode: int = 0o600) -> socket.socket:
    """A listening socket file of this mode: made under another name, so that it never exists with
    another mode, and put in place in one step."""
    target = Path(checked(path))
    _check_free(target)
    draft = target.with_name(f".{os.getpid():x}.{target.name}"[:64])
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        draft.unlink(missing_ok=True)
        sock.bind(checked(str(draft)))
        draft.chmod(mode)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        draft.rename(target)
        return sock
    except OSError as error:
        sock.close()
        draft.unlink(missing_ok=True)
        raise ConfigRejected(f"cannot listen on {path}: {error}") from error


def _check_free(path: Path) -> None:
    """Raises ConfigRejected unless there is nothing, or the socket of a dead process."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigRejected(f"cannot listen on {path}: {error}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigRejected(f"{path} exists and is not a socket: remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(str(path))
    if answer not in (errno.ECONNREFUSED, errno.ENOENT):
        raise PathTaken(f"a living process listens on {path}: choose another path")
