"""Reads told apart by address: against a slow obvious splitter, and with Leap behind it."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.memory.pages import streams
from slackwater.memory.prefetch.prefetch import Leap

PAGES = 1 << 24


@dataclass
class Line:
    name: int
    last: int
    step: int
    reads: int = 3


@dataclass
class Splitter:
    """Does what streams.py does, without its filter, its clock and its shortcut."""

    lines: list[Line] = field(default_factory=list)
    """The one that was used longest ago first."""
    recent: list[int] = field(default_factory=list)
    names: int = 0

    def assign(self, page: int) -> tuple[int, bool, int]:
        """(stream, whether it follows a trend, the distance of those before it that are told)."""
        on = [line for line in self.lines if page != line.last and page == line.last + line.step]
        if on and (self._shortest(on).reads >= streams.YOUNG):
            self._remember(-1)
            return self._use(self._shortest(on), page, 1)
        step = self._distance(page)
        self._remember(page)
        if on and (step == 0 or abs(step) >= abs(self._shortest(on).step)):
            return self._use(self._shortest(on), page, 1)
        if step:
            self.names += 1
            self.lines = [*self.lines, Line(self.names, page, step)][-streams.STREAMS :]
            return streams.NOBODY, False, 0
        near = [line for line in self.lines if abs(page - line.last) <= streams.NEAR_PAGES]
        if not near:
            return streams.NOBODY, False, 0
        return self._use(min(near, key=lambda line: abs(page - line.last)), page, 0)

    def _remember(self, page: int) -> None:
        self.recent = [*self.recent, page][-streams.RECENT :]

    def _distance(self, page: int) -> int:
        known = {one for one in self.recent if one >= 0}
        steps = [page - one for one in known if page != one and 2 * one - page in known]
        return min(steps, key=abs, default=0)

    @staticmethod
    def _shortest(lines: Sequence[Line]) -> Line:
        return min(lines, key=lambda line: abs(line.step))

    def _use(self, line: Line, page: int, on: int) -> tuple[int, bool, int]:
        self.lines.remove(line)
        self.lines.append(line)
        line.last, line.reads = page, line.reads + on
        if line.reads < streams.KNOWN:
            return streams.NOBODY, False, 0
        begun = on and line.reads == streams.KNOWN
        return line.name, bool(on), line.step if begun else 0


def assigned(known: streams.Streams, page: int) -> tuple[int, bool, int]:
    name = int(streams.assign(known, page))
    return name, bool(known.words[streams.FOLLOWS]), int(known.words[streams.BEGUN])


@st.composite
def _mixes(draw: st.DrawFn) -> list[int]:
    """Scans that take turns in any order, with strays in between."""
    scans = draw(
        st.lists(st.tuples(st.integers(500, 3000), st.sampled_from([1, 2, 7, -3, 64])), max_size=9)
    )
    turns = draw(st.lists(st.integers(-1, len(scans) - 1), max_size=250))
    rng = random.Random(draw(st.integers(0, 99)))
    at = [first for first, _ in scans]
    pages = []
    for turn in turns:
        if turn < 0:
            pages.append(rng.randrange(4000))
        else:
            pages.append(max(0, at[turn]))
            at[turn] += scans[turn][1]
    return pages


@settings(max_examples=300)
@given(_mixes())
def test_every_read_goes_where_the_slow_splitter_puts_it(pages: list[int]) -> None:
    """Where several lines are equally good the two may choose differently: the example ends."""
    known, slow = streams.make_streams(), Splitter()
    for page in pages:
        equal = [abs(page - line.last) for line in slow.lines]
        on = [abs(line.step) for line in slow.lines if page == line.last + line.step]
        ones = {one for one in slow.recent if one >= 0}
        ties = [abs(page - one) for one in ones if 2 * one - page in ones]
        near = [one for one in equal if one <= streams.NEAR_PAGES]
        if any(len(set(some)) < len(some) for some in (near, on)) or len(ties) > len(set(ties)):
            return
        assert assigned(known, page) == slow.assign(page), page


def hit_rate(pages: Iterable[int]) -> tuple[float, float]:
    """Return a connection's (hit rate, pages prefetched a read). Prefetched pages have come when
    the next read begins."""
    leap, known = Leap(PAGES), streams.make_streams()
    for page in pages:
        name, _, step = assigned(known, page)
        for before in range(streams.KNOWN - 1, 0, -1) if step else ():
            leap.recall(name, page - before * step)
        if leap.log(name or None, page):
            leap.decide(name)
    return leap.counters.hit_rate, leap.counters.prefetched / leap.counters.accesses


def interleaved(count: int, steps: Sequence[int], apart: int, reads: int = 500) -> list[int]:
    first = PAGES // 2
    return [
        first + scan * apart + i * steps[scan % len(steps)]
        for i in range(reads)
        for scan in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 31])
@pytest.mark.parametrize("steps", [(1,), (7,), (-3,), (1, 7, -3)])
@pytest.mark.parametrize("apart", [8192, 16384 + 37])
def test_interleaved_scans_hit_95_percent(count: int, steps: Sequence[int], apart: int) -> None:
    assert hit_rate(interleaved(count, steps, apart))[0] > 0.95


def test_a_walk_by_columns_loses_the_beginning_of_each_alone() -> None:
    columns = [page for first in range(7) for page in range(first, 1024, 7)]
    assert hit_rate(columns)[0] > 0.95


@pytest.mark.parametrize("apart", [9, 40, 100])
def test_scans_side_by_side_are_told_apart(apart: int) -> None:
    assert hit_rate(interleaved(2, (1,), apart))[0] > 0.95


@pytest.mark.parametrize("seed", range(3))
def test_scans_in_any_order_with_strays_in_between_hit(seed: int) -> None:
    """Eight scans, a read in ten anywhere else."""
    rng = random.Random(seed)
    at = [PAGES // 16 * scan for scan in range(8)]
    pages, strays = [], 0
    for _ in range(8000):
        if rng.random() < 0.1:
            pages.append(rng.randrange(PAGES))
            strays += 1
        else:
            scan = rng.randrange(8)
            pages.append(at[scan])
            at[scan] += (1, 7, -3)[scan % 3] if scan else 1
    assert hit_rate(pages)[0] > 0.95 * (1 - strays / len(pages))


@pytest.mark.parametrize(("size", "most"), [(PAGES, 0.0), (1 << 16, 0.0001), (1 << 10, 0.01)])
def test_random_reads_fetch_next_to_nothing(size: int, most: float) -> None:
    rng = random.Random(5)
    assert hit_rate(rng.randrange(size) for _ in range(20_000))[1] <= most


def test_a_lone_scan_has_the_history_that_it_had_by_connection() -> None:
    """The reads before it is told are recalled: every decision is that of a stream of its own."""
    for step in (1, 7, -3, -10, 64):
        pages = interleaved(1, (step,), 0)
        alone = Leap(PAGES)
        for page in pages:
            alone.access(0, page)
        assert hit_rate(pages)[0] == alone.counters.hit_rate
