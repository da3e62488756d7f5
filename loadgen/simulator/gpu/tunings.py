"""How each job of a run was tuned over time: batch, accumulation, rate and efficiency (Pollux's
thesis, figure 3.11), as a table and as a plot.

Only jobs that have them are in it: those of the model `profiles`. A job keeps 512 at most, thinned
evenly. The event log has none: it says what a policy decided, and this what jobs made of it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from slackwater.loadgen.files import table_text
from slackwater.loadgen.plots import COLORS, figure
from slackwater.loadgen.simulator.gpu.jobmodels.base import Tuning

PLOTTED: Final = ("gpus", "batch", "rate_scale", "efficiency")
DRAWN: Final = 4
"""Jobs in the plot: those that were tuned most often."""


class JobTunings(msgspec.Struct):
    """A job's tunings in one run, oldest first; times from the begin of the trace."""

    job: str
    end_s: float
    tunings: list[Tuning]


def tunings_csv(runs: Sequence[tuple[str, Sequence[JobTunings]]]) -> str:
    """`runs`: (policy, its jobs)."""
    return table_text(
        ["policy", "job", *Tuning._fields],
        (
            (policy, each.job, *tuning)
            for policy, jobs in runs
            for each in jobs
            for tuning in each.tunings
        ),
    )


def draw(path: Path, policy: str, jobs: Sequence[JobTunings]) -> None:
    """Plot GPUs, batch, rate and efficiency over time, as figure 3.11 has them."""
    chosen = sorted(jobs, key=lambda each: (-len(each.tunings), each.job))[:DRAWN]
    with figure(path, rows=len(PLOTTED), size=(9.0, 9.0)) as (_, axes):
        for color, each in zip(COLORS, chosen, strict=False):
            hours = [tuning.at_s / 3600 for tuning in each.tunings] + [each.end_s / 3600]
            for axis, name in zip(axes, PLOTTED, strict=True):
                values = [getattr(tuning, name) for tuning in each.tunings]
                axis.step(hours, [*values, values[-1]], where="post", label=each.job, color=color)
        for axis, name in zip(axes, PLOTTED, strict=True):
            axis.set_ylabel(name.replace("_", " "))
        axes[1].set_yscale("log")
        axes[0].set_title(f"{policy}: how jobs were tuned")
        axes[0].legend()
        axes[-1].set_xlabel("time (h)")
