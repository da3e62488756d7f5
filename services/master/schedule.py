"""One kind of resource, the policy that gives it to jobs, and what the two were last asked."""

from dataclasses import dataclass, field
from math import inf

from slackwater.schemas.base import JobId
from slackwater.schemas.gpus import Within
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.admission import Hold
from slackwater.services.master.gangs import asked, asked_spec, lies_anywhere
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.scheduling.view import JobView, name_of
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
    largest: dict[Within, int] = field(default_factory=dict)
    """Most that one job can be given anywhere, on one node and in one rack, at the last look."""
    told: dict[JobId, str] = field(default_factory=dict)
    """Waiting job -> the kind of reason that was last told."""
    split: dict[JobId, str] = field(default_factory=dict)
    """Job -> why what the policy gave it last was not carried out: it splits a process."""
    nodes_wanted: int | None = None
    """Machines that the policy asked for last; None: it has no opinion."""
    decisions: int = 0
    failures: int = 0
    """Decisions that the policy failed to make, or that could not be carried out."""
    failure: str = ""
    """The last one; empty: the last decision was carried out."""

    @property
    def queued(self) -> int:
        return len(self.snapshot.waiting) + len(self.snapshot.hidden)

    @property
    def first_waiting(self) -> JobView | None:
        """The job that comes first of those that wait; None: none does, or admission holds it
        back."""
        waiting = self.snapshot.waiting.values()  # In the order of their submission.
        highest = max((seen.priority for seen in waiting), default=0)
        first = next((seen for seen in waiting if seen.priority == highest), None)
        return None if first is None or first.id == self.barrier else first

    def holds(self, record: JobRecord) -> bool:
        """Tell whether the nodes that are heard could ever hold the job."""
        return units_min(record) <= self.largest.get(within(record.spec), 0)

    @property
    def policy(self) -> str:
        return name_of(self.scheduler.policy)


def within(spec: JobSpec) -> Within:
    """Where all of the job must lie: empty, anywhere."""
    return spec.within if spec.gpus or lies_anywhere(spec) else "node"


def units_min(record: JobRecord) -> int:
    """The fewest GPUs, or slots, that the job can start with."""
    return asked_spec(record).gpu_bounds[0] if record.spec.gpus else asked(record)
