"""Log lines about peers that need not be ours: few, short, and counted where they are left out.

Whoever may connect can make a service say something as often as it likes, and in its own words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from slackwater.common.base import limits
from slackwater.common.base.codec import shortened

_KINDS_MAX: Final = 100


@dataclass(slots=True)
class _Kind:
    until_s: float
    """The end of the span in which these were written."""
    written: int = 0
    left_out: int = 0


class RareLog:
    """A log that writes at most STRANGER_LINES_MAX lines of each event within STRANGER_LINES_S. A
    line says how many before it were left out."""

    def __init__(self, log: Any, now_s: Callable[[], float]) -> None:
        self._log, self._now_s = log, now_s
        self._kinds: dict[str, _Kind] = {}

    def warning(self, event: str, **fields: object) -> None:
        now_s = self._now_s()
        kind = self._kinds.setdefault(event, _Kind(now_s + limits.STRANGER_LINES_S))
        assert len(self._kinds) <= _KINDS_MAX, "an event is a name in the source"
        if now_s >= kind.until_s:
            kind.until_s, kind.written = now_s + limits.STRANGER_LINES_S, 0
        if kind.written >= limits.STRANGER_LINES_MAX:
            kind.left_out += 1
            return
        kind.written += 1
        if kind.left_out:
            fields["left_out"], kind.left_out = kind.left_out, 0
        short = {
            name: shortened(value) if isinstance(value, str) else value
            for name, value in fields.items()
        }
        self._log.warning(event, **short)
