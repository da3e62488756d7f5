"""One client: a thread that runs the compiled loop, and the items it leaves to the event loop.

The thread shakes hands, then serves until the client goes. Items of one batch are taken together:
their reads become one read of many pages, their writes one landing, as far as they lie side by
side. A second thread sends the answers of items, so that a client who does not read them stops
nobody but himself.
"""

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.memory.nbd import lanes
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import serve as loop_
from slackwater.memory.nbd import state as s
from slackwater.memory.nbd.extents import extents
from slackwater.memory.nbd.handshake import Export, Handshake
from slackwater.memory.nbd.lane_set import LaneSet
from slackwater.memory.nbd.unaligned import covering, read_bytes, whole_pages, write_bytes
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import latency
from slackwater.memory.pages.device import Device
from slackwater.memory.prefetch.readahead import ReadAhead
from slackwater.memory.store import PAGE_BYTES

_COOKIE: Final = 2**64 - 1
_JOINT_BYTES: Final = 1024 * 1024
"""Reads of one batch are joined up to this much."""
_log = structlog.get_logger()
Item = NDArray[np.int64]


class Connection:
    """`on_end` is called on the event loop when client and items are done; `admit` by the client's
    thread, whether it may be served."""

    def __init__(
        self,
        sock: socket.socket,
        export: Export,
        device: Device,
        ahead: ReadAhead,
        turn: asyncio.Lock,
        admit: "Callable[[Connection], bool]",
        on_end: "Callable[[Connection], None]",
    ) -> None:
        self._sock = sock
        self._export = export
        self._device = device
        self._ahead = ahead
        self._turn = turn
        self._admit_us = admit
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._answers: queue.SimpleQueue[tuple[bytes, Item] | None] = queue.SimpleQueue()
        self._open = self._open_bytes = 0
        """Items whose answers are not sent yet, and the bytes that they hold."""
        self._room = threading.Condition()
        self._left = False
        self._chunked = False
        self._allocation = False
        self._background = device.background
        self._tasks = self._background.group()
        self._thread = self._background.thread(self._run, "nbd")
        self._answering = self._background.thread(self._answer, "nbd-answers")
        self._lanes = LaneSet(device)
        self.state: s.Connection | None = None

    @property
    def open_requests(self) -> int:
        return self._open

    def start(self) -> None:
        self._thread.start()

    def hang_up(self) -> None:
        """The client is cut off; `on_end` follows."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._room:
            self._left = True
            self._room.notify_all()

    def give_up(self) -> None:
        """Nothing that was begun is waited for any more."""
        self._tasks.cancel()

    # The client's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "the client left"
        try:
            if self._shake_hands():
                reason = self._serve()
        except OSError as error:
            reason = f"{error.strerror or error}"
        except (Rejected, TimeoutError) as error:
            reason = str(error)
        except BaseException as error:
            reason = repr(error)
            raise
        finally:
            _log.info("nbd.closed", reason=reason)
            self._post(self._ended)

    def _shake_hands(self) -> bool:
        """True: on to the transmission. Raises Rejected for what is not an NBD client."""
        sock, shake = self._sock, Handshake(self._export, lambda: self._admit_us(self))
        sock.settimeout(limits.NBD_HANDSHAKE_S)
        sock.sendall(shake.greeting())
        why = shake.client_flags(*nbd.CLIENT_FLAGS.unpack(self._exactly(nbd.CLIENT_FLAGS.size)))
        if why:
            raise Rejected(why)
        for _ in range(limits.NBD_OPTIONS_MAX):
            magic, option, length = nbd.OPTION.unpack(self._exactly(nbd.OPTION.size))
            if magic != nbd.OPTION_MAGIC:
                raise Rejected(f"an option that begins with {magic:#x}: no NBD client")
            if length > limits.NBD_OPTION_BYTES_MAX:
                raise Rejected(f"an option of {length} bytes")
            sock.sendall(shake.option(option, self._exactly(length)))
            if shake.over:
                return False
            if shake.transmitting:
                self._chunked, self._allocation = shake.chunked, shake.allocation
                sock.settimeout(None)
                return True
        raise Rejected(f"{limits.NBD_OPTIONS_MAX} options and no end")

    def _exactly(self, nbytes: int) -> bytes:
        parts = []
        while nbytes:
            part = self._sock.recv(nbytes)
            if not part:
                raise Rejected("the client left during the handshake")
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    def _serve(self) -> str:
        """Why it ended."""
        self.state = state = s.make_connection(
            self._sock.fileno(),
            self._export.size_bytes,
            limits.NBD_REQUEST_BYTES_MAX,
            chunked=self._chunked,
            counted=self._device.latency.open(),
        )
        self._answering.start()
        try:
            return self._converse(state)
        finally:
            self._see_to_writes(state)
            self._lanes.close()
            self._device.latency.close(state.times)

    def _converse(self, state: s.Connection) -> str:
        while True:
            match loop_.serve(self._device.table, state):
                case loop_.HAS_ITEMS:
                    self._look_at_lanes(state)
                    if not self._hand_over(state):
                        return "it was told to end"
                case loop_.DISCONNECTED:
                    return "the client said good-bye"
                case loop_.GARBAGE if state.words[s.OVERSIZED]:
                    return f"a write beyond {limits.NBD_REQUEST_BYTES_MAX} bytes"
                case loop_.GARBAGE:
                    return "garbage where a request should begin"
                case _:
                    return "the connection was closed"

    def _post(self, function: Callable[..., object], *arguments: Any) -> None:
        self._background.post(self._loop, function, *arguments)

    def _look_at_lanes(self, state: s.Connection) -> None:
        shared = state.lanes.shared
        if shared[s.SWEEP]:
            self._lanes.sweep(state.lanes)
        if shared[s.TELL]:
            shared[s.TELL] = 0
            self._post(self._device.backup.settle_soon)
        if channel_id := int(shared[s.WANTED]):
            shared[s.WANTED] = 0
            self._post(self._lanes.want, channel_id, state.lanes)

    def _see_to_writes(self, state: s.Connection) -> None:
        """The client is gone; what it had taken in is on lanes still."""
        again = True
        while again:
            again = lanes.drain(self._device.table, state)
            items = state.items[: state.words[s.ITEMS]]
            self._begin_lost(items[_lost(items)].copy())
        self._post(self._device.backup.settle_soon)

    def _begin_lost(self, items: Item) -> None:
        """They begin at once: nothing but the disk is waited for."""
        with self._room:
            self._open += len(items)
        for item in items:
            self._post(lambda one: self._tasks.spawn(self._land_lost(one)), item)

    def _hand_over(self, state: s.Connection) -> bool:
        """Items go to the event loop; too many at once, and the client waits."""
        items = state.items[: state.words[s.ITEMS]].copy()
        payloads = [
            bytes(state.inward[item[s.ITEM_AT] : item[s.ITEM_AT] + item[s.ITEM_LENGTH]])
            if item[s.ITEM_KIND] == nbd.WRITE
            else b""
            for item in items
        ]
        lost = _lost(items)
        if lost.any():
            self._begin_lost(items[lost])
            items = items[~lost]
            payloads = [payloads[i] for i in np.flatnonzero(~lost).tolist()]
        first = 0
        while first < len(items):
            count = _fitting(items[first:])
            if not self._admit(items[first : first + count]):
                return False
            part = slice(first, first + count)
            self._post(self._begin, items[part], payloads[part])
            first += count
        return True

    def _admit(self, items: Item) -> bool:
        """Wait until they fit beside what is open; False: the connection is to end."""
        nbytes = _held(items)
        with self._room:
            while not self._left and (
                self._open + len(items) > limits.NBD_ITEMS_MAX
                or self._open_bytes + nbytes > limits.NBD_ITEM_BYTES_MAX
            ):
                self._room.wait()
            self._open += len(items)
            self._open_bytes += nbytes
            return not self._left

    def _answer(self) -> None:
        """The thread that sends what items have come to."""
        state = self.state
        assert state is not None
        while (entry := self._answers.get()) is not None:
            answer, items = entry
            sent = loop_.send(state, k.address(answer), len(answer))
            with self._room:
                self._open -= len(items)
                self._open_bytes -= _held(items)
                self._left |= not sent
                self._room.notify_all()
            if not sent:
                return

    # Items, on the event loop ---------------------------------------------------------------------

    def _begin(self, items: Item, payloads: list[bytes]) -> None:
        kinds = items[:, s.ITEM_KIND]
        whole = (items[:, s.ITEM_OFFSET] % PAGE_BYTES == 0) & (
            items[:, s.ITEM_LENGTH] % PAGE_BYTES == 0
        )
        reads = [i for i in np.flatnonzero((kinds == nbd.READ) & whole).tolist()]
        late = [i for i in reads if self._coming(items[i])]
        for i in late:
            self._tasks.spawn(self._one(items[i], b""))
            reads.remove(i)
        joint = int(items[reads, s.ITEM_LENGTH].sum()) <= _JOINT_BYTES
        if len(reads) > 1 and joint:
            self._tasks.spawn(self._read_together(items[reads]))
        else:
            for i in reads:
                self._tasks.spawn(self._one(items[i], b""))
        for group in _side_by_side(items[kinds == s.LANDING]):
            self._tasks.spawn(self._land(group))
        for i in np.flatnonzero((kinds != s.LANDING) & ~((kinds == nbd.READ) & whole)).tolist():
            self._tasks.spawn(self._one(items[i], payloads[i]))
        self._ahead.look_soon()

    def _coming(self, item: Item) -> bool:
        """Pages that it reads are on their way: it waits for them, and others not for it."""
        count = int(item[s.ITEM_LENGTH]) // PAGE_BYTES
        return self._ahead.coming(int(item[s.ITEM_OFFSET]) // PAGE_BYTES, count)

    async def _read_together(self, items: Item) -> None:
        pages = np.concatenate(
            [covering(int(i[s.ITEM_OFFSET]), int(i[s.ITEM_LENGTH])) for i in items]
        )
        buffer = np.empty(len(pages) * PAGE_BYTES, np.uint8).data
        try:
            cause = await self._ahead.read_pages(pages, buffer)
        except (OSError, SlackwaterError):  # Each by itself: some may be well.
            for item in items:
                self._tasks.spawn(self._one(item, b""))
            return
        answers: list[bytes | memoryview] = []
        start = 0
        for item in items:
            cookie, offset, length = self._what(item)
            answers.append(nbd.data_head(cookie, offset, length, chunked=self._chunked))
            answers.append(buffer[start : start + length])
            start += length
        self._time(items, cause)
        self._reply(b"".join(answers), items)

    async def _land(self, items: Item) -> None:
        first = int(items[0, s.ITEM_FIRST])
        pages = int(items[:, s.ITEM_LENGTH].sum()) // PAGE_BYTES
        error: Exception | None = None
        try:
            late = int(items[0, s.ITEM_DISK_BARRIER])
            if late >= 0:
                await self._device.backup.written(late)
            await self._device.land(first, pages)
            if (items[:, s.ITEM_FLAGS] & nbd.FUA).any():
                await self._device.flush()
        except (OSError, SlackwaterError) as failure:
            error = failure
        answers = [self._outcome(item, error) for item in items]
        self._time(items, latency.WRITE)
        self._reply(b"".join(answers), items)

    async def _land_lost(self, item: Item) -> None:
        channel_id, first = int(item[s.ITEM_AT]), int(item[s.ITEM_FIRST])
        pages = int(item[s.ITEM_LENGTH]) // PAGE_BYTES
        error: Exception | None = None
        try:
            refused = bool(item[s.ITEM_FLAGS])
            await self._device.lane_failed(channel_id, first, pages, refused=refused)
        except (OSError, SlackwaterError) as failure:
            error = failure
        whole = item[s.ITEM_KIND] == s.LOST  # Else a later piece is answered, behind this one.
        if whole:
            self._time(item[None], latency.WRITE)
        self._reply(self._outcome(item, error) if whole else b"", item[None])

    async def _one(self, item: Item, payload: bytes) -> None:
        cookie, offset, length = self._what(item)
        try:
            data = await self._carry_out(item, memoryview(payload))
        except (OSError, SlackwaterError) as error:
            self._reply(self._outcome(item, error), item[None])
            return
        if item[s.ITEM_KIND] == nbd.READ:
            head = nbd.data_head(cookie, offset, length, chunked=self._chunked)
            self._reply(head + data, item[None])
        elif item[s.ITEM_KIND] == nbd.BLOCK_STATUS:
            self._reply(data, item[None])
        else:
            self._reply(nbd.done(cookie), item[None])

    async def _carry_out(self, item: Item, payload: memoryview) -> bytes:
        """The bytes of a read, the whole answer to a BLOCK_STATUS; nothing of the others."""
        cookie, offset, length = self._what(item)
        device = self._device
        match int(item[s.ITEM_KIND]):
            case nbd.READ:
                data, cause = await read_bytes(self._ahead, offset, length)
                self._time(item[None], cause)
                return bytes(data)
            case nbd.WRITE:
                await write_bytes(device, self._turn, offset, payload)
                self._time(item[None], latency.WRITE)
            case nbd.FLUSH:
                await device.flush()
                return b""
            case nbd.TRIM:
                first, count = whole_pages(offset, length)
                if count:
                    await device.discard(first, count)
            case nbd.WRITE_ZEROES:
                await self._zero(offset, length)
            case nbd.CACHE:
                return b""
            case nbd.BLOCK_STATUS if self._allocation:
                pages = covering(offset, length)
                allocated = await device.allocated(int(pages[0]), len(pages))
                one = bool(item[s.ITEM_FLAGS] & nbd.REQ_ONE)
                return nbd.status(cookie, extents(offset, length, allocated, one=one))
            case kind:
                raise Rejected(f"command {kind} is not known here")
        if item[s.ITEM_FLAGS] & nbd.FUA:
            await device.flush()
        return b""

    async def _zero(self, offset: int, length: int) -> None:
        first, count = whole_pages(offset, length)
        if not count:
            await write_bytes(self._device, self._turn, offset, memoryview(bytes(length)))
            return
        await self._device.discard(first, count)
        head, tail = first * PAGE_BYTES - offset, offset + length - (first + count) * PAGE_BYTES
        for at, nbytes in ((offset, head), (offset + length - tail, tail)):
            if nbytes:
                await write_bytes(self._device, self._turn, at, memoryview(bytes(nbytes)))

    # Answers --------------------------------------------------------------------------------------

    @staticmethod
    def _what(item: Item) -> tuple[int, int, int]:
        """(cookie, offset, length)"""
        cookie = int(item[s.ITEM_COOKIE]) & _COOKIE
        return cookie, int(item[s.ITEM_OFFSET]), int(item[s.ITEM_LENGTH])

    def _outcome(self, item: Item, error: Exception | None) -> bytes:
        cookie = int(item[s.ITEM_COOKIE]) & _COOKIE
        if error is None:
            return nbd.done(cookie)
        number = nbd.EINVAL if isinstance(error, Rejected) else nbd.EIO
        if isinstance(error, OSError) and error.errno is not None:
            number = error.errno
        chunks = int(item[s.ITEM_KIND]) in (nbd.READ, nbd.BLOCK_STATUS)
        return nbd.failed(cookie, number, str(error), chunked=self._chunked and chunks)

    def _time(self, items: Item, cause: int) -> None:
        now_ns = time.monotonic_ns()
        for item in items:
            latency.add(self._device.latency.loop, cause, now_ns - int(item[s.ITEM_BEGAN]), 1)

    def _reply(self, answer: bytes, items: Item) -> None:
        """Send the answer to these items: they are open until it is sent, so a client that does not
        read is not read from either."""
        self._answers.put((answer, items))

    def _ended(self) -> None:
        """The client is gone: what it began goes on, its answers are for nobody."""
        self._background.spawn(self._finish())

    async def _finish(self) -> None:
        await self._tasks.ended()
        await self._lanes.rest()
        self._answers.put(None)
        with contextlib.suppress(OSError):  # Wakes the thread that sends to one who does not read.
            self._sock.shutdown(socket.SHUT_RDWR)
        await self._answering.join()
        await self._thread.join()
        self._sock.close()
        self._on_end(self)


def _lost(items: Item) -> NDArray[np.bool_]:
    """Return those that were on a lane, and were not acknowledged."""
    return np.isin(items[:, s.ITEM_KIND], (s.LOST, s.LOST_PART))


def _held(items: Item) -> int:
    """Bytes that the items hold: of payloads, and of the answers to reads."""
    kinds = items[:, s.ITEM_KIND]
    carrying = (kinds == nbd.READ) | (kinds == nbd.WRITE)
    return int(items[carrying, s.ITEM_LENGTH].sum())


def _fitting(items: Item) -> int:
    """How many from the front hold no more than NBD_ITEM_BYTES_MAX together; at least one."""
    lengths = items[:, s.ITEM_LENGTH] * np.isin(items[:, s.ITEM_KIND], (nbd.READ, nbd.WRITE))
    return max(1, int(np.searchsorted(np.cumsum(lengths), limits.NBD_ITEM_BYTES_MAX, "right")))


def _side_by_side(items: Item) -> list[Item]:
    """Landings whose entries follow one another, as groups; with FUA, or where entries elsewhere
    are waited for, each by itself."""
    groups: list[list[Item]] = []
    end = -1
    for item in items:
        alone = bool(item[s.ITEM_FLAGS] & nbd.FUA) or item[s.ITEM_DISK_BARRIER] >= 0
        if groups and item[s.ITEM_FIRST] == end and not alone:
            groups[-1].append(item)
        else:
            groups.append([item])
        end = -1 if alone else int(item[s.ITEM_FIRST] + item[s.ITEM_LENGTH] // PAGE_BYTES)
    return [np.stack(group) for group in groups]
