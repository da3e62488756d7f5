"""Actions of an aggregator's core, which its shell carries out."""

from dataclasses import dataclass

from slackwater.common.base.effects import Action
from slackwater.schemas.checkpoints import CopyBuckets, WriteBuckets
from slackwater.schemas.placement import HostBuckets, SlotPlan
from slackwater.services.aggregator.bucket import Key, Move


@dataclass(frozen=True, slots=True)
class MakeRegions(Action):
    """Make the regions of the buckets at the positions `new` of the message. `RegionsMade` follows,
    for the command `token`."""

    token: int
    message: HostBuckets
    new: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropBuckets(Action):
    """Forget these buckets, and let their memory go. `RegionsDropped` follows; token 0: nobody
    waits for it."""

    keys: tuple[Key, ...]
    token: int = 0


@dataclass(frozen=True, slots=True)
class KeepBucket(Action):
    """The bucket stays here, whatever was ordered before."""

    key: Key
    location_epoch: int


@dataclass(frozen=True, slots=True)
class MoveBucket(Action):
    """MIGRATE_INIT: it leaves at the next committed version, or at once where nothing waits."""

    key: Key
    move: Move


@dataclass(frozen=True, slots=True)
class SetDeadlines(Action):
    """Set the deadlines by which the buckets' tasks run."""

    message: HostBuckets


@dataclass(frozen=True, slots=True)
class SetSlotPlan(Action):
    """Set how often each job's tasks are expected, and the cycle."""

    message: SlotPlan


@dataclass(frozen=True, slots=True)
class CopyForCheckpoint(Action):
    """Order copies of buckets, and take those that can be taken now. `CheckpointTold` follows."""

    token: int
    message: CopyBuckets


@dataclass(frozen=True, slots=True)
class WriteCheckpoint(Action):
    """Begin to write copies, and tell which are written. `CheckpointTold` follows."""

    token: int
    message: WriteBuckets


AggregatorAction = (
    MakeRegions
    | DropBuckets
    | KeepBucket
    | MoveBucket
    | SetDeadlines
    | SetSlotPlan
    | CopyForCheckpoint
    | WriteCheckpoint
)
