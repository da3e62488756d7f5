"""Names of a controller's requests and timers: about which job or aggregator each is."""

from dataclasses import dataclass

from slackwater.common.base.effects import EffectKey
from slackwater.schemas.base import AggregatorId, JobId


@dataclass(frozen=True, slots=True)
class JobKey(EffectKey):
    job: JobId

    @property
    def about(self) -> str:
        """Commands about one thing reach an aggregator in order."""
        return self.job


@dataclass(frozen=True, slots=True)
class AggregatorKey(EffectKey):
    aggregator: AggregatorId

    @property
    def about(self) -> str:
        return self.aggregator


@dataclass(frozen=True, slots=True)
class AllocationAsked(JobKey):
    """The master is asked for aggregators, for the job's pending assignment."""


@dataclass(frozen=True, slots=True)
class HostAsked(JobKey):
    aggregator: AggregatorId


@dataclass(frozen=True, slots=True)
class DropAsked(JobKey):
    """The job was released."""

    aggregator: AggregatorId


@dataclass(frozen=True, slots=True)
class StrayDropAsked(JobKey):
    """The aggregator holds buckets that by the records are not there."""

    aggregator: AggregatorId


@dataclass(frozen=True, slots=True)
class MigrateAsked(JobKey):
    source: AggregatorId
    target: AggregatorId


@dataclass(frozen=True, slots=True)
class HeldAsked(AggregatorKey):
    pass


@dataclass(frozen=True, slots=True)
class SlotPlanAsked(AggregatorKey):
    pass


@dataclass(frozen=True, slots=True)
class AdoptionAsked(AggregatorKey):
    """The master is asked to let the cluster keep a temporary aggregator."""


@dataclass(frozen=True, slots=True)
class ReturnAsked(AggregatorKey):
    """The master is asked to take the aggregator back."""


@dataclass(frozen=True, slots=True)
class PoolAsked(EffectKey):
    """The master is asked which aggregators there are."""


@dataclass(frozen=True, slots=True)
class TickDue(EffectKey):
    pass


@dataclass(frozen=True, slots=True)
class ServeDue(EffectKey):
    """Jobs that wait in line go on."""
