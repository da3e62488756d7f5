"""Draws the record of a program that adapts its batch: M, s, rate and efficiency over time.

    python -m slackwater.loadgen.adaptive_plot record.jsonl record.png

The record is what `slackwater.torch.Adaptive(record=...)` keeps (Qiao, thesis, figure 3.11 is of
one job in the same way).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from slackwater.agent.adaptive_record import read
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.adaptive_batch import AdaptiveChange
from slackwater.loadgen.plots import COLORS, figure


def draw(changes: Sequence[AdaptiveChange], path: Path) -> None:
    """Write a PNG. Raises Rejected for a record without a line."""
    if not changes:
        raise Rejected("the record has no line: train until the first eight iterations are done")
    seconds = [change.time_s - changes[0].time_s for change in changes]
    rows: tuple[tuple[str, list[float | None]], ...] = (
        ("batch M", [change.batch for change in changes]),
        ("accumulation s", [change.accumulation for change in changes]),
        ("rate's factor", [change.rate for change in changes]),
        ("EFFICIENCY", [change.efficiency for change in changes]),
        ("useful examples/s", [change.goodput for change in changes]),
    )
    with figure(path, rows=len(rows), size=(8.0, 9.0)) as (_, axes):
        for each, (name, values), color in zip(axes, rows, COLORS, strict=False):
            known = [(s, v) for s, v in zip(seconds, values, strict=True) if v is not None]
            each.step([s for s, _ in known], [v for _, v in known], where="post", color=color)
            each.set_ylabel(name)
            each.set_ylim(0, 1.05 * max([1.0, *(v for _, v in known)]))
            each.set_xlim(0, max(seconds[-1], 1.0))
        axes[-1].set_xlabel("seconds since the first line")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("png", type=Path)
    options = parser.parse_args()
    try:
        draw(read(options.record), options.png)
    except (Rejected, OSError) as error:
        raise SystemExit(f"adaptive_plot: {error}") from error


if __name__ == "__main__":
    main()
