"""The cells of AutoPS's evaluation with real jobs (Gu et al. 2021, figures 7 to 9, table 2), and
mixes of models that the paper does not have. Pure: a cell, its workload, the verdict on its run.

A cell's saving and losses are measured in the stable time: all its jobs are placed for good, none
has ended. The paper's text says 25 % for two AlexNet jobs and 50 % for two of the others, that two
aggregators serve four VGG19 jobs, and that every cell is between 25 and 75 %; figure 8's other bars
are not in the text, and their goal is the range's lower end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.replay.experiment import Outcome, Phases
from slackwater.loadgen.replay.measures import (
    LOSS_LIMIT,
    cpu_reduction_ratio,
    known,
    median,
)
from slackwater.loadgen.replay.report import off_target, unfinished, unproven
from slackwater.loadgen.replay.workload import COMPUTE_S, PlannedJob, Workload, emulated
from slackwater.schemas.jobs import Aggregation

LOSS_MEDIAN_MAX: Final = 0.05
SLOWER: Final = 0.01
"""The loss of a job beside its twin that counts: less is how exactly two equal runs can be
compared."""
MODELS: Final = ("alexnet", "vgg19", "awd-lm", "bert-large")
MIXES: Final = (
    ("vgg19", "awd-lm"),
    ("vgg19", "bert-large"),
    ("vgg19", "awd-lm", "bert-large"),
    ("alexnet", "vgg19", "awd-lm", "bert-large"),
)
FIGURE_8: Final = {
    ("alexnet", 2): 0.25, ("vgg19", 2): 0.5, ("awd-lm", 2): 0.5, ("bert-large", 2): 0.5,
    ("vgg19", 3): 2 / 3, ("vgg19", 4): 0.75,
}  # fmt: skip
FIGURE_8_LEAST: Final = 0.25
TABLE_2: Final = {"alexnet": 0.375, "vgg19": 0.5, "awd-lm": 0.5, "bert-large": 0.5}

WINDOW: Final = 12
"""Stable iterations that every job must have at least, and of the profiler's windows."""
WINDOW_S: Final = 4.0
"""Where all jobs iterate faster, a window lasts so long: a second of a busy machine is not a
loss."""
SPACING_S: Final = 2.0
START_S: Final = 10.0
"""From a job's submission to its first iteration, with room for a slow machine."""
PROFILE_ITERATIONS: Final = 5
PROFILE_S: Final = 2.0
WINDOWS: Final = 3
"""From the last job's profile to the first end: one in which a loss is found, one in which its
remedy shows, one that counts."""
TIME_SCALE: Final = 0.5
"""The factor of computing times; those of a cell that iterates faster than FAST_S stay as they
are."""
FAST_S: Final = 0.2
PHASES: Final = Phases(only_stable=True)


@dataclass(frozen=True)
class Cell:
    """`models`: one per job. `goal`: the CPU reduction, or None where there is none."""

    figure: Literal["figure 7", "figure 8", "table 2", "mix"]
    models: tuple[str, ...]
    policy: Aggregation
    workers: int = 2
    servers: int = 2
    goal: float | None = None

    @property
    def id(self) -> str:
        """The id that the command takes: fig8-vgg19-x4-edf."""
        short = self.figure.replace("figure ", "fig").replace("table ", "table")
        same = len(set(self.models)) == 1
        jobs = f"{self.models[0]}-x{len(self.models)}" if same else "+".join(self.models)
        return f"{short}-{jobs}-{self.policy}"

    @property
    def slowest_s(self) -> float:
        """The longest computing time among its models, unscaled."""
        return max(COMPUTE_S[model] for model in self.models)

    @property
    def time_scale(self) -> float:
        return 1.0 if self.slowest_s < FAST_S else TIME_SCALE

    def window(self, time_scale: float) -> int:
        """Iterations of a window."""
        return max(WINDOW, round(WINDOW_S / (self.slowest_s * time_scale)))


class CellResult(msgspec.Struct, kw_only=True):
    """One file of the results. Ratios are shares; `speed_ratio` is figure 7's: to `static`."""

    id: str
    figure: str
    policy: str
    models: tuple[str, ...]
    workers: int
    servers: int
    goal: float | None
    reduction: float | None = None
    loss_median: float | None = None
    loss_max: float | None = None
    speed_ratio: float | None = None
    control_loss: float | None = None
    duties: dict[str, float] = {}
    verified: int = 0
    reverts: int = 0
    migrations: int = 0
    doubts: list[str] = []
    """Why the cell proves nothing; empty: it is conclusive."""
    load: tuple[float, float] = (0.0, 0.0)
    """The machine's load average over a minute, before and after."""
    bytes_scale: float = 0.0
    time_scale: float = 0.0
    cpu_share: float = 0.0
    wall_s: float = 0.0

    @property
    def met(self) -> bool | None:
        """None: there is nothing to meet, or nothing is proven."""
        if self.doubts:
            return None
        if self.speed_ratio is not None:
            return self.speed_ratio >= 1.0 - SLOWER
        if self.reduction is None or self.loss_median is None or self.loss_max is None:
            return None
        within = self.loss_median <= LOSS_MEDIAN_MAX and self.loss_max <= LOSS_LIMIT
        return within and self.reduction >= (self.goal or 0.0) - 1e-3


def all_cells() -> tuple[Cell, ...]:
    cells: list[Cell] = []
    both: tuple[Aggregation, ...] = ("cyclic", "edf")
    for policy in both:
        for model in MODELS:
            for jobs in (2, 3, 4):
                goal = FIGURE_8.get((model, jobs), FIGURE_8_LEAST)
                cells.append(Cell("figure 8", (model,) * jobs, policy, goal=goal))
        cells += [
            Cell("table 2", (model,) * 2, policy, workers=4, servers=4, goal=TABLE_2[model])
            for model in MODELS
        ]
        cells += [Cell("mix", models, policy) for models in MIXES]
        cells += [Cell("figure 7", (model,), policy) for model in MODELS]
    return tuple(cells)


def choose(patterns: Sequence[str]) -> tuple[Cell, ...]:
    """Cells whose id fits any of the patterns ("fig8-*-edf"); all without one. Raises Rejected for
    a pattern that fits none."""
    cells = all_cells()
    for pattern in patterns:
        if not any(fnmatchcase(cell.id, pattern) for cell in cells):
            raise Rejected(f"no cell fits {pattern!r}; see --list")
    return tuple(
        cell
        for cell in cells
        if not patterns or any(fnmatchcase(cell.id, pattern) for pattern in patterns)
    )


def workload(cell: Cell, *, time_scale: float, bytes_scale: float, seed: int = 1) -> Workload:
    """All jobs end at about the same time, long enough after the last was placed."""
    slowest_s = cell.slowest_s * time_scale
    profiled_s = max(PROFILE_S, PROFILE_ITERATIONS * slowest_s)
    shared_s = WINDOWS * cell.window(time_scale) * slowest_s
    end_s = SPACING_S * (len(cell.models) - 1) + START_S + profiled_s + shared_s
    jobs = []
    for index, model in enumerate(cell.models):
        compute_s = COMPUTE_S[model] * time_scale
        at_s = index * SPACING_S
        spec = emulated(
            f"{model}-{index + 1}",
            model,
            workers=cell.workers,
            servers=cell.servers,
            iterations=round((end_s - at_s) / compute_s),
            compute_s=compute_s,
            bytes_scale=bytes_scale,
            seed=seed + index,
            aggregation=cell.policy,
        )
        jobs.append(PlannedJob(at_s=at_s, compute_s=compute_s, spec=spec))
    return Workload(
        name=cell.id, jobs=tuple(jobs), bytes_scale=bytes_scale, time_scale=time_scale, seed=seed
    )


def result(cell: Cell, outcome: Outcome) -> CellResult:
    """Return the result of the run; the caller adds how it was made."""
    figures = outcome.figures
    losses = known([row.loss for row in figures])
    found = CellResult(
        id=cell.id,
        figure=cell.figure,
        policy=cell.policy,
        models=cell.models,
        workers=cell.workers,
        servers=cell.servers,
        goal=cell.goal,
        loss_median=median(losses),
        loss_max=max(losses, default=None),
        control_loss=outcome.control_loss,
        duties={row.job: round(row.duty, 3) for row in figures if row.duty is not None},
        verified=outcome.verified,
        reverts=sum(row.reverts for row in figures),
        migrations=sum(row.migrations for row in figures),
        doubts=unfinished(figures) + list(outcome.mismatches.values()),
    )
    if cell.figure == "figure 7":
        if losses:
            found.speed_ratio = 1.0 - losses[0]
        else:
            found.doubts.append("the job or its twin had too few iterations while both ran")
        return found
    assert outcome.within is not None
    begin_s, end_s = outcome.within
    if end_s > begin_s:
        found.reduction = cpu_reduction_ratio(outcome.timeline, end_s, begin_s)
    else:
        found.doubts.append("the jobs were never all placed before the first one ended")
    found.doubts += unproven(figures, control_loss=outcome.control_loss, verified=outcome.verified)
    if cell.workers == 2:  # The duties' targets are stated for two workers.
        found.doubts += off_target(figures)
    return found
