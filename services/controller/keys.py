"""Names of a controller's requests and timers: about which job or aggregator each is."""

from slackwater.common.base.effects import EffectKey
from slackwater.schemas.base import AggregatorId, JobId


class JobKey(EffectKey, frozen=True):
    job: JobId

    @property
    def about(self) -> str:
        """Commands about one thing reach an aggregator in order."""
        return self.job


class AggregatorKey(EffectKey, frozen=True):
    aggregator: AggregatorId

    @property
    def about(self) -> str:
        return self.aggregator


class AllocationAsked(JobKey, frozen=True):
    """The master is asked for aggregators, for the job's pending assignment."""


class HostAsked(JobKey, frozen=True):
    aggregator: AggregatorId


class DropAsked(JobKey, frozen=True):
    """The job was released."""

    aggregator: AggregatorId


class StrayDropAsked(JobKey, frozen=True):
    """The aggregator holds buckets that by the records are not there."""

    aggregator: AggregatorId


class MigrateAsked(JobKey, frozen=True):
    source: AggregatorId
    target: AggregatorId


class CopyAsked(JobKey, frozen=True):
    """Buckets are to be copied for a checkpoint."""

    aggregator: AggregatorId


class WriteAsked(JobKey, frozen=True):
    """Their copies are to be written."""

    aggregator: AggregatorId


class CheckpointDue(JobKey, frozen=True):
    """A checkpoint is looked at again."""


class HeldAsked(AggregatorKey, frozen=True):
    pass


class SlotPlanAsked(AggregatorKey, frozen=True):
    pass


class AdoptionAsked(AggregatorKey, frozen=True):
    """The master is asked to let the cluster keep a temporary aggregator."""


class ReturnAsked(AggregatorKey, frozen=True):
    """The master is asked to take the aggregator back."""


class PoolAsked(EffectKey, frozen=True):
    """The master is asked which aggregators there are."""


class TickDue(EffectKey, frozen=True):
    pass


class ServeDue(EffectKey, frozen=True):
    """Jobs that wait in line go on."""
