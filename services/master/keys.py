"""Names of the master's requests and timers."""

from dataclasses import dataclass

from slackwater.common.base.effects import EffectKey
from slackwater.schemas.base import AggregatorId, JobId


@dataclass(frozen=True, slots=True)
class OrderKey(EffectKey):
    """An order about a job, to its controller or a worker node. `what`: which (`Job.order`)."""

    job: JobId
    what: str


@dataclass(frozen=True, slots=True)
class LineKey(EffectKey):
    """A worker node is asked for the last line of a rank's log."""

    job: JobId
    rank: int


@dataclass(frozen=True, slots=True)
class HeldKey(EffectKey):
    """A free aggregator is asked what it still holds."""

    aggregator: AggregatorId


@dataclass(frozen=True, slots=True)
class CleanKey(EffectKey):
    """A free aggregator is told to drop what it still holds of a job."""

    aggregator: AggregatorId
    job: JobId


@dataclass(frozen=True, slots=True)
class TickDue(EffectKey):
    pass


@dataclass(frozen=True, slots=True)
class DecisionDue(EffectKey):
    """A scheduler wants to be asked."""

    schedule: str


@dataclass(frozen=True, slots=True)
class RankDue(EffectKey):
    """A rank that died is started again."""

    job: JobId
    rank: int
