"""Coded spans on model lenders in virtual time: what is lost, damaged, late or away never gives
wrong bytes, and up to r of it gives right ones (Hydra, 4.1 and 4.4)."""

import asyncio
import itertools
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.background import Background
from slackwater.common.base.errors import AccessRefused, ConfigRejected, Unavailable
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.memory.pages.table import page_range
from slackwater.memory.resilience.coding import ErasureCode
from slackwater.memory.resilience.hydra import Hydra
from slackwater.memory.resilience.late_binding import ReadPlan, WritePlan
from slackwater.memory.resilience.replication import Copies
from slackwater.memory.resilience.resilience import resilience
from slackwater.memory.store import PAGE_BYTES, Pages, PagesLost
from slackwater.schemas.memory import LenderId

SPAN = 3
PAGES = 12


class Lender:
    """A slab whose requests take as long as `delay_s` says; `alive` until it is killed."""

    def __init__(self, nbytes: int, *, mapped: bool = False) -> None:
        self.lender = LenderId("x")
        self.memory = np.zeros(nbytes, np.uint8)
        self.nbytes = nbytes
        self.mapped = self.memory.data if mapped else None
        self.alive = True
        self.delay_s = lambda: 0.0
        self.reads = 0

    def intact(self) -> bool:
        return self.alive

    async def read(self, offsets: Sequence[int], length: int, target: memoryview) -> None:
        self.reads += 1
        await asyncio.sleep(self.delay_s())
        self._check()
        for i, offset in enumerate(offsets):
            target[i * length : (i + 1) * length] = self.memory[offset : offset + length].data

    async def write(self, offsets: Sequence[int], length: int, source: memoryview) -> None:
        kept = bytes(source)
        await asyncio.sleep(self.delay_s())
        self._check()
        for i, offset in enumerate(offsets):
            part = kept[i * length : (i + 1) * length]
            self.memory[offset : offset + length] = np.frombuffer(part, np.uint8)

    def _check(self) -> None:
        if not self.alive:
            raise Unavailable("killed")


class Span:
    """A coded span and what was written to it."""

    def __init__(self, name: str = "8+2", *, mapped: bool = False) -> None:
        strategy = resilience(name, Background())
        assert isinstance(strategy, Hydra)
        self.hydra = strategy
        self.slab_bytes = self.hydra.slot_bytes * PAGES
        assert self.hydra.span_pages(self.slab_bytes) == PAGES
        self.mapped = mapped
        self.members: list[Lender | None] = [self.lender() for _ in range(self.hydra.width)]

    def lender(self) -> Lender:
        return Lender(self.slab_bytes, mapped=self.mapped)

    async def write(self, pages: Pages, data: bytes) -> None:
        await self.hydra.write(SPAN, self.members, pages, memoryview(data))

    async def read(self, pages: Pages) -> bytes:
        target = bytearray(len(pages) * PAGE_BYTES)
        await self.hydra.read(SPAN, list(self.members), pages, memoryview(target))
        return bytes(target)

    def damage(self, index: int, page: int, at: int = 100) -> None:
        member = self.members[index]
        assert member is not None
        member.memory[page * self.hydra.slot_bytes + at] ^= 0x40


def some(count: int, seed: int = 7) -> bytes:
    return random.Random(seed).randbytes(count * PAGE_BYTES)


def simulated(work: Coroutine[Any, Any, None]) -> None:
    run_simulated(work)


BOTH = pytest.mark.parametrize("mapped", [False, True], ids=["channel", "mapped"])


@BOTH
def test_any_two_of_ten_lenders_may_go(mapped: bool) -> None:
    """All 45 pairs: no byte is lost."""

    async def run() -> None:
        every, data = page_range(0, PAGES), some(PAGES)
        for pair in itertools.combinations(range(10), 2):
            span = Span(mapped=mapped)
            await span.write(every, data)
            for index in pair:
                lost = span.members[index]
                assert lost is not None
                lost.alive = False
            assert await span.read(every) == data
            for index in pair:
                span.members[index] = None
            assert await span.read(every) == data

    simulated(run())


@BOTH
@pytest.mark.parametrize("at", [0, 8, 12, 100], ids=["generation", "crc", "tag", "data"])
def test_a_damaged_fragment_is_made_up_for(mapped: bool, at: int) -> None:
    async def run() -> None:
        span, data = Span(mapped=mapped), some(PAGES)
        await span.write(page_range(0, PAGES), data)
        for index in range(10):
            span.damage(index, index, at)
        assert await span.read(page_range(0, PAGES)) == data
        assert span.hydra.erasures >= 8
        assert span.hydra.lost_pages == 0

    simulated(run())


@pytest.mark.parametrize("lost", [(), (0,), (3, 9), (8, 9), (0, 1)], ids=str)
def test_mapped_members_that_are_well_need_no_plan(lost: tuple[int, ...]) -> None:
    """No member is asked in rounds; a damaged fragment is found all the same, and another member's
    is taken instead, as long as there is one."""

    async def story() -> None:
        span = Span(mapped=True)
        pages, data = page_range(0, PAGES), some(PAGES)
        await span.write(pages, data)
        for index in lost:
            span.members[index] = None
        planned = 0
        gather = span.hydra._gather

        async def counted(*arguments: Any) -> Any:
            nonlocal planned
            planned += 1
            return await gather(*arguments)

        span.hydra._gather = counted  # type: ignore[method-assign]
        assert await span.read(pages) == data
        assert await span.read(pages[[5, 2]]) == data[5 * 4096 : 6 * 4096] + data[8192 : 3 * 4096]
        assert planned == 0
        if len(lost) < 2:
            span.damage(4, 7)
            assert await span.read(pages) == data
            assert planned == 0
            assert span.hydra.erasures == 1

    simulated(story())


def test_a_new_member_is_left_out_until_it_is_needed() -> None:
    """It lacks every page: it is tried once, not by every read; regenerated, it serves."""

    async def story() -> None:
        span = Span(mapped=True)
        pages, data = page_range(0, PAGES), some(PAGES)
        await span.write(pages, data)
        span.members[0] = span.lender()
        members, target = list(span.members), bytearray(len(data))

        async def read() -> bytes:
            await span.hydra.read(SPAN, members, pages, memoryview(target))
            return bytes(target)

        for _ in range(3):
            assert await read() == data
        assert span.hydra.erasures == 1
        span.damage(4, 7)
        for _ in range(3):
            assert await read() == data
        assert span.hydra.erasures == 2
        assert await span.hydra.regenerate(SPAN, members, 0, pages) == PAGES
        span.damage(5, 7)
        span.damage(6, 8)
        for _ in range(3):
            assert await read() == data, "page 7 needs the new member"
        members = [None if index in (4, 5) else one for index, one in enumerate(members)]
        with pytest.raises(PagesLost):
            await read()
        span.damage(6, 8)
        assert await read() == data, "it serves"

    simulated(story())


@BOTH
def test_two_lost_and_one_damaged_is_told(mapped: bool) -> None:
    async def run() -> None:
        every, data = page_range(0, PAGES), some(PAGES)
        for pair in itertools.combinations(range(10), 2):
            span = Span(mapped=mapped)
            await span.write(every, data)
            left = [i for i in range(10) if i not in pair]
            for index in pair:
                span.members[index] = None
            span.damage(left[pair[0] % 8], 5)
            with pytest.raises(PagesLost, match="1 pages of span 3") as told:
                await span.read(every)
            assert told.value.pages.tolist() == [5]
            others = np.delete(every, 5)
            expected = data[: 5 * PAGE_BYTES] + data[6 * PAGE_BYTES :]
            assert await span.read(others) == expected

    simulated(run())


def test_fragments_that_are_whole_but_of_another_place_do_not_count() -> None:
    """A page's fragments copied over another's, or a member's over another's, are erasures."""

    async def run() -> None:
        span, data = Span(), some(PAGES)
        await span.write(page_range(0, PAGES), data)
        size = span.hydra.slot_bytes
        first, second = span.members[:2]
        assert first is not None
        assert second is not None
        first.memory[:size] = first.memory[size : 2 * size]
        second.memory[2 * size : 3 * size] = first.memory[2 * size : 3 * size]
        assert await span.read(page_range(0, PAGES)) == data
        assert span.hydra.erasures >= 2

    simulated(run())


def test_a_member_that_missed_a_write_never_gives_old_bytes() -> None:
    """With two copies it is the only one left: an error, not what was there before."""

    async def run() -> None:
        span, page = Span("2-copies"), page_range(4, 1)
        await span.write(page, some(1, 1))
        away = span.members[0]
        span.members[0] = None
        await span.write(page, some(1, 2))
        span.members = [away, None]
        with pytest.raises(PagesLost):
            await span.read(page)

    simulated(run())


def test_a_page_that_is_written_while_it_is_read_ahead_is_not_lost() -> None:
    """Its fragments are of two writes: that read gives nothing, and names no page as lost."""

    async def run() -> None:
        span, page = Span("2+1"), page_range(4, 1)
        await span.write(page, some(1, 1))
        for member in span.members:
            assert member is not None
            member.delay_s = lambda: 0.001
        reading = asyncio.ensure_future(span.read(page))
        await asyncio.sleep(0.0005)
        writing = asyncio.ensure_future(span.write(page, some(1, 2)))
        for member in span.members:
            assert member is not None
            member.memory[:] = 0  # The writes come first.
        with pytest.raises(PagesLost) as raised:
            await reading
        assert not len(raised.value.pages)
        assert span.hydra.lost_pages == 0
        await writing
        assert await span.read(page) == some(1, 2)

    simulated(run())


def test_the_slow_are_not_waited_for() -> None:
    """Late binding: one of the k + 1 that are asked may take forever; so may r on a write, and
    `settled` is what waits for them."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        span, data = Span(), some(2)
        for member in span.members:
            assert member is not None
            member.delay_s = lambda: 0.001
        slow = span.members[3], span.members[9]
        for member in slow:
            assert member is not None
            member.delay_s = lambda: 5.0
        begun_s = loop.time()
        await span.write(page_range(0, 2), data)
        assert loop.time() - begun_s == pytest.approx(0.001)
        await span.hydra.settled(SPAN, page_range(0, 1))
        assert loop.time() - begun_s == pytest.approx(5.0)
        begun_s = loop.time()
        assert await span.read(page_range(0, 2)) == data
        assert loop.time() - begun_s == pytest.approx(0.001)
        await span.hydra.quiet(SPAN)
        assert loop.time() - begun_s == pytest.approx(5.0)

    simulated(run())


@pytest.mark.parametrize("name", ["8+2", "2-copies"])
def test_a_later_write_may_settle_before_an_earlier_one(name: str) -> None:
    """A channel has several streams, and acknowledgements keep their order on each alone."""

    async def run() -> None:
        span, loop = Span(name), asyncio.get_running_loop()
        failures: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        members = [member for member in span.members if member is not None]
        for member in members:
            member.delay_s = lambda: 5.0
        early = asyncio.ensure_future(span.write(page_range(0, 2), some(2, 1)))
        await asyncio.sleep(0.01)
        for member in members:
            member.delay_s = lambda: 0.001
        await span.write(page_range(2, 3), some(3, 2))
        async with asyncio.timeout(60):
            await span.hydra.settled(SPAN, page_range(2, 3))
            assert loop.time() < 1.0
            await early
            await span.hydra.settled(SPAN, page_range(0, PAGES))
        assert await span.read(page_range(0, 5)) == some(2, 1) + some(3, 2)
        assert failures == []

    simulated(run())


def test_data_fragments_are_asked_first_and_one_parity() -> None:
    async def run() -> None:
        span = Span()
        await span.write(page_range(0, 1), some(1))
        await span.read(page_range(0, 1))
        assert [member.reads for member in span.members if member is not None] == [1] * 9 + [0]

    simulated(run())


@BOTH
@pytest.mark.parametrize("name", ["8+2", "2-copies"])
def test_a_new_member_is_given_what_it_lacks(mapped: bool, name: str) -> None:
    async def run() -> None:
        span, data = Span(name, mapped=mapped), some(8)
        await span.write(page_range(0, 8), data)
        before = [member.memory.copy() for member in span.members if member is not None]
        for index in range(span.hydra.width):
            span.members[index] = span.lender()
            written = span.hydra.written(SPAN)
            assert await span.hydra.regenerate(SPAN, span.members, index, written) == 8
            assert await span.hydra.regenerate(SPAN, span.members, index, written) == 0
            made = span.members[index]
            assert made is not None
            assert (made.memory == before[index]).all()
        assert await span.read(page_range(0, 8)) == data

    simulated(run())


def test_what_cannot_be_made_whole_is_not_made_up() -> None:
    async def run() -> None:
        span = Span()
        await span.write(page_range(0, 2), some(2))
        span.members[0] = span.lender()
        span.damage(1, 1)
        span.damage(2, 1)
        assert await span.hydra.regenerate(SPAN, span.members, 0, page_range(0, 2)) == 1
        with pytest.raises(PagesLost) as told:
            await span.read(page_range(0, 2))
        assert told.value.pages.tolist() == [1]

    simulated(run())


def test_a_write_that_too_few_take_fails_and_the_page_is_lost() -> None:
    async def run() -> None:
        span = Span()
        await span.write(page_range(0, 2), some(2))
        for member in span.members[:3]:
            assert member is not None
            member.alive = False
        with pytest.raises(PagesLost, match="fewer than 8"):
            await span.write(page_range(0, 1), some(1, 2))
        for member in span.members[:3]:
            assert member is not None
            member.alive = True
        with pytest.raises(PagesLost):
            await span.read(page_range(0, 1))
        assert await span.read(page_range(1, 1)) == some(2)[PAGE_BYTES:]

    simulated(run())


def test_nobody_is_asked_for_what_was_never_written() -> None:
    async def run() -> None:
        with pytest.raises(PagesLost):
            await Span().read(page_range(0, 1))

    simulated(run())


class Story:
    """Random writes, reads, losses, returns, damage and regeneration, at random speeds. The model
    is what was written last; a page is held (not read) until every member has answered."""

    def __init__(self, seed: int, name: str) -> None:
        self.rng = random.Random(seed)
        self.span = Span(name)
        self.newest: dict[int, bytes] = {}
        self.flying: set[int] = set()
        self.wrong = 0
        self.right = 0
        self.told = 0
        for member in self.span.members:
            assert member is not None
            self._random_speed(member)

    def _random_speed(self, member: Lender) -> None:
        rng = random.Random(self.rng.random())
        member.delay_s = lambda: rng.expovariate(1000.0)

    async def writer(self) -> None:
        for number in range(40):
            page = self.rng.randrange(PAGES)
            if page not in self.flying:
                await self._write(page, number)
            await asyncio.sleep(self.rng.expovariate(300.0))

    async def _write(self, page: int, number: int) -> None:
        data = some(1, number)
        self.flying.add(page)
        members = list(self.span.members)
        try:
            await self.span.hydra.write(SPAN, members, page_range(page, 1), memoryview(data))
            self.newest[page] = data
        except PagesLost:
            self.newest.pop(page, None)
        held = asyncio.ensure_future(self.span.hydra.settled(SPAN, page_range(page, 1)))
        held.add_done_callback(lambda _: self.flying.discard(page))

    async def reader(self) -> None:
        for _ in range(60):
            await asyncio.sleep(self.rng.expovariate(500.0))
            page = self.rng.randrange(PAGES)
            expected = self.newest.get(page)
            if page in self.flying or expected is None:
                continue
            try:
                found = await self.span.read(page_range(page, 1))
            except PagesLost:
                self.told += page not in self.flying and self.newest.get(page) is expected
                continue
            if page in self.flying or self.newest.get(page) is not expected:
                continue  # Written meanwhile: either is right.
            self.right += found == expected
            self.wrong += found != expected

    async def trouble(self, losses: int) -> None:
        for _ in range(losses):
            await asyncio.sleep(self.rng.expovariate(100.0))
            index = self.rng.randrange(self.span.hydra.width)
            member = self.span.members[index]
            what = self.rng.choice(("kill", "away", "damage"))
            if member is None:
                continue
            if what == "damage":
                self.span.damage(
                    index, self.rng.randrange(PAGES), self.rng.randrange(self.span.hydra.slot_bytes)
                )
                continue
            self.span.members[index] = None
            member.alive = what == "away"
            await asyncio.sleep(self.rng.expovariate(100.0))
            back = member if what == "away" else self.span.lender()
            self._random_speed(back)
            self.span.members[index] = back
            written = self.span.hydra.written(SPAN)
            await self.span.hydra.regenerate(SPAN, list(self.span.members), index, written)

    async def run(self, losses: int) -> None:
        await asyncio.gather(self.writer(), self.reader(), self.trouble(losses))
        await self.span.hydra.quiet(SPAN)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    losses=st.integers(0, 12),
    name=st.sampled_from(["8+2", "4+2", "2+1", "2-copies"]),
)
def test_right_or_told_whatever_happens(seed: int, losses: int, name: str) -> None:
    story = Story(seed, name)
    simulated(story.run(losses))
    assert story.wrong == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_one_trouble_at_a_time_is_never_felt(seed: int) -> None:
    """8 + 2 with each lost member given back before the next one goes: no read fails."""
    story = Story(seed, "8+2")
    story.rng.choice = lambda options: options[0]  # type: ignore[method-assign, assignment]
    simulated(story.run(6))
    assert (story.wrong, story.told) == (0, 0)


# The plans ----------------------------------------------------------------------------------------


@given(st.data())
def test_a_read_ends_right_when_it_can(data: st.DataObject) -> None:
    """Against the definition: whole iff `needed` members have it; nobody is asked twice; it goes on
    as long as there is hope."""
    needed, spare = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 3))
    width = needed + spare
    able = data.draw(st.permutations(range(width)))[: data.draw(st.integers(0, width))]
    pages = data.draw(st.integers(1, 4))
    draw = st.lists(st.booleans(), min_size=pages, max_size=pages)
    truth = {index: np.array(data.draw(draw)) for index in able}
    plan = ReadPlan(able, pages, needed, width, data.draw(st.integers(0, 2)))
    asked, waiting = [], plan.begin()
    asked += waiting
    while waiting and not plan.done:
        index = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        more = plan.answered(index, truth[index]) if truth[index].any() else plan.failed(index)
        asked += more
        waiting += more
    assert len(asked) == len(set(asked))
    count = sum(truth.values(), np.zeros(pages, np.int64))
    assert plan.done == bool((count >= needed).all())
    assert plan.hopeless == (not plan.done)
    if plan.done:
        seen = set()
        for chosen, which in plan.groups():
            assert len(chosen) == needed
            for page in which.tolist():
                assert all(truth[index][page] for index in chosen)
                seen.add(page)
        assert seen == set(range(pages))


@given(st.integers(1, 8), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_write_counts_with_the_kth_acknowledgement(
    needed: int, spare: int, rng: random.Random
) -> None:
    members = list(range(needed + spare))
    plan = WritePlan(members, needed)
    rng.shuffle(members)
    taken = 0
    for done, index in enumerate(members, 1):
        arrived = rng.random() < 0.8
        taken += arrived
        plan.answered(index, arrived)
        assert plan.acknowledged == (taken >= needed)
        assert plan.lost == (done - taken > spare)
    assert plan.settled


# Costs, and options that are refused --------------------------------------------------------------


def test_memory_is_at_most_1_30_times_the_pages() -> None:
    hydra = Hydra("8+2", ErasureCode(8, 2), Background())
    slab = 1024**3
    taken = 10 * (slab + PAGE_BYTES)
    assert taken / (hydra.span_pages(slab) * PAGE_BYTES) < 1.30
    copies = Hydra("2-copies", Copies(2), Background())
    assert 2.0 < 2 * slab / (copies.span_pages(slab) * PAGE_BYTES) < 2.01


@pytest.mark.parametrize("name", ["disk", "8+2", "4+2", "2-copies"])
def test_names_are_kept(name: str) -> None:
    assert resilience(name, Background()).name == name


@pytest.mark.parametrize("name", ["", "raid", "3+2", "8+", "1-copies", "8+2 "])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigRejected):
        resilience(name, Background())


def test_a_slab_taken_away_under_a_write_does_not_count() -> None:
    async def run() -> None:
        span, data = Span(mapped=True), some(1)
        for member in span.members[:2]:
            assert member is not None
            member.alive = False
        await span.write(page_range(0, 1), data)
        assert await span.read(page_range(0, 1)) == data
        with pytest.raises((Unavailable, AccessRefused)):
            await span.hydra.regenerate(SPAN, span.members, 0, page_range(0, 1))

    simulated(run())
