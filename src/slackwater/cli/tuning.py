"""`slackwater job ID --history`: how a job's batch, rate and efficiency changed over time."""

from collections.abc import Sequence
from typing import Final

from slackwater.console import figures, tables
from slackwater.console.tables import NOTHING, Row
from slackwater.schemas.progress import TuningPoint

HEADS: Final = ("AT", "GPUS", "BATCH", "STEPS", "RATE", "EFFICIENCY", "EPOCHS")


def table(points: Sequence[TuningPoint], width: int | None) -> list[str]:
    """Lay the points out, oldest first, under a title."""
    if not points:
        return ["Tuning: nothing was reported; see slackwater.GoodputReporter"]
    rows = [Row(_cells(point)) for point in points]
    return ["Tuning:", *tables.lines(HEADS, rows, width)]


def _cells(point: TuningPoint) -> tuple[str, ...]:
    return (
        figures.at(point.at_s),
        str(point.gpus),
        f"{point.batch:,}" if point.batch else NOTHING,
        str(point.accumulation + 1),
        _number(point.rate_scale, "{:.3g}x"),
        _number(point.efficiency, "{:.0%}"),
        _number(point.progress_epochs, "{:.2f}"),
    )


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
