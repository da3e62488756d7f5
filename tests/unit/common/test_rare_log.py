"""Strangers make a service log little, whatever they send."""

from typing import Any

from slackwater.common.base import limits
from slackwater.common.base.errors import DECODE_TEXT_MAX
from slackwater.common.base.rare_log import RareLog


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


def test_many_of_a_kind_are_few_lines_and_a_count() -> None:
    """Lines are limited for each event by itself; the next line tells of those that were left
    out."""
    log, now = Lines(), [0.0]
    rare = RareLog(log, lambda: now[0])
    for i in range(1000):
        rare.warning("refused", number=i)
    rare.warning("full")
    assert len(log.lines) == limits.STRANGER_LINES_MAX + 1
    now[0] = limits.STRANGER_LINES_S
    rare.warning("refused", number=1000)
    rare.warning("refused", number=1001)
    left_out = 1000 - limits.STRANGER_LINES_MAX
    assert log.lines[-2:] == [
        ("refused", {"number": 1000, "left_out": left_out}),
        ("refused", {"number": 1001}),
    ]


def test_a_peers_text_is_cut_and_stays_on_its_line() -> None:
    log = Lines()
    RareLog(log, lambda: 0.0).warning("refused", job="x" * 5000, reason="a\nb", rank=2**53)
    ((_, fields),) = log.lines
    assert fields == {"job": "x" * DECODE_TEXT_MAX, "reason": "a b", "rank": 2**53}
