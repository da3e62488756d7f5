"""Names of the master's requests and timers."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from slackwater.common.base.effects import EffectKey
from slackwater.schemas.base import AggregatorId, JobId

Verb = Literal["place", "release", "start", "again", "stop", "stranger"]
"""`place` and `release` go to a job's controller, the others to worker nodes: start the processes
of an attempt there, start one of them again, stop them, stop those of an attempt that moved on."""
OF_PROCESSES: Final[frozenset[Verb]] = frozenset({"start", "again", "stop"})
"""Carried out in the order in which they were sent, and void once the next attempt begins."""


class Order(NamedTuple):
    """An order about a job."""

    verb: Verb
    where: str = ""
    """The attempt, rank and node that it concerns, where the job has several (`Job.order`)."""

    def __str__(self) -> str:
        return f"{self.verb}{self.where}"


@dataclass(frozen=True, slots=True)
class OrderKey(EffectKey):
    """An order about a job, to its controller or a worker node."""

    job: JobId
    what: Order


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
