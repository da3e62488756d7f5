"""One kind of resource, the policy that gives it to jobs, and what the two were last asked."""

from dataclasses import dataclass, field
from math import inf

from slackwater.schemas.base import JobId
from slackwater.services.master.admission import Hold
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.scheduling.view import name_of
from slackwater.services.master.snapshot import Capacity, Snapshot


@dataclass(slots=True)
class Schedule:
    name: str
    scheduler: Scheduler
    snapshot: Snapshot = field(default_factory=Snapshot)
    due: bool = False
    """Set where the scheduler must be asked though no record changed."""
    wake_s: float = inf
    """When the policy wants to be asked again."""
    closed: dict[str, Hold] = field(default_factory=dict)
    """Tenants that have their part of the pool: their jobs are hidden."""
    gathering: dict[JobId, Hold] = field(default_factory=dict)
    """Jobs that wait for GPUs and aggregators together, and are hidden while there are too few
    aggregators: the first of them is held back, the others are behind it."""
    barrier: JobId | None = None
    """A job that admission holds back, and all behind it."""
    capacities: tuple[Capacity, ...] = ()
    """Slots or GPUs of each node, as of the last look."""
    largest: int = 0
    """Most that one job can be given, as of the last look."""
    told: dict[JobId, str] = field(default_factory=dict)
    """Waiting job -> the kind of reason that was last told."""
    split: dict[JobId, str] = field(default_factory=dict)
    """Job -> why what the policy gave it last was not carried out: it splits a process."""
    decisions: int = 0
    failures: int = 0
    """Decisions that the policy failed to make, or that could not be carried out."""
    failure: str = ""
    """The last one; empty: the last decision was carried out."""

    @property
    def queued(self) -> int:
        return len(self.snapshot.waiting) + len(self.snapshot.hidden)

    @property
    def policy(self) -> str:
        return name_of(self.scheduler.policy)
