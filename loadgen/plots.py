"""The look of every plot that loadgen draws, in one place."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLORS = ("#1f6f8b", "#e07a3f", "#4c9f70", "#8d5a97", "#c0392b", "#7f8c8d", "#d4a017", "#2c3e50")
_STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "slackwater",
}


@contextmanager
def figure(
    path: Path, *, rows: int = 1, size: tuple[float, float] = (9.0, 4.5)
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes; saved to `path` (PNG, no timestamp inside) when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        drawn, axes = pyplot.subplots(rows, 1, figsize=size, layout="constrained")
        try:
            yield drawn, axes
            drawn.savefig(path, metadata={"Software": None})
        finally:
            pyplot.close(drawn)


def cdf(axes: Any, values: Sequence[float], name: str, color: str) -> None:
    shares = [(i + 1) / len(values) for i in range(len(values))]
    axes.step(sorted(values), shares, where="post", label=name, color=color)
