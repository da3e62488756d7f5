"""The process behind a RemoteArray: a pager, and the device that its pages live in.

    python -m slackwater.memory.array.pager_process CONTROL BEATS FAULTS MEMORY

A process, not a thread: a program that touches a missing page may hold the interpreter lock, and
then no thread of it that needs this lock can bring the page. It inherits four descriptors: the
socket of requests (one JSON line each way), that of its heartbeats, the userfaultfd and the shared
memory. It ends with the program. When it ends before, the heartbeat socket closes, and the watcher
in the program (watcher.py) turns every touch of the array into SIGBUS.
"""

import asyncio
import contextlib
import mmap
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import structlog

from slackwater.common.base import limits
from slackwater.common.base.background import Background
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.bus.access import Credentials
from slackwater.memory.array.pager import Pager
from slackwater.memory.array.userfault import Userfault
from slackwater.memory.pages.device import Device
from slackwater.memory.prefetch.prefetch import WINDOW_MAX
from slackwater.memory.service.local_device import local_device
from slackwater.memory.service.options import DeviceOptions
from slackwater.memory.service.warm import warm
from slackwater.memory.store import PAGE_BYTES

_BEAT_S: Final = 1.0
_log = structlog.get_logger()


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first request. `url` "": no cluster, pages go to the backup file alone."""

    address: int
    nbytes: int
    cache_bytes: int
    id: str
    backup: str
    url: str = ""
    credentials: Credentials = Credentials()
    slab_bytes: int = 0
    resilience: str = "disk"
    transport: str | None = None
    token: str = ""
    node: str = ""
    delay_s: float = 0.0
    window: int = WINDOW_MAX
    patience_s: float = limits.ARRAY_STORE_S


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    first: int
    count: int


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    pass


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    pass


class Close(msgspec.Struct, frozen=True, tag="close"):
    pass


Request = Begin | Prefetch | Flush | Figures | Close


class Answer(msgspec.Struct, frozen=True):
    """`error` "": done."""

    error: str = ""
    figures: dict[str, int] = {}


def encode(message: Request | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


@contextlib.asynccontextmanager
async def device(begin: Begin) -> AsyncIterator[Device]:
    """A device of this array alone."""
    options = DeviceOptions(
        id=begin.id,
        size_bytes=begin.nbytes,
        socket=None,
        backup=Path(begin.backup),
        node=begin.node,
        slab_bytes=begin.slab_bytes,
        resilience=begin.resilience,
        transport=begin.transport,
        token=begin.token,
        delay_s=begin.delay_s,
    )
    async with local_device(options, begin.url, begin.credentials) as made:
        yield made


class PagerProcess:
    def __init__(self, control: int, beats: int, faults: int, memory: int) -> None:
        self._control = socket.socket(fileno=control)
        self._beats = socket.socket(fileno=beats)
        self._faults = faults
        self._memory = memory
        self._background = Background()

    async def run(self) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=self._control)
        beating = self._background.spawn(self._beat())
        try:
            await self._background.alongside(self._live(reader, writer))
        except (SlackwaterError, OSError) as error:
            _log.error("pager.failed", reason=str(error))
            with contextlib.suppress(OSError):
                writer.write(encode(Answer(error=str(error) or type(error).__name__)))
                await writer.drain()
            raise SystemExit(1) from error
        finally:
            beating.cancel()
            writer.close()

    async def _live(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin = msgspec.json.decode(await reader.readline(), type=Begin)
        await asyncio.to_thread(warm)
        async with device(begin) as store:
            await store.background.alongside(self._page(begin, store, reader, writer))

    async def _beat(self) -> None:
        """From the loop that does the work: when that is stuck, so is this."""
        self._beats.setblocking(False)
        while True:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                self._beats.send(b".")
            await asyncio.sleep(_BEAT_S)

    async def _page(
        self,
        begin: Begin,
        store: Device,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        view = np.frombuffer(mmap.mmap(self._memory, begin.nbytes), np.uint8)
        pages = begin.nbytes // PAGE_BYTES
        faults = Userfault(self._faults, begin.address, pages)
        pager = Pager(
            store,
            faults,
            self._memory,
            view,
            begin.cache_bytes // PAGE_BYTES,
            window=begin.window,
            patience_s=begin.patience_s,
            background=self._background,
        )
        answering = self._background.spawn(self._answer(pager, store, reader, writer))
        try:
            writer.write(encode(Answer()))
            await pager.serve()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer(
        self,
        pager: Pager,
        store: Device,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        with contextlib.suppress(ConnectionError):  # The program is gone.
            while line := await reader.readline():
                request = msgspec.json.decode(line, type=Request)
                writer.write(encode(await self._one(pager, store, request)))
                if isinstance(request, Close):
                    break
        pager.stop()

    async def _one(self, pager: Pager, store: Device, request: Request) -> Answer:
        match request:
            case Prefetch(first=first, count=count):
                return Answer(figures={"coming": pager.prefetch(first, count)})
            case Flush():
                try:
                    async with asyncio.timeout(limits.ARRAY_FLUSH_S):
                        await pager.flush()
                except (SlackwaterError, OSError) as error:
                    return Answer(error=str(error) or type(error).__name__)
                return Answer()
            case Figures():
                spans = range(len(store.table.state))
                remote = sum(store.present_pages(span) for span in spans)
                return Answer(figures={**pager.figures(), "remote_pages": remote})
            case Close() | Begin():
                return Answer()


def main() -> None:
    asyncio.run(PagerProcess(*(int(word) for word in sys.argv[1:5])).run())


if __name__ == "__main__":
    main()
