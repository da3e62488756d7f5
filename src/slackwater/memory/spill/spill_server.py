"""A SpillStore for programs without an event loop, and for the processes that they start.

A thread of the program has the loop, the store and its tiers. Whoever wants a blob asks it over a
Unix socket in a folder that is the program's alone: other threads, forked and spawned processes (a
DataLoader's workers) alike, each on a connection of its own. What is kept goes with the program.

A request is one frame of msgpack; blobs are frames of their own, so that none is copied into a
message. A frame is its length, 8 bytes, and so many bytes; a negative length is a blob that there
is not.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from slackwater.common.base import limits
from slackwater.common.base.background import Background
from slackwater.common.base.errors import (
    ConfigRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.bus.access import Credentials
from slackwater.memory.service.local_device import local_device
from slackwater.memory.service.options import DeviceOptions
from slackwater.memory.service.warm import warm
from slackwater.memory.spill.spill import DiskTier, MemoryTier, RemoteTier, SpillStore, Tier
from slackwater.memory.store import PAGE_BYTES

_LENGTH: Final = struct.Struct("<q")
_NONE: Final = _LENGTH.pack(-1)
_Socks = dict[tuple[int, int], socket.socket]
"""By process and thread."""
_KEYS: Final = 1024
"""Keys of one request."""
_log = structlog.get_logger()


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Answered by a frame for each of them."""

    keys: list[str]


class Put(msgspec.Struct, frozen=True, tag="put"):
    """The blob follows. Answered by an empty frame; none: it was not kept."""

    key: str


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    pass


Request = Get | Put | Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """How much goes where, in bytes; 0: nothing. `folder` (default: the temporary one) takes what
    is on disk, and the file behind remote memory, sparse and as large as it. `url`, `transport` and
    `node`: as for `slackwater memory export`."""

    memory_bytes: int
    remote_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None
    url: str = ""
    credentials: Credentials | None = None
    resilience: str = "disk"
    transport: str | None = None
    node: str = ""


class SpillServer:
    """Methods may be called from any thread, and in processes that were forked or spawned."""

    def __init__(self, tiers: Tiers, blobs_max: int = limits.SPILL_BLOBS_MAX) -> None:
        """Raises ConfigRejected, Unavailable."""
        _check(tiers)
        own = tempfile.mkdtemp(prefix="slackwater-spill-")
        folders = [own]
        self._path = str(Path(own) / "spill")
        self._owner = os.getpid()
        self._socks: _Socks = {}
        thread = _SpillThread(tiers, blobs_max, self._path, folders)
        ours = self._owner, thread, folders, self._socks
        self._end: Callable[[], object] = weakref.finalize(self, _end, *ours)
        """Also when it is forgotten, or the program ends."""
        try:
            thread.ready.result(limits.ARRAY_START_S)
        except (SlackwaterError, OSError) as error:
            self._end()
            if isinstance(error, OSError):
                raise ConfigRejected(f"what is spilled cannot be kept: {error}") from error
            raise

    def get(self, keys: Sequence[str]) -> list[bytearray | None]:
        """None: it is not kept (any more). Raises Unavailable."""
        found: list[bytearray | None] = []
        with self._asking() as sock:
            for first in range(0, len(keys), _KEYS):
                part = list(keys[first : first + _KEYS])
                _send(sock, msgspec.msgpack.encode(Get(part)))
                found += [_receive(sock) for _ in part]
        return found

    def put(self, key: str, blob: bytes) -> bool:
        """Whether there was room. Raises Unavailable."""
        if len(blob) > limits.SPILL_BLOB_BYTES_MAX:
            return False
        with self._asking() as sock:
            _send(sock, msgspec.msgpack.encode(Put(key)))
            _send(sock, blob)
            return _receive(sock) is not None

    def figures(self) -> dict[str, int]:
        """Blobs `found`, `missing`, `kept`, `refused` and `unreadable` so far, and what each tier
        has: `memory_blobs`, `memory_bytes` and so on. Raises Unavailable."""
        with self._asking() as sock:
            _send(sock, msgspec.msgpack.encode(Figures()))
            return msgspec.msgpack.decode(_receive(sock) or b"", type=dict[str, int])

    def close(self) -> None:
        self._end()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[socket.socket]:
        """This thread's own connection; a forked process must not use its parent's."""
        whose = os.getpid(), threading.get_ident()
        sock = self._socks.get(whose)
        try:
            if sock is None:
                sock = self._socks[whose] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(limits.SPILL_ANSWER_S)
                sock.connect(self._path)
            yield sock
        except BaseException as error:  # Interrupted, it may be in the middle of a frame.
            self._socks.pop(whose).close()
            if isinstance(error, OSError):
                raise Unavailable(f"nobody keeps what was spilled: {error}") from error
            raise

    def __getstate__(self) -> tuple[str, int]:
        return self._path, self._owner

    def __setstate__(self, state: tuple[str, int]) -> None:
        self._path, self._owner = state
        self._socks = {}
        self._end = _nothing


class _SpillThread(threading.Thread):
    """Serves until `stop` is called; `ready` tells how it began."""

    def __init__(self, tiers: Tiers, blobs_max: int, path: str, folders: list[str]) -> None:
        super().__init__(name="spill", daemon=True)
        self.ready: Future[None] = Future()
        self._tiers, self._blobs_max, self._path = tiers, blobs_max, path
        self._folders = folders
        self._counts: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.start()

    def run(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception as error:  # The thread's end: who waits is told, or the log is.
            if not self.ready.done():
                self.ready.set_exception(error)
                return
            expected = isinstance(error, SlackwaterError | OSError)
            _log.error("spill.ended", reason=repr(error), exc_info=None if expected else error)

    def stop(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # It has ended already.
                self._loop.call_soon_threadsafe(self._ending.set)
        self.join(limits.DRAIN_S)

    async def _live(self) -> None:
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with _opened(self._tiers, self._folders) as (tiers, background):
            self._store = SpillStore(tiers, self._blobs_max)
            server = await asyncio.start_unix_server(self._serve, self._path)
            self.ready.set_result(None)
            await background.alongside(self._ending.wait())
            server.close()
            for writer in self._writers.values():
                writer.close()  # Its reader sees the end.
            await asyncio.gather(*self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends."""
        ours = asyncio.current_task()
        assert ours is not None
        self._writers[ours] = writer
        try:
            while True:
                request = msgspec.msgpack.decode(await _read(reader), type=Request)
                await self._answer(request, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (msgspec.DecodeError, Rejected) as error:
            _log.warning("spill.refused", reason=str(error))
        finally:
            writer.close()
            del self._writers[ours]

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        match request:
            case Get(keys=keys):
                for key in keys:
                    blob = await self._find(key)
                    if blob is None:
                        writer.write(_NONE)
                    else:
                        writer.write(_LENGTH.pack(len(blob)))
                        writer.write(blob)
                    await writer.drain()
            case Put(key=key):
                kept = await self._keep(key, await _read(reader))
                writer.write(_LENGTH.pack(0) if kept else _NONE)
            case Figures():
                figures = msgspec.msgpack.encode({**self._counts, **self._store.figures()})
                writer.write(_LENGTH.pack(len(figures)) + figures)

    async def _find(self, key: str) -> bytes | None:
        """Find the blob; one that cannot be read, or came back damaged, is forgotten: it can be
        made again."""
        if key not in self._store:
            self._counts["missing"] += 1
            return None
        try:
            blob = await self._store.get(key)
        except (SlackwaterError, KeyError) as error:
            _log.warning("spill.unreadable", key=key, reason=str(error))
            self._counts["unreadable"] += 1
            await self._store.drop(key)
            return None
        self._counts["found"] += 1
        return blob

    async def _keep(self, key: str, blob: bytes) -> bool:
        try:
            await self._store.put(key, blob)
        except Rejected:
            self._counts["refused"] += 1
            return False
        self._counts["kept"] += 1
        return True


def _nothing() -> None:
    """A spawned process has nothing to end."""


def _check(tiers: Tiers) -> None:
    """Raises ConfigRejected."""
    for name in ("memory_bytes", "remote_bytes", "disk_bytes"):
        if getattr(tiers, name) < 0:
            raise ConfigRejected(f"{name} {getattr(tiers, name)}: give 0 or more")
    if not tiers.memory_bytes + tiers.remote_bytes + tiers.disk_bytes:
        raise ConfigRejected(
            "memory_bytes, remote_bytes and disk_bytes are all 0: give one of them"
        )
    if tiers.remote_bytes and not tiers.url:
        raise ConfigRejected("remote_bytes needs the url of a cluster whose lenders are to be used")


@contextlib.asynccontextmanager
async def _opened(tiers: Tiers, folders: list[str]) -> AsyncIterator[tuple[list[Tier], Background]]:
    """The tiers, and what runs for them unseen. `folders` gets what is to be removed at the end.
    Raises ConfigRejected, Unavailable, OSError, and Fatal when something could not be ended."""
    made: list[Tier] = [MemoryTier(tiers.memory_bytes)] if tiers.memory_bytes else []
    background = Background()
    async with contextlib.AsyncExitStack() as stack:
        if not (tiers.remote_bytes or tiers.disk_bytes):
            yield made, background
            return
        folder = Path(tempfile.mkdtemp(prefix="slackwater-spill-", dir=tiers.folder))
        folders.append(str(folder))
        if tiers.remote_bytes:
            options = DeviceOptions(
                id=f"spill-{os.getpid()}-{secrets.token_hex(4)}",
                size_bytes=-(-tiers.remote_bytes // PAGE_BYTES) * PAGE_BYTES,
                socket=None,
                backup=folder / "remote",
                node=tiers.node,
                resilience=tiers.resilience,
                transport=tiers.transport,
                token=os.environ.get("SLACKWATER_CLUSTER_TOKEN", ""),
            )
            known = tiers.credentials or Credentials.from_environment(os.environ)
            await asyncio.to_thread(warm)
            device = await stack.enter_async_context(local_device(options, tiers.url, known))
            background = device.background
            made.append(RemoteTier(device))
        if tiers.disk_bytes:
            made.append(DiskTier(folder / "disk", tiers.disk_bytes))
        yield made, background


def _end(owner: int, thread: _SpillThread, folders: list[str], socks: _Socks) -> None:
    """Not by a forked process, which has a copy of it all, but for the thread. When the program
    ends, nothing that needs further threads ends in good order any more: lenders see it go."""
    if os.getpid() != owner:
        return
    if threading.main_thread().is_alive():
        thread.stop()
    for sock in socks.values():
        sock.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not 0 <= length <= limits.SPILL_BLOB_BYTES_MAX:
        raise Rejected(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def _send(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(frame)))
    sock.sendall(frame)


def _receive(sock: socket.socket) -> bytearray | None:
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return None if length < 0 else _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the spill server has ended")
        view = view[got:]
    return data
