"""Names of the master's requests and timers."""

from typing import Final, Literal, NamedTuple

from slackwater.common.base.effects import EffectKey
from slackwater.schemas.base import AggregatorId, JobId, NodeId

Verb = Literal["place", "release", "prepare", "start", "again", "join", "leave", "stop", "stranger"]
"""`place` and `release` go to a job's controller, the others to worker nodes: keep room for the
processes of an attempt, start them, start one of them again, start one that joins, stop those that
leave, stop all, stop those of an attempt that moved on."""
OF_PROCESSES: Final[frozenset[Verb]] = frozenset(
    {"prepare", "start", "again", "join", "leave", "stop"}
)
"""Carried out in the order in which they were sent, and void once the next attempt begins."""


class Order(NamedTuple):
    """An order about a job."""

    verb: Verb
    where: str = ""
    """The attempt, rank and node that it concerns, where the job has several (`Job.order`)."""

    def __str__(self) -> str:
        return f"{self.verb}{self.where}"


class OrderKey(EffectKey, frozen=True):
    """An order about a job, to its controller or a worker node."""

    job: JobId
    what: Order


class LineKey(EffectKey, frozen=True):
    """A worker node is asked for the last line of a rank's log."""

    job: JobId
    rank: int


class LookKey(EffectKey, frozen=True):
    """A worker node is asked where a rank stands."""

    job: JobId
    rank: int


class HeldKey(EffectKey, frozen=True):
    """A free aggregator is asked what it still holds."""

    aggregator: AggregatorId


class CleanKey(EffectKey, frozen=True):
    """A free aggregator is told to drop what it still holds of a job."""

    aggregator: AggregatorId
    job: JobId


class OrphanKey(EffectKey, frozen=True):
    """A worker node is told to stop a job that is unknown."""

    job: JobId
    node: NodeId


class TickDue(EffectKey, frozen=True):
    pass


class DecisionDue(EffectKey, frozen=True):
    """A scheduler wants to be asked."""

    schedule: str


class UsageStored(EffectKey, frozen=True):
    """A job's use is durable in its tenant's sums: its record may be deleted."""

    job: JobId


class JobForgotten(EffectKey, frozen=True):
    """A forgotten job's record is deleted for good."""

    job: JobId


class RankDue(EffectKey, frozen=True):
    """A rank that died is started again."""

    job: JobId
    rank: int
