"""Where a read is sent, the newest bytes are: against a model that knows the last write only."""

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.unit.memory.page_states import one_step

from slackwater.common.domains.memory import trailer
from slackwater.loadgen.memory.checker import content
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import (
    prefetch_cache,
    prefetch_kernels,
    refill_kernels,
    states,
    writeback,
)
from slackwater.memory.pages.table import counters, make_table, page_range, runs
from slackwater.memory.store import PAGE_BYTES

SPAN_PAGES, SPANS, SLOTS = 4, 3, 8
PAGES = SPAN_PAGES * SPANS
FENCE = trailer.fence(trailer.LENT, 1)


class Device:
    """A table, a file, and slabs: mapped ones, or ones that only a channel reaches."""

    def __init__(self, path: Path) -> None:
        self.table = make_table(PAGES, SPAN_PAGES, slots=SLOTS, places=prefetch_cache.WAYS)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.fd, PAGES * PAGE_BYTES)
        self.slabs: dict[int, np.ndarray] = {}
        self.flying: list[tuple[int, int]] = []
        self.ahead: list[tuple[int, np.ndarray, np.ndarray]] = []
        """Prefetches under way: page, place, ticket."""
        self.read: list[tuple[int, np.ndarray, np.ndarray, bytes | None]] = []
        """Prefetches that have read their bytes, which are not here yet."""
        self.refill: tuple[int, int, bytes | None] | None = None
        """The one under way: its first page, the entries that it waits for, the file's bytes."""
        self.newest = dict.fromkeys(range(PAGES), 0)
        self.generation = 0
        self.alone = True
        """No other thread changes the table meanwhile."""

    def close(self) -> None:
        os.close(self.fd)

    def step(self, cause: str) -> AbstractContextManager[None]:
        """One kernel is run, for this cause."""
        return one_step(self.table, cause) if self.alone else nullcontext()

    def write(self, page: int) -> None:
        self.generation += 1
        kinds = np.zeros(1, np.int64)
        data = memoryview(content(page, self.generation))
        with self.step("write"):
            first = k.write_pages(self.table, page_range(page, 1), k.address(data), kinds, 0, -1)
        if first < 0:
            assert first == -1, "the ring is full, nothing else"
            return
        self.newest[page] = self.generation
        if kinds[0] == k.REMOTE:
            self.flying.append((first, page))

    def land(self, arrives: bool) -> None:
        """The oldest write on a channel ends."""
        if not self.flying:
            return
        entry, page = self.flying.pop(0)
        slab = self.slabs.get(page // SPAN_PAGES)
        if arrives and slab is not None:
            slot = entry % SLOTS
            held = self.table.ring[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES]
            at = page % SPAN_PAGES * PAGE_BYTES
            slab[at : at + PAGE_BYTES] = held
        with self.step("landed"):
            k.landed(self.table, np.array([entry]), np.array([arrives and slab is not None]))

    def disk(self) -> None:
        if self.table.words[k.TAKEN] < self.table.words[k.HEAD]:
            writeback.watch(self.table, 1)
            with self.step("stored"):
                why = writeback.write_back(self.table, self.fd)
            if why == writeback.DISCARDS:
                slot = self.table.words[k.TAKEN] % SLOTS
                first, count = self.table.slot_page[slot], self.table.slot_count[slot]
                os.pwrite(self.fd, bytes(count * PAGE_BYTES), first * PAGE_BYTES)
                with self.step("let_go"):
                    writeback.discarded(self.table)

    def discard(self, first: int, count: int) -> None:
        """Discard as the device does it: the caller waits until it is done."""
        with self.step("discard"):
            entry = k.discard(self.table, first, count)
        if entry < 0:
            return
        while self.table.words[k.TAKEN] < self.table.words[k.HEAD]:
            self.disk()
        for page in range(first, first + count):
            self.newest[page] = 0

    def map(self, span: int, mapped: bool) -> None:
        """A fresh slab; the driver maps only spans that have none and whose requests are over."""
        if span in self.slabs or any(page // SPAN_PAGES == span for _, page in self.flying):
            return
        suspended = self.table.state[span] == states.SUSPENDED
        if suspended:
            return
        slab = np.zeros(SPAN_PAGES * PAGE_BYTES + trailer.TRAILER_BYTES, np.uint8)
        slab.view(np.uint64)[SPAN_PAGES * PAGE_BYTES // 8] = FENCE
        self.slabs[span] = slab
        base = k.address(slab) if mapped else 0
        with self.step("mapped"):
            k.map_span(self.table, span, base, base + SPAN_PAGES * PAGE_BYTES, FENCE)

    def leave(self, span: int) -> None:
        with self.step("left"):
            k.leave_span(self.table, span, states.UNMAPPED)
        self.slabs.pop(span, None)

    def suspend_and_resume(self, span: int, writes: list[int]) -> None:
        """Between the two, pages are written; what was not, must still be right."""
        slab = self.slabs.get(span)
        if slab is None:
            return
        mapped = bool(self.table.base[span])
        with self.step("left"):
            k.leave_span(self.table, span, states.SUSPENDED)
        while any(page // SPAN_PAGES == span for _, page in self.flying):
            self.land(False)
        for page in writes:
            self.write(page)
            self.check()
        base = k.address(slab) if mapped else 0
        with self.step("mapped"):
            k.map_span(self.table, span, base, base + SPAN_PAGES * PAGE_BYTES, FENCE)

    def revoke(self, span: int) -> None:
        """The lender takes it by force: fence, then the data. Then the device notices."""
        slab = self.slabs.get(span)
        if slab is None or not self.table.base[span]:
            return
        slab.view(np.uint64)[SPAN_PAGES * PAGE_BYTES // 8] = trailer.fence(trailer.REVOKED, 1)
        slab[: SPAN_PAGES * PAGE_BYTES] = 0
        self.check()
        self.leave(span)

    def forget(self, page: int) -> None:
        """A slab has lost a page that the file has."""
        if self.table.pending[page] == 0:
            with self.step("forgotten"):
                k.forget_pages(self.table, page_range(page, 1))

    def refill_begins(self, span: int) -> None:
        if self.refill is None:
            with self.step("refill"):
                marked, entries = refill_kernels.mark(self.table, span * SPAN_PAGES, SPAN_PAGES)
            self.refill = (span * SPAN_PAGES, entries, None) if marked else None

    def refill_reads(self) -> None:
        """The file, once what was queued before is in it."""
        if self.refill is not None and self.table.words[k.TAKEN] >= self.refill[1]:
            first, entries, _ = self.refill
            found = os.pread(self.fd, SPAN_PAGES * PAGE_BYTES, first * PAGE_BYTES)
            self.refill = (first, entries, found)

    def refill_ends(self) -> None:
        if self.refill is None:
            return
        first, _, found = self.refill
        self.refill = None
        data = memoryview(found or bytes(SPAN_PAGES * PAGE_BYTES))
        with self.step("refilled"):
            _, entry, sent = refill_kernels.store(
                self.table, first, SPAN_PAGES, k.address(data), found is not None
            )
        for number in range(entry, entry + sent):
            self.flying.append((number, int(self.table.slot_page[number % SLOTS])))
        assert not (self.table.mark == states.FILLING).any()

    def prefetch(self, page: int) -> None:
        place, ticket = np.zeros(1, np.int64), np.zeros(1, np.int64)
        with self.step("reserve"):
            prefetch_kernels.reserve(self.table, page_range(page, 1), place, ticket)
        if ticket[0]:
            assert self.table.mark[page] == states.PRESENT
            self.ahead.append((page, place, ticket))

    def fetch(self) -> None:
        """The oldest prefetch reads what remote memory has at this moment, if it has anything."""
        if not self.ahead:
            return
        page, place, ticket = self.ahead.pop(0)
        slab, at = self.slabs.get(page // SPAN_PAGES), page % SPAN_PAGES * PAGE_BYTES
        found = None if slab is None else bytes(slab[at : at + PAGE_BYTES])
        self.read.append((page, place, ticket, found))

    def arrive(self) -> None:
        if not self.read:
            return
        _, place, ticket, found = self.read.pop(0)
        data = memoryview(found or bytes(PAGE_BYTES))
        came = np.array([found is not None])
        with self.step("arrive"):
            prefetch_kernels.store(self.table, place, ticket, k.address(data), came)

    def consume(self, page: int) -> None:
        """A client reads the page: prefetched, it is right, and gone afterwards."""
        target, where = np.zeros(PAGE_BYTES, np.uint8), np.zeros(1, np.int64)
        with self.step("read"):
            k.read_pages(self.table, page_range(page, 1), k.address(target), where, True)
        if where[0] == k.DONE:
            assert bytes(target) == content(page, self.newest[page])
            at = np.flatnonzero(
                (self.table.prefetched.page == page) & (self.table.prefetched.ticket != 0)
            )
            assert not (self.table.prefetched.state[at] & states.READY).any()

    def check(self) -> None:
        """Every page; what is prefetched stays, though it was read."""
        words = self.table.prefetched.words
        assert words[prefetch_cache.TAKEN] == np.count_nonzero(self.table.prefetched.ticket)
        kept = [(part, part.copy()) for part in self.table.prefetched[:4]]
        try:
            self._check()
        finally:
            for part, before in kept:
                part[:] = before

    def _check(self) -> None:
        target = np.zeros(PAGES * PAGE_BYTES, np.uint8)
        where = np.zeros(PAGES, np.int64)
        k.read_pages(self.table, page_range(0, PAGES), k.address(target), where, False)
        for page in range(PAGES):
            expected = content(page, self.newest[page])
            if where[page] == k.DONE:
                found = bytes(target[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
            elif where[page] == k.DISK:
                found = os.pread(self.fd, PAGE_BYTES, page * PAGE_BYTES)
            elif where[page] == k.REMOTE:
                at = page % SPAN_PAGES * PAGE_BYTES
                found = bytes(self.slabs[page // SPAN_PAGES][at : at + PAGE_BYTES])
            else:
                assert where[page] == k.BROKEN
                continue
            assert found == expected, (page, where[page])


page = st.integers(0, PAGES - 1)
span = st.integers(0, SPANS - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), page),
        st.tuples(st.just("write"), page),
        st.tuples(st.just("write"), page),
        st.tuples(st.just("disk")),
        st.tuples(st.just("land"), st.booleans()),
        st.tuples(st.just("map"), span, st.booleans()),
        st.tuples(st.just("leave"), span),
        st.tuples(st.just("suspend_and_resume"), span, st.lists(page, max_size=3)),
        st.tuples(st.just("revoke"), span),
        st.tuples(st.just("discard"), page, st.just(1)),
        st.tuples(st.just("forget"), page),
        st.tuples(st.just("prefetch"), page),
        st.tuples(st.just("fetch")),
        st.tuples(st.just("arrive")),
        st.tuples(st.just("consume"), page),
    ),
    max_size=60,
)
AHEAD = st.lists(
    st.one_of(
        st.tuples(st.just("write"), page),
        st.tuples(st.just("disk")),
        st.tuples(st.just("land"), st.just(True)),
        st.tuples(st.just("map"), span, st.just(False)),
        st.tuples(st.just("leave"), span),
        st.tuples(st.just("suspend_and_resume"), span, st.lists(page, max_size=2)),
        st.tuples(st.just("discard"), page, st.just(1)),
        st.tuples(st.just("forget"), page),
        *[st.tuples(st.just("prefetch"), page)] * 3,
        *[st.tuples(st.just("fetch")), st.tuples(st.just("arrive"))] * 3,
        st.tuples(st.just("consume"), page),
    ),
    max_size=60,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_a_read_is_sent_where_the_newest_bytes_are(
    steps: list[tuple], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every step is one that the table of states lists, here and below (page_states.py)."""
    play(Device(tmp_path_factory.mktemp("d") / "backup"), steps)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(steps=AHEAD)
@example(steps=[("prefetch", 4), ("leave", 1), ("map", 1, False)])  # It read from the new slab.
def test_a_prefetched_page_is_never_an_old_one(
    steps: list[tuple], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every span behind a channel, its pages there; then prefetches at every stage while pages are
    written, let go, and spans come and go."""
    device = Device(tmp_path_factory.mktemp("d") / "backup")
    for number in range(SPANS):
        device.map(number, False)
    for number in range(PAGES):
        device.write(number)
        device.land(True)
        device.disk()
    play(device, steps)


REFILL = st.lists(
    st.one_of(
        *[st.tuples(st.just("write"), page)] * 2,
        *[st.tuples(st.just("disk"))] * 2,
        st.tuples(st.just("land"), st.booleans()),
        st.tuples(st.just("map"), span, st.booleans()),
        st.tuples(st.just("leave"), span),
        st.tuples(st.just("suspend_and_resume"), span, st.lists(page, max_size=2)),
        st.tuples(st.just("revoke"), span),
        st.tuples(st.just("discard"), page, st.just(1)),
        st.tuples(st.just("forget"), page),
        *[st.tuples(st.just("refill_begins"), span)] * 2,
        *[st.tuples(st.just("refill_reads")), st.tuples(st.just("refill_ends"))] * 2,
    ),
    max_size=60,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(steps=REFILL)
def test_a_page_that_comes_back_from_the_file_is_never_an_old_one(
    steps: list[tuple], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every page is in the file alone, in spans mapped and behind a channel; then slabs are filled,
    while pages are written and let go, and spans come and go, between any two of its steps."""
    device = Device(tmp_path_factory.mktemp("d") / "backup")
    for number in range(PAGES):
        device.write(number)
        device.disk()
    for number in range(SPANS):
        device.map(number, number % 2 == 0)
    play(device, steps)


def play(device: Device, steps: list[tuple]) -> None:
    try:
        for name, *arguments in steps:
            if name == "leave":
                while any(p // SPAN_PAGES == arguments[0] for _, p in device.flying):
                    device.land(True)
            getattr(device, name)(*arguments)
            device.check()
        device.refill_ends()
        while device.flying:
            device.land(True)
        while device.table.words[k.TAIL] < device.table.words[k.HEAD]:
            device.disk()
        while device.ahead or device.read:
            device.fetch()
            device.arrive()
        device.check()
        taken = device.table.prefetched.ticket != 0
        assert (device.table.prefetched.state[taken] & states.READY).all(), (
            "no place is kept for nothing"
        )
        assert not device.table.pending.any(), "nothing is held for ever"
    finally:
        device.close()


def test_a_page_that_was_let_go_is_zeros_though_a_slow_member_holds_its_write(
    tmp_path: Path,
) -> None:
    """The write counts, and waits for one member still; then the page is discarded."""
    device = Device(tmp_path / "b")
    device.map(0, False)
    device.write(1)
    device.discard(1, 1)
    assert device.flying
    device.check()
    device.land(True)
    device.check()
    device.close()


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "channel"])
@pytest.mark.parametrize("when", [0, 1], ids=["before the file is read", "after that"])
@pytest.mark.parametrize("change", ["write", "discard", "write and leave"])
def test_what_changes_while_a_slab_is_filled_is_not_filled(
    tmp_path: Path, mapped: bool, when: int, change: str
) -> None:
    device = Device(tmp_path / "b")
    device.write(1)
    device.write(2)
    device.disk()
    device.map(0, mapped)
    device.refill_begins(0)
    if when:
        device.refill_reads()
    if change == "discard":
        device.discard(1, 1)
    else:
        device.write(1)
        device.disk()
    if change == "write and leave":
        while device.flying:
            device.land(True)
        device.leave(0)
        device.map(0, mapped)
        device.check()
    device.refill_reads()
    device.refill_ends()
    device.check()
    while device.flying:
        device.land(True)
    device.check()
    left = change == "write and leave"
    assert device.table.mark[2] == (states.ABSENT if left else states.PRESENT)
    device.close()


def test_a_filled_page_is_not_written_to_the_file_again(tmp_path: Path) -> None:
    device = Device(tmp_path / "b")
    device.write(1)
    device.disk()
    device.map(0, False)
    before = counters(device.table)
    for step in (lambda: device.refill_begins(0), device.refill_reads, device.refill_ends):
        step()
    while device.flying:
        device.land(True)
    device.disk()
    after = counters(device.table)
    assert after["disk_pages"] == before["disk_pages"]
    assert after["written_pages"] == before["written_pages"], "nobody wrote it"
    assert device.table.activity[0] == 1
    assert device.table.mark[1] == states.PRESENT
    device.check()
    device.close()


def test_what_is_prefetched_when_a_write_comes_is_thrown_away(tmp_path: Path) -> None:
    """Before its bytes were read, between that and their arrival, and after it."""
    for stage in range(3):
        device = Device(tmp_path / f"b{stage}")
        device.map(0, False)
        device.write(1)
        device.land(True)
        device.disk()
        device.prefetch(1)
        for step in (device.fetch, device.arrive)[:stage]:
            step()
        device.write(1)
        device.fetch()
        device.arrive()
        device.check()
        assert not device.table.prefetched.words[prefetch_cache.TAKEN]
        assert counters(device.table)["prefetch_changed_pages"] == 1
        device.close()


def test_what_comes_too_late_does_not_lie_in_its_successors_place(tmp_path: Path) -> None:
    """The page is written while it comes, and prefetched again: the place is the same, and what was
    read before the write arrives first."""
    device = Device(tmp_path / "b")
    device.map(0, False)
    for _ in range(2):
        device.write(1)
        device.land(True)
        device.disk()
        device.prefetch(1)
        device.fetch()
    (_, first, _, _), (_, second, _, _) = device.read
    assert first[0] == second[0]
    device.arrive()
    device.check()
    device.arrive()
    device.check()
    assert device.table.prefetched.words[prefetch_cache.TAKEN] == 1
    device.close()


def test_a_prefetched_page_outlives_its_slab(tmp_path: Path) -> None:
    """Its lender takes the slab away; the page is what it was."""
    device = Device(tmp_path / "b")
    device.map(0, False)
    device.write(1)
    device.land(True)
    device.disk()
    device.prefetch(1)
    device.fetch()
    device.arrive()
    device.leave(0)
    target, where = np.zeros(PAGE_BYTES, np.uint8), np.zeros(1, np.int64)
    k.read_pages(device.table, page_range(1, 1), k.address(target), where, True)
    assert where[0] == k.DONE
    assert bytes(target) == content(1, device.newest[1])
    k.read_pages(device.table, page_range(1, 1), k.address(target), where, True)
    assert where[0] == k.DISK, "its copy went with the first read"
    device.close()


def test_a_page_that_is_flying_is_not_sent_a_second_time(tmp_path: Path) -> None:
    """Two writes of one page over a channel could arrive in either order."""
    device = Device(tmp_path / "b")
    device.map(0, False)
    device.write(1)
    device.write(1)
    assert len(device.flying) == 1
    assert device.table.mark[1] == states.STALE
    device.check()
    device.land(True)
    assert device.table.mark[1] == states.ABSENT, "remote memory has the older one"
    device.check()
    device.close()


def test_a_full_ring_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    device = Device(tmp_path / "b")
    for number in range(SLOTS + 3):
        device.write(number % PAGES)
    assert counters(device.table)["dispatch_full"] == 3
    device.check()
    device.disk()
    device.write(0)
    device.check()
    device.close()


def test_neighbours_go_to_disk_in_one_operation_and_only_the_newest(tmp_path: Path) -> None:
    device = Device(tmp_path / "b")
    for number in (3, 1, 2, 2, 0, 7):
        device.write(number)
    device.disk()
    seen = counters(device.table)
    assert (seen["disk_operations"], seen["disk_pages"]) == (2, 5)
    device.check()
    device.close()


def test_a_full_disk_refuses_writes_and_is_tried_again(tmp_path: Path) -> None:
    """/dev/full says what a full disk says. What was taken in stays readable."""
    device = Device(tmp_path / "b")
    device.write(5)
    with open("/dev/full", "wb") as full:
        assert writeback.write_back(device.table, full.fileno()) == writeback.ERROR
    kinds = np.zeros(1, np.int64)
    data = memoryview(content(5, 99))
    assert k.write_pages(device.table, page_range(5, 1), k.address(data), kinds, 0, -1) == -2
    device.check()
    device.disk()
    device.write(5)
    device.check()
    device.close()


def test_a_page_outside_the_device_is_refused(tmp_path: Path) -> None:
    device = Device(tmp_path / "b")
    kinds = np.zeros(1, np.int64)
    data = memoryview(bytes(PAGE_BYTES))
    for number in (-1, PAGES):
        pages = page_range(number, 1)
        assert k.write_pages(device.table, pages, k.address(data), kinds, 0, -1) == -3
        k.read_pages(device.table, pages, k.address(data), kinds, True)
        assert kinds[0] == k.OUTSIDE
    device.close()


def test_threads_that_write_while_spans_come_and_go_tear_no_page(tmp_path: Path) -> None:
    """Four threads write and read whole pages of their own, a fifth maps and leaves, a sixth
    writes back: each page read is one that was written there."""
    device = Device(tmp_path / "b")
    device.alone = False
    stop = threading.Event()
    wrong: list[str] = []

    def use(number: int) -> None:
        target, where = np.zeros(PAGE_BYTES, np.uint8), np.zeros(1, np.int64)
        kinds, newest = np.zeros(1, np.int64), 0
        pages = page_range(number * 3, 1)
        for generation in range(1, 400):
            data = memoryview(content(number * 3, generation))
            if k.write_pages(device.table, pages, k.address(data), kinds, 0, -1) >= 0:
                newest = generation
            k.read_pages(device.table, pages, k.address(target), where, True)
            if where[0] == k.DONE and bytes(target) != content(number * 3, newest):
                wrong.append(f"page {number * 3}, generation {newest}")

    def write_back() -> None:
        writeback.write_back(device.table, device.fd)

    def move() -> None:
        while not stop.is_set():
            for number in range(SPANS):
                device.map(number, True)
            for number in range(SPANS):
                k.leave_span(device.table, number, states.UNMAPPED)
                device.slabs.pop(number, None)

    users = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    others = [threading.Thread(target=move), threading.Thread(target=write_back)]
    for thread in users + others:
        thread.start()
    for thread in users:
        thread.join()
    stop.set()
    others[0].join()
    writeback.stop(device.table)
    others[1].join()
    device.close()
    assert not wrong


def test_runs_are_the_stretches_that_follow_one_another() -> None:
    assert runs(np.array([4, 5, 6, 9, 2, 3])) == [(0, 3), (3, 4), (4, 6)]
    assert runs(np.array([7])) == [(0, 1)]
