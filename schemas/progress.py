"""A job's progress: how far each of its ranks is, how fast, and on which aggregators."""

from typing import Annotated

import msgspec

from slackwater.schemas.base import (
    AGGREGATORS_MAX,
    SECONDS_MAX,
    WORKERS_MAX,
    AggregatorId,
    Count,
    Finite,
    Name,
    Rank,
    Record,
    Seconds,
    bound,
)


class RankProgress(Record, kw_only=True, frozen=True):
    """How far one rank is."""

    rank: Rank
    iteration: Count = 0
    """The last iteration that ended."""
    speed: Seconds = 0.0
    """Iterations a second, over the last seconds."""
    heard_s: Seconds = 0.0
    """When its Agent last reported."""

    def __post_init__(self) -> None:
        bound(self, "speed", most=SECONDS_MAX)


class TuningPoint(Record, kw_only=True, frozen=True):
    """How a job trained at an instant, as its program reported (Qiao, thesis, figure 3.11)."""

    at_s: Seconds
    gpus: Count
    batch: Count
    """Examples of an iteration, over all GPUs and accumulation steps; 0: not said."""
    accumulation: Count = 0
    """Steps before the one that synchronises."""
    rate_scale: Finite | None = None
    """The factor on the learning rate of the smallest batch; None: not said."""
    efficiency: Finite | None = None
    """The part that an example of this batch teaches of one of the smallest; None: not known."""
    progress_epochs: Finite | None = None
    """Statistical epochs so far; None: not said."""

    def __post_init__(self) -> None:
        for name in ("rate_scale", "efficiency", "progress_epochs"):
            if getattr(self, name) is not None:
                bound(self, name)


class ProgramProgress(Record, kw_only=True, frozen=True):
    """How far an elastic program is, as its driver tells."""

    iteration: Count = 0
    iterations: Count = 0
    """Iterations in all; 0: its driver did not say."""
    speed: Seconds = 0.0
    """Iterations a second, over the last seconds."""
    measured: Annotated[dict[Name, Finite], msgspec.Meta(max_length=8)] = msgspec.field(
        default_factory=dict
    )
    """Measured with the last iteration: its loss, for instance."""
    executors: Count = 0
    hosts: Count = 0
    version: Count = 0
    """Tasks that are complete."""
    moves: Count = 0
    """How often an executor went from one host to another."""

    def __post_init__(self) -> None:
        bound(self, "speed", most=SECONDS_MAX)


class JobProgress(Record, kw_only=True, frozen=True):
    """How far a job is, how fast, and where: known to the master that leads, and not stored."""

    iteration: Count = 0
    """The last iteration that ended on every rank."""
    iterations: Count = 0
    """Iterations that it trains for; 0: its program counts for itself."""
    speed: Seconds = 0.0
    """Iterations a second of its slowest rank, over the last seconds; 0: not known."""
    eta_s: Seconds | None = None
    """Seconds until its last iteration, or its last epoch, at this speed; None: not known."""
    eta_s_min: Seconds | None = None
    """The same if it goes on as fast as it may, by its last reports; None: not known."""
    eta_s_max: Seconds | None = None
    """The same if it goes on as slowly as it may; None: not known."""
    epochs: Finite | None = None
    """Statistical epochs so far: examples by their efficiency, over the data set; None: it does not
    report them."""
    epochs_target: Finite | None = None
    """Statistical epochs that it trains for; None: not known."""
    loss: Finite | None = None
    """Part of its profiled speed that it lost in its last monitor window; below 0: it is faster;
    None: not measured."""
    phase: Name = ""
    """The phase of its placement: hosting, profiling, moving or steady; empty: it has none."""
    moves: Count = 0
    """Migrations so far."""
    aggregators: Annotated[tuple[AggregatorId, ...], msgspec.Meta(max_length=AGGREGATORS_MAX)] = ()
    updated_s: Seconds = 0.0
    """When an Agent of it last reported; 0: none did to this master."""
    program: ProgramProgress | None = None
    """Set of an elastic program, whose iterations are its driver's."""
    ranks: Annotated[tuple[RankProgress, ...], msgspec.Meta(max_length=WORKERS_MAX)] = ()
    """Ranks that have reported; only in the answer to GetJob."""

    def __post_init__(self) -> None:
        for name in ("speed", "eta_s", "eta_s_min", "eta_s_max"):
            if getattr(self, name) is not None:
                bound(self, name, most=SECONDS_MAX)
