"""Plays a workload against a block device (its NBD socket) or an array in remote memory.

All pages are written once, in order; after that only what the workload asks for is timed, for
`seconds`. Pages are the checker's where `check` is set: then each page that is read is the newest
that was written there, or the play ends with the page's number (WrongPage). Requests that touch the
same page wait for one another then, as the checker wants it.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.memory.checker import Checker, content
from slackwater.loadgen.memory.latency import Latencies
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.loadgen.memory.workloads import Requests, Workload, workload
from slackwater.memory.store import PAGE_BYTES

BATCH: Final = 4096
_FILL_PAGES: Final = 64
Counters = Callable[[], Mapping[str, int]]
"""The other side's counters; differences are reported."""


class PlayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workload: str
    pages: Annotated[int, msgspec.Meta(ge=1)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 10.0
    depth: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Requests under way at once; an array has one program, and no depth."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    check: bool = False
    fill: bool = True
    """Write everything first."""


class PlayResult(msgspec.Struct, kw_only=True):
    options: PlayOptions
    requests: int
    reads: int
    pages_moved: int
    seconds: float
    per_s: float
    """Requests."""
    mib_per_s: float
    read_us: dict[str, float]
    write_us: dict[str, float]
    counted: dict[str, int]
    """Counters of the other side, while the workload ran."""
    rates: dict[str, float]
    """Hit rates that follow from these."""
    checked_pages: int
    by_second: list[int]


class Recorder:
    """A record of the requests; `pages` and `by_second` count those that ended."""

    def __init__(self) -> None:
        self.reads, self.writes = Latencies(), Latencies()
        self.pages = 0
        self.checked = 0
        self.by_second: list[int] = []
        self._began_ns = time.perf_counter_ns()

    def ended(self, began_ns: int, pages: int, write: bool) -> None:
        now_ns = time.perf_counter_ns()
        (self.writes if write else self.reads).add(now_ns - began_ns)
        self.pages += pages
        second = (now_ns - self._began_ns) // 1_000_000_000
        while len(self.by_second) <= second:
            self.by_second.append(0)
        self.by_second[second] += 1

    def result(
        self, options: PlayOptions, before: Mapping[str, int], after: Mapping[str, int]
    ) -> PlayResult:
        took_s = (time.perf_counter_ns() - self._began_ns) / 1e9
        requests = len(self.reads) + len(self.writes)
        counted = {name: after[name] - before.get(name, 0) for name in after}
        return PlayResult(
            options=options,
            requests=requests,
            reads=len(self.reads),
            pages_moved=self.pages,
            seconds=took_s,
            per_s=requests / took_s,
            mib_per_s=self.pages * PAGE_BYTES / 2**20 / took_s,
            read_us=_percentiles(self.reads),
            write_us=_percentiles(self.writes),
            counted=counted,
            rates=rates(counted, self.pages),
            checked_pages=self.checked,
            by_second=self.by_second,
        )


def _percentiles(found: Latencies) -> dict[str, float]:
    return {
        f"p{percent:g}": round(found.percentile_us(percent), 3) for percent in (50, 95, 99, 99.9)
    }


def rates(counted: Mapping[str, int], pages: int) -> dict[str, float]:
    """`remote`: reads that a lender's memory answered, of all that reached the device. `local`:
    pages touched without a fault. `prefetch`: of the accesses that missed local memory, those that
    the prefetcher had brought or was bringing."""
    found = {}
    if counted.get("read_pages"):
        found["remote"] = counted.get("read_remote_pages", 0) / counted["read_pages"]
    if "faults" in counted:
        found["local"] = max(0.0, 1.0 - counted["faults"] / max(1, pages))
    if counted.get("accesses"):
        found["prefetch"] = counted.get("hits", 0) / counted["accesses"]
    return found


# A block device -----------------------------------------------------------------------------------


class _Device:
    def __init__(self, client: NbdClient, options: PlayOptions) -> None:
        self._client = client
        self._options = options
        self._checker = Checker() if options.check else None
        self._plain = content(1, 1) * _FILL_PAGES
        self._busy: set[int] = set()
        self._freed = asyncio.Condition()
        self.recorder = Recorder()

    async def fill(self) -> None:
        for first in range(0, self._options.pages, _FILL_PAGES):
            count = min(_FILL_PAGES, self._options.pages - first)
            await self._write(first, count)
        await self._client.flush()

    async def request(self, first: int, count: int, write: bool) -> None:
        pages = range(first, first + count)
        if self._checker is not None:
            async with self._freed:
                await self._freed.wait_for(lambda: self._busy.isdisjoint(pages))
                self._busy.update(pages)
        began_ns = time.perf_counter_ns()
        try:
            if write:
                await self._write(first, count)
            else:
                await self._read(first, count)
        finally:
            if self._checker is not None:
                async with self._freed:
                    self._busy.difference_update(pages)
                    self._freed.notify_all()
        self.recorder.ended(began_ns, count, write)

    async def _read(self, first: int, count: int) -> None:
        data = await self._client.read(first * PAGE_BYTES, count * PAGE_BYTES)
        if self._checker is not None:
            for n in range(count):
                self._checker.check(first + n, data[n * PAGE_BYTES : (n + 1) * PAGE_BYTES])
            self.recorder.checked += count

    async def _write(self, first: int, count: int) -> None:
        if self._checker is None:
            await self._client.write(first * PAGE_BYTES, self._plain[: count * PAGE_BYTES])
            return
        begun = [self._checker.begin(page) for page in range(first, first + count)]
        await self._client.write(first * PAGE_BYTES, b"".join(data for _, data in begun))
        for n, (generation, _) in enumerate(begun):
            self._checker.acknowledged(first + n, generation)


async def play_device(socket: Path, options: PlayOptions, counters: Counters = dict) -> PlayResult:
    """Raises Unavailable, OSError with the server's errno, ConfigRejected where the device is too
    small, WrongPage."""
    client = await NbdClient.connect(socket)
    try:
        if options.pages * PAGE_BYTES > client.size:
            raise ConfigRejected(
                f"the device has {client.size} bytes, {options.pages * PAGE_BYTES} are asked for"
            )
        device = _Device(client, options)
        if options.fill:
            await device.fill()
        stream = workload(options.workload, options.pages, options.seed)
        before, device.recorder = counters(), Recorder()
        ends_s = time.monotonic() + options.seconds
        source = _Source(stream, ends_s)
        async with asyncio.TaskGroup() as group:
            for _ in range(options.depth):
                group.create_task(_worker(device, source))
        return device.recorder.result(options, before, counters())
    finally:
        await client.close()


async def _worker(device: _Device, source: "_Source") -> None:
    while (asked := source.next()) is not None:
        await device.request(*asked)


class _Source:
    """One stream for all workers."""

    def __init__(self, stream: Workload, ends_s: float) -> None:
        self._stream, self._ends_s = stream, ends_s
        self._batch: Requests | None = None
        self._at = 0

    def next(self) -> tuple[int, int, bool] | None:
        if self._batch is None or self._at == len(self._batch.first):
            self._batch, self._at = self._stream.batch(BATCH), 0
        if time.monotonic() >= self._ends_s:
            return None
        at = self._at
        self._at += 1
        batch = self._batch
        return int(batch.first[at]), int(batch.count[at]), bool(batch.write[at])


# An array -----------------------------------------------------------------------------------------


class PagedArray(Protocol):
    """The part of `RemoteArray` that a play uses: pages as rows of bytes."""

    @property
    def array(self) -> NDArray[np.uint8]: ...

    def figures(self) -> dict[str, int]: ...


def play_array(remote: PagedArray, options: PlayOptions) -> PlayResult:
    """`remote` has `options.pages` rows of 4096 bytes. Raises WrongPage."""
    pages = remote.array
    checker = Checker()
    plain = np.frombuffer(content(1, 1), np.uint8)
    target = np.empty(PAGE_BYTES, np.uint8)

    def write(page: int) -> None:
        if not options.check:
            pages[page] = plain
            return
        generation, data = checker.begin(page)
        pages[page] = np.frombuffer(data, np.uint8)
        checker.acknowledged(page, generation)

    if options.fill:
        for page in range(options.pages):
            write(page)
    stream = workload(options.workload, options.pages, options.seed)
    source = _Source(stream, time.monotonic() + options.seconds)
    before, recorder = _counters(remote), Recorder()
    while (asked := source.next()) is not None:
        first, count, changes = asked
        began_ns = time.perf_counter_ns()
        for page in range(first, first + count):
            if changes:
                write(page)
                continue
            target[:] = pages[page]
            if options.check:
                checker.check(page, target.tobytes())
                recorder.checked += 1
        recorder.ended(began_ns, count, changes)
    return recorder.result(options, before, _counters(remote))


def _counters(remote: PagedArray) -> dict[str, int]:
    """Return the counters that grow; the other figures are of one moment."""
    found = remote.figures()
    return {name: found[name] for name in found if name not in ("resident", "remote_pages")}
