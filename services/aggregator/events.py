"""Events of an aggregator's core, beside those of every shell: past tense."""

from dataclasses import dataclass

from slackwater.common.base.effects import ShellEvent
from slackwater.schemas.base import JobId, Refused
from slackwater.schemas.checkpoints import BucketsCopied, BucketsWritten
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.telemetry import TasksObserved
from slackwater.services.aggregator.bucket import Key, Move, SeededStates


@dataclass(frozen=True, slots=True)
class RegionsMade:
    """For the command `token`; or why not one was made."""

    job: JobId
    token: int
    failure: str = ""
    for_good: bool = False
    """It fails again until somebody changes something."""


@dataclass(frozen=True, slots=True)
class RegionsDropped:
    token: int


@dataclass(frozen=True, slots=True)
class BucketSeeded:
    """A worker seeded the bucket at a version above 0, as the bytes had been lost; `states`: what
    there was of the optimiser's. `first`: nobody had its parameters; they are those that the
    program begins with."""

    key: Key
    rank: int
    states: SeededStates
    first: bool = False


@dataclass(frozen=True, slots=True)
class BucketRestored:
    """The bucket's bytes had been lost, no worker had its parameters, and those of a checkpoint of
    this iteration are in it."""

    key: Key
    iteration: int


@dataclass(frozen=True, slots=True)
class CheckpointTold:
    """The answer to the command `token` about a checkpoint."""

    token: int
    answer: BucketsCopied | BucketsWritten | Refused


@dataclass(frozen=True, slots=True)
class WorkersArrived:
    """Every worker has pushed here since the bucket came."""

    key: Key
    location_epoch: int


@dataclass(frozen=True, slots=True)
class BucketCopied:
    """The new aggregator has it; it is no longer here. `answered`: from which iteration each rank
    may go on."""

    key: Key
    move: Move
    version: int
    initialized: bool
    nbytes: int
    copy_s: float
    answered: tuple[int, ...] = ()
    plan: JobPlan | None = None


@dataclass(frozen=True, slots=True)
class TasksMeasured:
    reports: tuple[TasksObserved, ...]


Event = (
    ShellEvent
    | RegionsMade
    | RegionsDropped
    | BucketSeeded
    | BucketRestored
    | CheckpointTold
    | WorkersArrived
    | BucketCopied
    | TasksMeasured
)
