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


class JobProgress(Record, kw_only=True, frozen=True):
    """How far a job is, how fast, and where: known to the master that leads, and not stored."""

    iteration: Count = 0
    """The last iteration that ended on every rank."""
    iterations: Count = 0
    """Iterations that it trains for; 0: its program counts for itself."""
    speed: Seconds = 0.0
    """Iterations a second of its slowest rank, over the last seconds; 0: not known."""
    eta_s: Seconds | None = None
    """Seconds until its last iteration at this speed; None: not known."""
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
    ranks: Annotated[tuple[RankProgress, ...], msgspec.Meta(max_length=WORKERS_MAX)] = ()
    """Ranks that have reported; only in the answer to GetJob."""

    def __post_init__(self) -> None:
        for name in ("speed", "eta_s"):
            if getattr(self, name) is not None:
                bound(self, name, most=SECONDS_MAX)
