"""Tiresias: Discretized 2D-LAS and Discretized 2D-Gittins (section 3.3.2).

A job's service is GPUs times seconds, and its queue is where that service lies between the limits:
all start in Q1 and sink. The order inside a queue decides everything, and the paper leaves it open;
here running jobs precede waiting ones (equals never preempt each other), then the index where there
is one, then submission. `running_first=false` with `order=first_start` is the paper's own words
(FIFO by first start), `entry` is by the instant a job entered its queue, `waiting` by when it
last began to wait, `index` is by service
attained (LAS) or by the Gittins index; without limits and in rounds, the last is the undiscretised
2DAS of figure 3.7.

A demotion happens at an instant: ceil((limit - attained) / GPUs) seconds on.

**Promotion** (PromoteKnob, off by default): a job that has run since its arrival or last promotion,
and has since then waited `promote_knob` times as long as it has run, goes back to Q1. That resets
what its queue is counted by, never its progress. A job that had waited long enough before it was
preempted is promoted a second after: the instant of its preemption is decided already.

**Gittins** learns from completed jobs alone; until `learn_jobs` of them are there, it is LAS. The
distribution is renewed each time history has grown by a tenth. In the last queue there is no index.
With running jobs first and one limit it is therefore LAS to the last second: whoever waits in Q1
has attained nothing. `history_of` keeps a distribution for each model, tenant or size.

**Placement** is by skew against PACKLIMIT (see `placement`), learned anew as spread jobs are
observed.
"""

from bisect import bisect_right
from math import ceil, inf
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.gittins import Distribution
from slackwater.services.master.scheduling.policies.placement import (
    PACK_LIMIT,
    Observation,
    learn_pack_limit,
)
from slackwater.services.master.scheduling.policies.queues import Key, Level, QueuePolicy, Queues
from slackwater.services.master.scheduling.registry import AtLeast0, Count, Seconds, register
from slackwater.services.master.scheduling.view import JobView, Plan, View

DEFAULT_LIMITS = "3600,57600"
"""GPU-seconds: one hour, and 16 hours."""

Order = Literal["submission", "first_start", "index", "entry", "waiting"]
Quantum = Literal["queue", "supremum"]
HistoryOf = Literal["all", "model", "tenant", "size"]
GROUP_JOBS_MIN: Final = 10
"""Completed jobs of a model, tenant or size before it has a distribution of its own."""
PackLimit = Annotated[float, msgspec.Meta(ge=-1, le=1)]

_ROUNDING_GPU_S = 1e-6
"""Where instants are not whole seconds, a demotion instant may fall this short of its limit."""


class Notes:
    """The memory of Tiresias besides its queues."""

    __slots__ = (
        "by_group",
        "distribution",
        "entered",
        "groups",
        "history",
        "learned_from",
        "observations",
        "observed",
        "pack_limit",
        "resets",
    )

    def __init__(self) -> None:
        self.resets: dict[JobId, tuple[float, float, float]] = {}
        """Promoted jobs: (service, run seconds, waited seconds) at the promotion."""
        self.entered: dict[JobId, tuple[int, float]] = {}
        """With order=entry: (queue, since when)."""
        self.history: list[float] = []
        self.groups: list[str] = []
        """The group of each sample of `history`."""
        self.by_group: dict[str, Distribution] = {}
        self.distribution: Distribution | None = None
        self.learned_from = 0
        self.observations: list[Observation] = []
        self.observed: dict[JobId, tuple[float, float]] = {}
        """Spread jobs: (since when, speed) at their last observation."""
        self.pack_limit = PACK_LIMIT


class Seen(NamedTuple):
    """An active job as it was last seen, for the day that it has ended."""

    number: int
    attained_gpu_s: float
    held_gpus: int
    since_s: float

    def view(self, job_id: JobId) -> JobView:
        """Rebuild as much of the job as its end is learned from."""
        gpus = max(1, self.held_gpus)
        return JobView(
            id=job_id, number=self.number, submitted_s=0, gpus=gpus, gpus_min=gpus, gpus_max=gpus,
            allocation=((0, self.held_gpus),) if self.held_gpus else (), since_s=self.since_s,
            attained_gpu_s_then=self.attained_gpu_s,
        )  # fmt: skip


class TiresiasFacts(msgspec.Struct, frozen=True):
    """Tiresias must not forget these when the master restarts: what it promoted, what completed
    jobs took (the newest, and not those of LAS), and what spreading cost."""

    resets: dict[JobId, tuple[float, float, float]]
    entered: dict[JobId, tuple[int, float]]
    history: list[float]
    learned_from: int
    observations: list[Observation]
    observed: dict[JobId, tuple[float, float]]
    pack_limit: float
    seen: dict[JobId, Seen]
    groups: list[str] = msgspec.field(default_factory=list)
    """The group of each completed job of `history`; facts of before groups have none."""


def _gpu_seconds(text: str, knob: str) -> list[float]:
    try:
        found = [float(part) for part in text.replace(";", ",").split(",") if part.strip()]
    except ValueError:
        found = [inf]
    if not all(0 <= value < inf for value in found):
        raise ConfigRejected(f"{knob}={text!r}: give GPU-seconds as 3600,57600")
    return found


def parse_limits(text: str) -> list[float]:
    """Queue limits in GPU-seconds, ascending; an empty text is a single queue."""
    limits = _gpu_seconds(text, "limits")
    if any(b <= a for a, b in zip([0.0, *limits], limits, strict=False)):
        raise ConfigRejected(f"limits={text!r} must be positive and ascend")
    return [int(limit) if limit == int(limit) else limit for limit in limits]


class Tiresias(QueuePolicy):
    """The common part of both policies; the index is the difference."""

    places_change = True
    facts = TiresiasFacts

    def __init__(
        self, limits: str, order: Order, running_first: bool, promote_knob: float,
        round_s: float, pack_limit: float,
    ) -> None:  # fmt: skip
        self.limits = parse_limits(limits)
        self.order, self.running_first = order, running_first
        self.promote_knob, self.round_s, self.pack_limit = promote_knob, round_s, pack_limit
        self.keys_move = order == "index"

    def fresh_notes(self) -> Notes:
        return Notes()

    def place(self, job: JobView, now_s: float, notes: Notes) -> tuple[Level, Key, float]:
        attained = job.attained_gpu_s(now_s)
        if job.id in notes.resets:
            attained -= notes.resets[job.id][0]
        queue = bisect_right(self.limits, attained + _ROUNDING_GPU_S)
        if job.allocation:
            due_s = self._demoted_s(job, queue, attained, now_s)
        else:
            due_s = self._promoted_s(job, notes)
        return (-job.priority, queue), self._key(job, queue, attained, now_s, notes), due_s

    def _key(self, job: JobView, queue: int, attained: float, now_s: float, notes: Notes) -> Key:
        match self.order:
            case "first_start":
                return (job.first_start_s,)
            case "entry":
                return (self._entered_s(job, queue, now_s, notes),)
            case "waiting":
                return (job.since_s,)
            case "index":
                return (self.index(job, queue, attained, notes),)
            case _:
                return (0,)

    def index(self, job: JobView, queue: int, attained: float, notes: Notes) -> float:
        """Lower runs first."""
        return attained

    def _demoted_s(self, job: JobView, queue: int, attained: float, now_s: float) -> float:
        if queue >= len(self.limits):
            return inf
        return now_s + ceil((self.limits[queue] - attained) / job.held_gpus)

    def _promoted_s(self, job: JobView, notes: Notes) -> float:
        """Counted from when the job last began to wait, so that it does not depend on when one
        asks, and later than that instant, whose decision is the one that preempted it."""
        if self.promote_knob <= 0:
            return inf
        _, run_0_s, waited_0_s = notes.resets.get(job.id, (0, 0, 0))
        run_s = job.run_s_then - run_0_s
        if run_s <= 0:
            return inf
        owed_s = self.promote_knob * run_s - (job.waited_s(job.since_s) - waited_0_s)
        return job.since_s + max(1, ceil(owed_s))

    def _entered_s(self, job: JobView, queue: int, now_s: float, notes: Notes) -> float:
        """When the job came into this queue, remembered from the decision that saw it there."""
        if notes.entered.get(job.id, (-1, 0))[0] != queue:
            # It may have sunk between two decisions: while no job waited, or the master was away.
            sank_s = job.since_s
            if job.allocation and queue > 0:
                lacked = self.limits[queue - 1] - job.attained_gpu_s_then
                sank_s += ceil(lacked / job.held_gpus)
            notes.entered[job.id] = (queue, sank_s if job.since_s < sank_s < now_s else now_s)
        return notes.entered[job.id][1]

    def changed_by_itself(self, job: JobView, at_s: float, notes: Notes) -> None:
        if not job.allocation:
            notes.resets[job.id] = (job.attained_gpu_s(at_s), job.run_s(at_s), job.waited_s(at_s))

    def ended(self, job: JobView, now_s: float, queues: Queues) -> None:
        queues.notes.resets.pop(job.id, None)
        queues.notes.entered.pop(job.id, None)
        queues.notes.observed.pop(job.id, None)

    def next_round_s(self, view: View) -> float:
        return view.now_s + self.round_s if self.round_s > 0 else inf

    # Placement ---------------------------------------------------------------------------------

    def wants_consolidation(self, job: JobView, notes: Notes) -> str:
        limit = self.pack_limit if self.pack_limit >= 0 else notes.pack_limit
        return "prefer" if job.skew > limit else "no"

    def allocate(self, view: View, memory: Any) -> tuple[Plan, Any]:
        if memory is not None and self.pack_limit < 0 and len(view.cluster.nodes) > 1:
            self._observe(view, memory.notes)
        return super().allocate(view, memory)

    def _observe(self, view: View, notes: Notes) -> None:
        """Jobs on more machines than they need say how much being spread costs. One that is larger
        than a machine, and packed as tightly as it can be, says nothing: no limit would change
        where it lies."""
        fresh = []
        changed = view.changed
        if changed is None:
            changed = [
                i for i, j in view.jobs.items() if notes.observed.get(i) != (j.since_s, j.speed)
            ]
        for job_id in changed:
            job = view.jobs.get(job_id)
            if job is not None and len(job.allocation) > 1 and job.skew > 0 and job.speed > 0:
                kind = view.cluster.nodes[job.allocation[0][0]].gpu_type
                if len(job.allocation) <= view.cluster.fewest_nodes(job.held_gpus, kind):
                    continue
                notes.observed[job_id] = (job.since_s, job.speed)
                fresh.append(Observation(job.skew, job.speed / job.speeds.get(kind, 1.0)))
        if fresh:
            notes.observations = (notes.observations + fresh)[-limits.PLACEMENT_HISTORY_MAX :]
            notes.pack_limit = learn_pack_limit(notes.observations, notes.pack_limit)

    # A new process ------------------------------------------------------------------------------

    def durable(self, memory: Queues) -> TiresiasFacts:
        notes: Notes = memory.notes
        jobs = sorted(memory.seen.values(), key=lambda job: job.number)
        return TiresiasFacts(
            notes.resets, notes.entered, notes.history, notes.learned_from, notes.observations,
            notes.observed, notes.pack_limit,
            {j.id: Seen(j.number, j.attained_gpu_s_then, j.held_gpus, j.since_s) for j in jobs},
            notes.groups,
        )  # fmt: skip

    def restored(self, facts: TiresiasFacts) -> Queues:
        notes = self.fresh_notes()
        notes.resets, notes.entered = dict(facts.resets), dict(facts.entered)
        notes.history, notes.learned_from = list(facts.history), facts.learned_from
        notes.groups = facts.groups or [""] * len(notes.history)
        notes.observations, notes.observed = list(facts.observations), dict(facts.observed)
        notes.pack_limit = facts.pack_limit
        queues = Queues(notes)
        queues.seen = {job_id: seen.view(job_id) for job_id, seen in facts.seen.items()}
        return queues


@register("tiresias-las")
class TiresiasLas(Tiresias):
    """Jobs of the least GPU time so far first, in queues; it needs no durations."""

    def __init__(
        self, limits: str = DEFAULT_LIMITS, order: Order = "submission",
        running_first: bool = True, promote_knob: AtLeast0 = 0, round_s: Seconds = 0,
        pack_limit: PackLimit = -1,
    ) -> None:  # fmt: skip
        super().__init__(limits, order, running_first, promote_knob, round_s, pack_limit)


@register("tiresias-gittins")
class TiresiasGittins(Tiresias):
    """Jobs that most likely end soon first, in queues, by how long earlier jobs took."""

    def __init__(
        self, limits: str = DEFAULT_LIMITS, order: Order = "index", running_first: bool = True,
        promote_knob: AtLeast0 = 0, round_s: Seconds = 0, pack_limit: PackLimit = -1,
        learn_jobs: Count = 50, quantum: Quantum = "queue", history: str = "",
        history_of: HistoryOf = "all",
    ) -> None:  # fmt: skip
        super().__init__(limits, order, running_first, promote_knob, round_s, pack_limit)
        self.learn_jobs, self.quantum, self.history_of = learn_jobs, quantum, history_of
        self.history = _gpu_seconds(history, "history")

    def fresh_notes(self) -> Notes:
        notes = Notes()
        notes.history, notes.groups = list(self.history), [""] * len(self.history)
        self._learn(notes)
        return notes

    def _learn(self, notes: Notes) -> None:
        del notes.history[: -limits.SERVICE_HISTORY_MAX]
        del notes.groups[: -limits.SERVICE_HISTORY_MAX]
        notes.learned_from = len(notes.history)
        self._distribute(notes)

    def _distribute(self, notes: Notes) -> None:
        if notes.learned_from < self.learn_jobs and not self.history:
            return
        notes.distribution = Distribution(notes.history[: notes.learned_from])
        samples: dict[str, list[float]] = {}
        for group, service in zip(notes.groups, notes.history[: notes.learned_from], strict=False):
            samples.setdefault(group, []).append(service)
        notes.by_group = {
            group: Distribution(found)
            for group, found in samples.items()
            if group and len(found) >= GROUP_JOBS_MIN
        }

    def restored(self, facts: TiresiasFacts) -> Queues:
        queues = super().restored(facts)
        self._distribute(queues.notes)
        return queues

    def _group(self, job: JobView) -> str:
        match self.history_of:
            case "model":
                return job.model
            case "tenant":
                return job.tenant
            case "size":
                return str(job.gpus)
            case _:
                return ""

    def index(self, job: JobView, queue: int, attained: float, notes: Notes) -> float:
        distribution = notes.by_group.get(self._group(job), notes.distribution)
        if distribution is None:
            return 0
        if self.quantum == "supremum":
            return -distribution.supremum(attained)
        if queue >= len(self.limits):
            return 0
        return -distribution.index(attained, self.limits[queue])

    def ended(self, job: JobView, now_s: float, queues: Queues) -> None:
        super().ended(job, now_s, queues)
        notes = queues.notes
        notes.history.append(job.attained_gpu_s(now_s))
        notes.groups.append(self._group(job))
        grown = len(notes.history) - notes.learned_from
        if len(notes.history) >= self.learn_jobs and grown * 10 >= notes.learned_from:
            self._learn(notes)
            self.replace_waiting(now_s, queues)
