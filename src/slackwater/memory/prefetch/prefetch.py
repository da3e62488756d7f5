"""Choose pages to fetch before they are asked for, by Leap's majority-trend prefetcher. Pure.

Maruf and Chowdhury, Leap (USENIX ATC'20), sections 3.1 to 3.3. A stream (a thread, an array, the
pages of a device that lie on one line) has a history of the differences between pages that it asked
for one after the other. A difference that makes up more than half of the newest w entries is its
trend, where w starts at an eighth of the history and doubles: a short window finds a new trend
soon, a long one sees through noise. How many pages are fetched along it follows from how many of
the last ones were of use.

Two things differ from the paper. Windows that the history does not fill yet are not looked at (the
public kernel compares entries that were never written). And the next window is chosen when a stream
comes to the first page of the last one, not only when a page is missing: with windows of at most 8
pages a scan would otherwise wait for every ninth.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

HISTORY: Final = 32
SPLIT: Final = 8
"""The first window is so small a part of the history."""
WINDOW_MAX: Final = 8
STREAMS_MAX: Final = 256
UNUSED_MAX: Final = 4096
"""Prefetched pages that nobody has asked for yet; the oldest is given up first."""


def majority(values: Sequence[int]) -> int | None:
    """Return the value that more than half of `values` have, by Boyer and Moore's vote and a
    count."""
    candidate, votes = 0, 0
    for value in values:
        if votes == 0:
            candidate = value
        votes += 1 if value == candidate else -1
    return candidate if 2 * sum(value == candidate for value in values) > len(values) else None


def find_trend(deltas: Sequence[int], history: int = HISTORY, split: int = SPLIT) -> int | None:
    """The trend of these differences, newest first (algorithm 1). None: there is none."""
    window = max(1, history // split)
    while window <= min(history, len(deltas)):
        found = majority(deltas[:window])
        if found is not None:
            return found
        window *= 2
    return None


def window_size(hits: int, follows: bool, last: int, window_max: int = WINDOW_MAX) -> int:
    """Pages to prefetch (algorithm 2): `hits` of those prefetched since the last decision, whether
    the page asked for follows the trend, the `last` size. It never drops below half of that."""
    size = (1 << hits.bit_length()) if hits else int(follows)
    return max(min(size, window_max), last // 2)


@dataclass(slots=True)
class Counters:
    """Accuracy and coverage are the paper's (section 5.2.3)."""

    accesses: int = 0
    hits: int = 0
    """Accesses to pages that prefetching brought."""
    prefetched: int = 0
    dropped: int = 0
    """Prefetched pages that were given up unused."""

    @property
    def hit_rate(self) -> float:
        """The share of all accesses that did not wait (the paper's coverage)."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def accuracy(self) -> float:
        """The share of all prefetched pages that were asked for."""
        return self.hits / self.prefetched if self.prefetched else 0.0


@dataclass(slots=True)
class _Stream:
    deltas: deque[int]
    """Newest first."""
    page: int | None = None
    trend: int | None = None
    """The last one that was found: followed speculatively while pages are hit."""
    hits: int = 0
    size: int = 0
    trigger: int | None = None
    """The first page of the newest window."""


@dataclass(slots=True)
class Leap:
    """Streams that share one prefetch cache. Tell it every access; fetch what it answers."""

    pages: int
    """Pages of the address space."""
    history: int = HISTORY
    split: int = SPLIT
    window_max: int = WINDOW_MAX
    streams_max: int = STREAMS_MAX
    unused_max: int = UNUSED_MAX
    counters: Counters = field(default_factory=Counters)
    _streams: OrderedDict[Hashable, _Stream] = field(default_factory=OrderedDict)
    _unused: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def access(
        self, stream: Hashable, page: int, wanted: Callable[[Sequence[int]], Sequence[int]] = tuple
    ) -> tuple[int, ...]:
        """The stream asks for this page: the pages to prefetch now, nearest first. A prefetched
        page that is asked for is consumed: let its copy go at once."""
        return self.decide(stream, wanted) if self.log(stream, page) else ()

    def log(self, stream: Hashable | None, page: int) -> bool:
        """The stream (None: nobody's) asks for this page. True: `decide` is due; of several that
        came together it is enough to do so after the last."""
        hit = page in self._unused
        self.counters.accesses += 1
        self.counters.hits += hit
        self._unused.pop(page, None)
        if stream is None:
            return False
        state = self._enter(stream, page)
        state.hits += hit
        return not hit or page == state.trigger

    def recall(self, stream: Hashable, page: int) -> None:
        """The stream asked for this page, which was nobody's then: it is history alone."""
        self._enter(stream, page)

    def decide(
        self, stream: Hashable, wanted: Callable[[Sequence[int]], Sequence[int]] = tuple
    ) -> tuple[int, ...]:
        """The pages to prefetch beyond the stream's newest, nearest first. `wanted` is given the
        candidates, and leaves out those that need not be fetched."""
        state = self._streams[stream]
        page = state.page
        assert page is not None
        found = self._find(state)
        follows = found is not None and state.deltas[0] == found
        state.size = window_size(state.hits, follows, state.size, self.window_max)
        state.hits = 0
        if found is not None:
            state.trend = found
        step = state.trend
        if not state.size or not step:  # A trend of 0 asks for the same page again.
            return ()
        ahead = (page + k * step for k in range(1, 2 * self.window_max + 1))
        inside = [one for one in ahead if 0 <= one < self.pages and one not in self._unused]
        chosen = tuple(wanted(inside))[: state.size]
        if chosen:
            state.trigger = chosen[0]
        self._remember(chosen)
        return chosen

    def drop(self, pages: Iterable[int]) -> None:
        """These were prefetched and are gone, unused."""
        for page in pages:
            if page in self._unused:
                del self._unused[page]
                self.counters.dropped += 1

    def unused(self, page: int) -> bool:
        """It was prefetched, and nobody has asked for it."""
        return page in self._unused

    def trigger(self, stream: Hashable) -> int | None:
        """The first page of its newest window: asking for it has the next one chosen."""
        state = self._streams.get(stream)
        return None if state is None else state.trigger

    def trend(self, stream: Hashable) -> int | None:
        """The stream's trend at present."""
        state = self._streams.get(stream)
        return None if state is None else self._find(state)

    def _enter(self, stream: Hashable, page: int) -> _Stream:
        state = self._streams.get(stream)
        if state is None:
            state = self._streams[stream] = _Stream(deque(maxlen=self.history))
            if len(self._streams) > self.streams_max:
                self._streams.popitem(last=False)
        self._streams.move_to_end(stream)
        if state.page is not None:
            state.deltas.appendleft(page - state.page)
        state.page = page
        return state

    def _find(self, state: _Stream) -> int | None:
        return find_trend(tuple(state.deltas), self.history, self.split)

    def _remember(self, chosen: Iterable[int]) -> None:
        for page in chosen:
            self._unused[page] = None
            self.counters.prefetched += 1
        while len(self._unused) > self.unused_max:
            self._unused.popitem(last=False)
            self.counters.dropped += 1
