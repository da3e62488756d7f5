"""Remembers every page that was written, and says whether a page that was read may be what it is.

A page's content tells its page number, the generation of its write (64 bits, growing) and a
checksum over all of it; the rest is drawn from these two. So a page of another place, of another
time, torn, zeroed or damaged is told apart from the right one. What is allowed:

    nothing under way   the newest write that was acknowledged
    writes under way    that, or any of those
    a write failed      it may show, or not, or later: until a newer one is acknowledged
    the device crashed  every write since the last one that a flush covered, or that one

A page that was never written reads as zeros.
"""

import struct
import zlib
from dataclasses import dataclass, field
from typing import Final

import numpy as np

PAGE_BYTES: Final = 4096
_HEAD: Final = struct.Struct("<QQI")
_WORDS: Final = (PAGE_BYTES - 24) // 8
_ZEROS: Final = bytes(PAGE_BYTES)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


def content(page: int, generation: int) -> bytes:
    """Return the bytes that the write `generation` of `page` puts there; generation 0: zeros (never
    written, or let go)."""
    if generation == 0:
        return _ZEROS
    with np.errstate(over="ignore"):
        words = np.arange(_WORDS, dtype=np.uint64) * _MIX
        words ^= np.uint64(page) * _MIX + np.uint64(generation)
    body = words.tobytes()
    crc = zlib.crc32(body, zlib.crc32(struct.pack("<QQ", page, generation)))
    return _HEAD.pack(page, generation, crc) + bytes(4) + body


@dataclass(slots=True)
class _Page:
    durable: int = 0
    """Covered by a flush."""
    acked: int = 0
    maybe: set[int] = field(default_factory=set)
    """Begun and not acknowledged: under way, or failed."""
    since_flush: set[int] = field(default_factory=set)
    """Generations that a crash may bring back: everything begun since the durable one."""


class WrongPage(AssertionError):
    """A page that it must not be: what was found, and what would have been right."""


class Checker:
    """Writes of one page must not overlap in time; everything else may."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._generation = 0
        self.reads = self.writes = self.failures = 0

    def written(self) -> list[int]:
        """The pages that were ever written."""
        return list(self._pages)

    def begin(self, page: int, *, discard: bool = False) -> tuple[int, bytes]:
        """(generation, bytes to write). A discard is a write of zeros."""
        self._generation += 1
        known = self._pages.setdefault(page, _Page())
        generation = 0 if discard else self._generation
        known.maybe.add(generation)
        known.since_flush.add(generation)
        self.writes += 1
        return generation, content(page, generation)

    def acknowledged(self, page: int, generation: int) -> None:
        known = self._pages[page]
        known.acked = generation
        known.maybe.clear()

    def failed(self, page: int, generation: int) -> None:
        """Note a failed write: it may have happened, and may still."""
        self._pages[page].maybe.add(generation)
        self.failures += 1

    def snapshot(self) -> dict[int, int]:
        """Return what a flush that is about to be sent will cover."""
        return {page: known.acked for page, known in self._pages.items() if not known.maybe}

    def flushed(self, covered: dict[int, int]) -> None:
        """The flush was acknowledged."""
        for page, generation in covered.items():
            known = self._pages[page]
            known.durable = generation
            if known.acked == generation and not known.maybe:
                known.since_flush = {generation}

    def crashed(self) -> None:
        """The device's process was killed: what no flush covers may be there or not."""
        for known in self._pages.values():
            known.maybe |= known.since_flush
            known.acked = known.durable

    def check(self, page: int, found: bytes | memoryview) -> None:
        """Raises WrongPage. What is found counts as the newest from then on."""
        self.reads += 1
        known = self._pages.get(page, _Page())
        found = bytes(found)
        allowed = {known.acked, *known.maybe}
        generation = _generation(page, found)
        if generation is None or generation not in allowed:
            raise WrongPage(
                f"page {page}: found {_describe(found)}, allowed are generations {sorted(allowed)}"
            )

    def settle(self, page: int, found: bytes | memoryview) -> None:
        """Check like `check`, with nothing under way: the page is as it is, and must stay so."""
        self.check(page, found)
        known = self._pages.get(page)
        generation = _generation(page, bytes(found))
        if known is not None and generation is not None:
            known.acked = generation
            known.maybe.clear()


def _generation(page: int, found: bytes) -> int | None:
    """Return the generation of a whole and right page of this number; None: it is another page, or
    damaged."""
    if found == _ZEROS:
        return 0
    generation: int = _HEAD.unpack_from(found)[1]
    return generation if found == content(page, generation) else None


def _describe(found: bytes) -> str:
    if found == _ZEROS:
        return "zeros"
    page, generation, _ = _HEAD.unpack_from(found)
    whole = found == content(page, generation) if generation < 2**62 and page < 2**62 else False
    return f"page {page}, generation {generation}, {'whole' if whole else 'torn or damaged'}"
