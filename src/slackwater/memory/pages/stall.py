"""A ring of dispatch entries that stands still is a state that operators see.

Every write holds its entry until all who must have it have answered. One that never settles keeps
its slot; once the ring has come round, every write and flush of the device waits. So the oldest
entry is watched: the time that it may stay is limits.RING_STUCK_S.
"""

from slackwater.common.base import limits
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states


class Stall:
    """Pure: `look` is told the time. `reason` "": the ring moves, or is empty."""

    def __init__(self, table: k.Table, stuck_s: float = limits.RING_STUCK_S) -> None:
        self.reason = ""
        self._table = table
        self._stuck_s = stuck_s
        self._seen: tuple[int, ...] = ()
        self._since_s = 0.0

    def look(self, now_s: float) -> str:
        """The reason, as of now."""
        seen = () if self._empty else self._progress()
        if seen != self._seen or not seen:
            self._seen, self._since_s, self.reason = seen, now_s, ""
        elif now_s - self._since_s >= self._stuck_s:
            self.reason = self._describe(now_s - self._since_s)
        return self.reason

    @property
    def _empty(self) -> bool:
        return bool(self._table.words[k.TAIL] == self._table.words[k.HEAD])

    def _progress(self) -> tuple[int, ...]:
        """Changes when the oldest entry is nearer to its end: a slow disk may take long for a
        batch, but not for an operation."""
        words = self._table.words
        disk = 0 if self._held else int(words[k.DISK_OPERATIONS])
        return int(words[k.TAIL]), disk

    @property
    def _oldest(self) -> int:
        return int(self._table.words[k.TAIL] % self._table.words[k.SLOTS])

    @property
    def _held(self) -> bool:
        return bool(self._table.slot_flags[self._oldest] & states.HELD)

    def _describe(self, waited_s: float) -> str:
        words, page = self._table.words, int(self._table.slot_page[self._oldest])
        span = page // int(words[k.SPAN_PAGES])
        what = f"lenders of span {span}" if self._held else "the backup file"
        count = int(words[k.HEAD] - words[k.TAIL])
        return (
            f"the write of page {page} has waited for {what} for {waited_s:.0f} s; "
            f"{count} of {int(words[k.SLOTS])} ring entries are taken"
        )
