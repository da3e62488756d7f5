"""The page table as the program sees it: made here, changed by the kernels.

Five bytes per page and a ring of dispatch buffers; memory that is never touched is never taken, so
the table of a large, mostly idle device is small.
"""

import itertools
import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import prefetch_cache, streams
from slackwater.memory.store import PAGE_BYTES, Pages

Where = NDArray[np.int64]
_COUNTERS: Final = {
    "read_pages": k.READ,
    "read_mapped_pages": k.READ_MAPPED,
    "read_held_pages": k.READ_HELD,
    "read_lane_pages": k.READ_LANE,
    "written_pages": k.WRITE,
    "written_mapped_pages": k.WRITE_MAPPED,
    "written_lane_pages": k.WRITE_LANE,
    "dispatch_full": k.FULL,
    "disk_operations": k.DISK_OPERATIONS,
    "disk_pages": k.DISK_PAGES,
    "fenced": k.FENCED,
}
_AHEAD: Final = {
    "prefetched_pages": prefetch_cache.FETCHED,
    "prefetch_hit_pages": prefetch_cache.HITS,
    "prefetch_changed_pages": prefetch_cache.CHANGED,
    "prefetch_crowded_pages": prefetch_cache.CROWDED,
}


def make_table(
    pages: int,
    span_pages: int,
    *,
    slots: int = limits.DISPATCH_PAGES,
    backed: bool = True,
    places: int = 0,
) -> k.Table:
    """Raises ConfigRejected. The buffers of the ring begin at page boundaries. `places`: for
    prefetched pages, a multiple of prefetch_cache.WAYS."""
    spans = -(-pages // span_pages)
    if pages < 1 or pages * PAGE_BYTES > limits.DEVICE_BYTES_MAX or spans > limits.DEVICE_SPANS_MAX:
        raise ConfigRejected(
            f"a device of {pages} pages in {spans} spans: at most {limits.DEVICE_BYTES_MAX} bytes "
            f"and {limits.DEVICE_SPANS_MAX} spans; choose a smaller size or larger slabs"
        )
    words = np.zeros(k.WORDS, np.int64)
    words[k.SPAN_PAGES], words[k.PAGES] = span_pages, pages
    words[k.SLOTS], words[k.BACKED] = slots, backed
    return k.Table(
        words=words,
        sync=np.zeros(k.SYNC_BYTES, np.uint8),
        state=np.zeros(spans, np.uint8),
        base=np.zeros(spans, np.int64),
        fence_at=np.zeros(spans, np.int64),
        fence=np.zeros(spans, np.int64),
        activity=np.zeros(spans, np.int64),
        version=np.zeros(spans, np.int64),
        channel_id=np.zeros(spans, np.int64),
        handle=np.zeros(spans, np.int64),
        stamp=np.zeros(k.STAMPS, np.int64),
        mark=np.zeros(pages, np.uint8),
        pending=np.zeros(pages, np.int32),
        ring=np.frombuffer(mmap.mmap(-1, slots * PAGE_BYTES), np.uint8),
        slot_page=np.zeros(slots, np.int64),
        slot_count=np.zeros(slots, np.int64),
        slot_flags=np.zeros(slots, np.uint8),
        prefetched=_make_prefetch_cache(places),
    )


def _make_prefetch_cache(places: int) -> prefetch_cache.PrefetchCache:
    words = np.zeros(prefetch_cache.WORDS, np.int64)
    words[prefetch_cache.PLACES], words[prefetch_cache.BELL], words[prefetch_cache.ONE] = (
        places,
        -1,
        1,
    )
    room = max(places, prefetch_cache.WAYS)
    return prefetch_cache.PrefetchCache(
        words=words,
        page=np.zeros(room, np.int64),
        ticket=np.zeros(room, np.int64),
        state=np.zeros(room, np.uint8),
        data=np.frombuffer(mmap.mmap(-1, room * PAGE_BYTES), np.uint8),
        notes=np.zeros((prefetch_cache.NOTES, prefetch_cache.NOTE_WORDS), np.int64),
        streams=streams.make_streams(),
    )


def counters(table: k.Table) -> dict[str, int]:
    ahead = {name: int(table.prefetched.words[word]) for name, word in _AHEAD.items()}
    return {name: int(table.words[word]) for name, word in _COUNTERS.items()} | ahead


def page_range(first: int, count: int) -> Pages:
    return np.arange(first, first + count, dtype=np.int64)


def runs(pages: Pages) -> list[tuple[int, int]]:
    """[start, end) of the stretches of `pages` that follow one another."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    edges = [0, *breaks.tolist(), len(pages)]
    return list(itertools.pairwise(edges))
