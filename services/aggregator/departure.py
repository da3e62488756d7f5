"""When a bucket that was ordered to another host may leave: what fits into the job's own pauses.

A bucket that leaves is copied between the flip of a version and the next push. As long as the copy
ends before that push would come, nobody waits for it. So each bucket's gap is measured, from a flip
to the first push after it, and the rate at which copies go; a bucket freezes at a flip where
everything under way and itself fit into its gap, and trains on where it is until there is one. So
a job's buckets leave a few an iteration. A bucket that is larger than its gap goes alone.

Pure: `now_s` is an argument.
"""

from dataclasses import dataclass
from typing import Final

from slackwater.services.aggregator.bucket import Key

UNTIMED_BYTES: Final = 8 * 1024 * 1024
"""Bytes that leave at a time where no gap is known, or none comes: the job rests, or waits for
none."""
_FIRST_BYTES_S: Final = 256 * 1024 * 1024
"""Believed of a link before anything was measured."""
_SAMPLE_BYTES: Final = 1024 * 1024
"""Less than this says more of the latency than of the rate."""
_AT_FLIP: Final = 0.1
"""A bucket that fits into no gap begins within this part of one."""
_REST_GAPS: Final = 2.0
_REST_S: Final = 0.5
"""A job that has not pushed for so many gaps, and so long, rests."""


@dataclass(slots=True)
class _Gap:
    flipped_s: float = -1.0
    """The instant of the newest version; below 0: there was none, or the next push has begun."""
    span_s: float = 0.0
    """From a flip to the next push, the newest measured; 0: none was."""


class Departures:
    """`bytes_s`: the cap that all copies share; 0: none."""

    def __init__(self, bytes_s: int = 0) -> None:
        self._cap_bytes_s = bytes_s
        self._bytes_s = float(bytes_s or _FIRST_BYTES_S)
        self._gaps: dict[Key, _Gap] = {}
        self._under_way: dict[Key, int] = {}
        self._busy_since_s = 0.0
        self._busy_bytes = 0

    @property
    def bytes_s(self) -> float:
        """Return the rate that copies are believed to have."""
        return self._bytes_s

    def flipped(self, key: Key, now_s: float) -> None:
        """A version is complete: the bucket stands still until the next push."""
        gap = self._gaps.get(key)
        if gap is None:
            gap = self._gaps[key] = _Gap()
        gap.flipped_s = now_s

    def pushed(self, key: Key, now_s: float) -> None:
        """Something of the next version's first push is here."""
        gap = self._gaps.get(key)
        if gap is not None and gap.flipped_s >= 0.0:
            gap.span_s, gap.flipped_s = now_s - gap.flipped_s, -1.0

    def forget(self, key: Key) -> None:
        """The bucket is not here any more."""
        self._gaps.pop(key, None)

    def may_leave(self, key: Key, nbytes: int, now_s: float) -> bool:
        """Say whether the copy of so many bytes would end before the bucket's next push."""
        gap = self._gaps.get(key)
        waiting = sum(self._under_way.values())
        if gap is None or gap.span_s == 0.0 or self.rests_at_s(key) <= now_s:
            return not waiting or waiting + nbytes <= UNTIMED_BYTES
        elapsed_s = now_s - gap.flipped_s if gap.flipped_s >= 0.0 else 0.0
        if elapsed_s + (waiting + nbytes) / self._bytes_s <= gap.span_s:
            return True
        large = nbytes / self._bytes_s > gap.span_s
        return large and not waiting and elapsed_s <= _AT_FLIP * gap.span_s

    def rests_at_s(self, key: Key) -> float:
        """When the bucket counts as resting unless a push comes before."""
        gap = self._gaps.get(key)
        if gap is None or gap.flipped_s < 0.0:
            return 0.0 if gap is None else float("inf")
        return gap.flipped_s + _REST_GAPS * gap.span_s + _REST_S

    def began(self, key: Key, nbytes: int, now_s: float) -> None:
        """Note that the bucket is frozen, and about to be copied."""
        if not self._under_way:
            self._busy_since_s, self._busy_bytes = now_s, 0
        self._under_way[key] = nbytes

    def ended(self, key: Key, now_s: float, *, copied: bool) -> None:
        """Note that the bucket was copied, or stays."""
        nbytes = self._under_way.pop(key, 0)
        if copied:
            self._busy_bytes += nbytes
        if not self._under_way and self._busy_bytes >= _SAMPLE_BYTES:
            seen = self._busy_bytes / max(now_s - self._busy_since_s, 1e-6)
            self._bytes_s = (self._bytes_s + seen) / 2.0
            if self._cap_bytes_s:
                self._bytes_s = min(self._bytes_s, self._cap_bytes_s)
            self._busy_bytes = 0
