"""The discrete-event engine: a heap of instants, one decision for each, exact accounts.

**One decision per instant.** Events are (time, kind, number, generation); everything that happens
at an instant (completions, then nodes, then arrivals, then what the policy asked to be woken for)
is applied before the policy is asked once. An event of an older generation is stale and skipped.

**Lazy.** A running job is touched when its own allocation or conditions change, and when its run
says so; a waiting job is not touched at all. Snapshots are made of structs that stay valid between
changes, so an event costs what it changes.

**Exact.** Where the job model counts whole seconds, so does the engine: GPU-seconds are integers,
and jobs in equal jobs out. A job's service, run time and waiting time are kept in segments: one
segment is one allocation held under one set of conditions' start and end, the unit of the event
log.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from math import floor, inf

from msgspec.structs import replace

from slackwater.common.base import limits
from slackwater.common.base.errors import Fatal, Rejected
from slackwater.loadgen.simulator.gpu.active import Active
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.interference import Surroundings
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions, JobModel, JobRun
from slackwater.loadgen.simulator.gpu.outcome import (
    DEFAULT_SETTINGS,
    Begun,
    Costs,
    Outcome,
    Result,
    Scaling,
    Segment,
    Settings,
)
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.scheduler import Decision, Scheduler
from slackwater.services.master.scheduling.shown import size_bounds
from slackwater.services.master.scheduling.view import (
    NOTHING,
    Allocation,
    JobView,
    Pending,
    Policy,
    View,
)

__all__ = ["Costs", "Engine", "Outcome", "Result", "Scaling", "Segment", "Settings"]

_RUN, _LOST, _BACK, _ARRIVAL, _WAKE = range(5)

PROGRESS_EVERY = 256
"""Events between two calls of the progress callback."""


class Engine:
    """Runs a workload under one policy. `run()` once."""

    def __init__(
        self,
        jobs: Sequence[Submission],
        cluster: Cluster,
        policy: Policy,
        model: JobModel,
        settings: Settings = DEFAULT_SETTINGS,
        *,
        record: bool = True,
        begun: Begun | None = None,
        on_progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """`begun`: what the jobs did before; left out: nothing."""
        self._jobs, self._cluster, self._model = jobs, cluster, model
        self._begun = begun or Begun(-inf, {})
        self._scheduler = Scheduler(policy, settings.rules)
        self._costs, self._failures = settings.costs, settings.failures
        self._slowdowns = settings.slowdowns
        self._surroundings = Surroundings(settings.slowdowns)
        self._scaling, self._record, self._on_progress = settings.scaling, record, on_progress
        self._ask_why_s = sorted(settings.ask_why_s, reverse=True)
        self._heap: list[tuple[float, int, int, int]] = []
        self._now_s: float = 0
        self._active: dict[int, Active] = {}
        self._number: dict[JobId, int] = {}
        self._views: dict[JobId, JobView] = {}
        self._changed: list[JobId] = []
        self._wake_s = inf
        self._next_arrival = 0
        self._outcomes = [Outcome(job) for job in jobs]
        self._done = 0
        self._segments: list[Segment] = []
        self._members: dict[str, list[int]] = {}
        self._outages: list[tuple[int, float, float]] = []
        self._outage_plans: list[Iterator[tuple[float, float]]] = []
        self._coming: set[int] = set()
        self._capacity_gpu_s: float = 0
        self._capacity_since_s: float = 0
        self._reasons: list[tuple[float, Pending]] = []
        self.decisions = 0
        self.events = 0

    # The loop ----------------------------------------------------------------------------------

    def run(self) -> Result:
        """Until every job is done. A policy that leaves jobs waiting for ever is an error."""
        if self._jobs:
            self._capacity_since_s = self._now_s = self._arrives_s(0)
            heappush(self._heap, (self._now_s, _ARRIVAL, 0, 0))
        self._start_outages()
        while self._done < len(self._jobs):
            if not self._heap:
                raise Fatal(self._stuck())
            if self._happen():
                self._decide()
                self._ask_why()
        self._count_capacity()
        self._outages += [(i, at, inf) for i, at in self._down.items()]
        return Result(
            self._outcomes, self._segments, self._now_s, self._capacity_gpu_s,
            self.decisions, self.events, sorted(self._outages), self._reasons,
        )  # fmt: skip

    def _happen(self) -> bool:
        """Everything of the next instant; False if all of it was stale."""
        heap = self._heap
        now_s = self._now_s = heap[0][0]
        something = False
        while heap and heap[0][0] == now_s:
            _, kind, number, generation = heappop(heap)
            self.events += 1
            if kind == _RUN:
                something |= self._progress(number, generation)
            elif kind == _ARRIVAL:
                self._arrive(number)
                something = True
            elif kind == _WAKE:
                if now_s == self._wake_s:
                    self._wake_s = inf
                    something = True
            elif kind == _LOST:
                something |= self._lose_node(number)
            else:
                self._bring_node(number)
                something = True
            if self._on_progress is not None and not self.events % PROGRESS_EVERY:
                self._on_progress(self._done, now_s)
        return something

    def _stuck(self) -> str:
        waiting = [active.view.id for active in self._active.values()]
        return (
            f"the policy leaves {len(waiting)} jobs waiting for ever, {waiting[0]} among them, "
            f"though nothing else will happen after {self._now_s} s; a policy that decides in "
            "rounds must name its next one"
        )

    # Events ---------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        job = self._jobs[number]
        run = self._model.run(job, self._cluster.view)
        outcome = self._outcomes[number]
        outcome.work_total = run.work_total
        outcome.alone_s = run.alone_s(job.spec.gpus)
        active = Active(job, run, outcome, self._now_s, self._costs.known_s(job.spec.model))
        self._active[number] = active
        self._number[active.view.id] = number
        self._scheduler.admit(active.view)
        before = self._begun.jobs.get(job.spec.id)
        if before is not None:
            self._go_on(active, before)
        self._show(active)
        self._next_arrival = number + 1
        if self._next_arrival < len(self._jobs):
            at_s = self._arrives_s(self._next_arrival)
            heappush(self._heap, (at_s, _ARRIVAL, self._next_arrival, 0))

    def _arrives_s(self, number: int) -> float:
        return max(self._jobs[number].submit_s, self._begun.at_s)

    def _go_on(self, active: Active, before: JobView) -> None:
        """Keep the GPUs that it holds, without a restart."""
        active.begun(before)
        if before.allocation:
            self._take(active, before.allocation, "", free=True)
            self._resume(active)
            active.since_s = before.since_s

    def _progress(self, number: int, generation: int) -> bool:
        active = self._active.get(number)
        if active is None or active.generation != generation:
            return False
        active.run.advance(self._now_s)
        if not active.run.done:
            self._schedule(active)
            return False
        group = active.group
        self._release(active, "completed")
        active.outcome.end_s = self._now_s
        active.outcome.restarts = active.restarts
        del self._active[number], self._views[active.view.id]
        del self._number[active.view.id]
        self._changed.append(active.view.id)
        self._done += 1
        self._recondition(set(self._members.get(group, ())) if group else set())
        return True

    def _schedule(self, active: Active) -> None:
        at_s = active.run.next_s()
        if at_s < inf:
            heappush(self._heap, (at_s, _RUN, active.job.number, active.generation))

    # Decisions ---------------------------------------------------------------------------------

    def _decide(self) -> None:
        self.decisions += 1
        decision = self._scheduler.decide(
            View(
                self._now_s, self._cluster.view, self._views, self._cluster.free, self._changed,
                self._scheduler.rules,
            )
        )  # fmt: skip
        self._changed = []
        if decision.start or decision.resize or decision.pause:
            self._apply(decision)
        if decision.wake_s < inf and decision.wake_s != self._wake_s:
            heappush(self._heap, (decision.wake_s, _WAKE, 0, 0))
        self._wake_s = decision.wake_s
        if self._scaling is not None and decision.desired_nodes is not None:
            self._scale(decision.desired_nodes, self._scaling)

    def _ask_why(self) -> None:
        while self._ask_why_s and self._ask_why_s[-1] <= self._now_s:
            self._ask_why_s.pop()
            view = View(self._now_s, self._cluster.view, self._views, self._cluster.free)
            reasons = self._scheduler.explain(view)
            self._reasons += [(self._now_s, reason) for reason in reasons]

    def _apply(self, decision: Decision) -> None:
        """Pauses and resizes free their GPUs, then resizes and starts take theirs."""
        touched: set[int] = set()
        for job_id in decision.pause:
            active = self._active[self._number[job_id]]
            touched.update(self._members.get(active.group, ()))
            touched |= self._release(active, "preempted")
            active.outcome.preemptions += 1
            self._show(active)
        given: list[tuple[Active, Allocation, str, bool]] = []
        for job_id, allocation in decision.resize.items():
            active, group = self._active[self._number[job_id]], decision.groups.get(job_id, "")
            # Others may come onto a job's GPUs, or leave them, at no cost to it.
            alone = not (group and active.group)
            free_of_charge = allocation == active.allocation and alone
            why = "regrouped" if free_of_charge else "resized"
            touched.update(self._members.get(active.group, ()))
            touched |= self._release(active, why)
            given.append((active, allocation, group, free_of_charge))
        for job_id, allocation in decision.start.items():
            active = self._active[self._number[job_id]]
            given.append((active, allocation, decision.groups.get(job_id, ""), False))
        for active, allocation, group, free_of_charge in given:
            touched |= self._take(active, allocation, group, free_of_charge)
        for active, _, _, _ in given:
            self._resume(active)
            self._show(active)
        if touched:
            changed = (*decision.pause, *decision.resize, *decision.start)
            self._recondition(touched.difference(map(self._number.__getitem__, changed)))

    def _take(self, active: Active, allocation: Allocation, group: str, free: bool) -> set[int]:
        """The job holds these GPUs from now on; answers whom that concerns."""
        self._cluster.take(allocation, group)
        delay_s = 0 if free else self._delay_s(active)
        active.allocation, active.group = allocation, group
        active.gpus = sum(gpus for _, gpus in allocation)
        active.since_s = active.marked_s = self._now_s
        active.ready_s = max(active.ready_s, self._now_s) if free else self._now_s + delay_s
        active.work, active.useful = active.run.work_done, active.run.useful_gpu_s
        if active.first_start_s == inf:
            active.first_start_s = active.outcome.start_s = self._now_s
        elif not free:
            active.restarts += 1
        touched = self._surroundings.enter(active.job.number, allocation)
        if group:
            members = self._members.setdefault(group, [])
            touched.update(members)
            members.append(active.job.number)
            members.sort()
        return touched

    def _delay_s(self, active: Active) -> float:
        if active.first_start_s == inf:
            return self._costs.start_s
        return self._costs.known_s(active.job.spec.model) or 0

    def _release(self, active: Active, why: str) -> set[int]:
        """The job's segment ends now; answers whom that concerns."""
        now_s = self._now_s
        active.run.advance(now_s)
        active.run.mark()
        return self._close(active, now_s, why)

    def _close(self, active: Active, now_s: float, why: str) -> set[int]:
        self._count_vain(active)
        held_s = now_s - active.since_s
        restarting_s = max(0, min(now_s, active.ready_s) - active.since_s)
        outcome = active.outcome
        outcome.wasted_gpu_s += active.gpus * restarting_s
        active.attained += active.gpus * held_s
        active.run_s += held_s
        outcome.run_s, outcome.gpu_s = active.run_s, active.attained
        if self._record and (held_s > 0 or why == "completed"):
            run = active.run
            self._segments.append(
                Segment(
                    active.job.number, active.since_s, now_s, active.ready_s, active.allocation,
                    active.group, active.work, run.work_done, run.useful_gpu_s - active.useful, why,
                )
            )  # fmt: skip
        self._cluster.give_back(active.allocation, active.group)
        touched = self._surroundings.leave(active.job.number, active.allocation)
        if active.group:
            members = self._members[active.group]
            members.remove(active.job.number)
            if not members:
                del self._members[active.group]
        active.allocation, active.group, active.gpus = NOTHING, "", 0
        active.since_s = now_s
        active.generation += 1
        active.run.resume(now_s, NOTHING, Conditions())
        return touched

    def _count_vain(self, active: Active) -> None:
        """Raise Rejected for a job that gets no further however often it is given GPUs."""
        if active.run.work_done > active.furthest:
            active.furthest, active.vain = active.run.work_done, 0
            return
        active.vain += 1
        if active.vain >= limits.STARTS_IN_VAIN_MAX or self._now_s > limits.TRACE_SECONDS_MAX:
            done = active.furthest / active.run.work_total
            raise Rejected(
                f"job {active.view.id} held GPUs {active.vain} times, until {self._now_s} s, and "
                f"got no further than {done:.0%}: it loses them before its restart is over or its "
                "next checkpoint; give it checkpoints (--checkpoint-s), cheaper restarts "
                "(--restart-s), longer turns, or machines that fail less (--mtbf-s)"
            )

    # Conditions --------------------------------------------------------------------------------

    def _conditions(self, active: Active) -> Conditions:
        delay_s = max(0, active.ready_s - self._now_s)
        cluster = self._cluster
        slowdown = 1.0
        if self._slowdowns.any:
            slowdown = self._surroundings.slowdown(active.job, active.allocation, cluster.view)
        speeds = active.job.spec.gpu_types
        gpu_speed = speeds[cluster.types[active.allocation[0][0]]] if speeds else 1.0
        peers: tuple[JobRun, ...] = ()
        if active.group:
            others = self._members[active.group]
            peers = tuple(self._active[n].run for n in others if n != active.job.number)
        return Conditions(delay_s, slowdown, gpu_speed, peers, active.group)

    def _resume(self, active: Active) -> None:
        active.run.resume(self._now_s, active.allocation, self._conditions(active))
        active.generation += 1
        self._schedule(active)

    def _recondition(self, numbers: set[int]) -> None:
        """Running jobs whose neighbours changed go on under new conditions, without a restart."""
        for number in sorted(numbers):
            active = self._active.get(number)
            if active is None or not active.allocation:
                continue
            self._checkpoint(active)
            active.run.advance(self._now_s)
            self._resume(active)
            self._show(active)

    def _checkpoint(self, active: Active) -> None:
        """Note the last checkpoint that lies behind us: progress since then may yet be lost."""
        every_s = self._failures.checkpoint_s
        if self._failures.mtbf_s <= 0 or every_s <= 0:
            return
        at_s = active.since_s + floor((self._now_s - active.since_s) / every_s) * every_s
        if at_s > active.marked_s:
            active.run.advance(at_s)
            active.run.mark()
            active.marked_s = at_s

    def _show(self, active: Active) -> None:
        """A new struct for the policy: the job's state changed."""
        run, job_id = active.run, active.view.id
        if active.keeps_size:
            least, most = size_bounds(active.job.spec, active.gpus)
            active.view = replace(active.view, gpus_min=least, gpus_max=most)
        self._views[job_id] = active.view = replace(
            active.view,
            allocation=active.allocation, group=active.group, since_s=active.since_s,
            attained_gpu_s_then=active.attained, run_s_then=active.run_s,
            first_start_s=active.first_start_s, restarts=active.restarts,
            remaining_s_then=run.remaining_s(), speed=run.speed, ready_s=active.ready_s,
            profile=run.profile,
        )  # fmt: skip
        self._changed.append(job_id)

    # Nodes -------------------------------------------------------------------------------------

    def _start_outages(self) -> None:
        self._down: dict[int, float] = {}
        if self._failures.mtbf_s <= 0:
            return
        self._outage_plans = [
            self._failures.outages(node) for node in range(len(self._cluster.sizes))
        ]
        self._repairs = [0.0] * len(self._cluster.sizes)
        for node in range(len(self._cluster.sizes)):
            self._next_outage(node)

    def _next_outage(self, node: int) -> None:
        lost_s, back_s = next(self._outage_plans[node])
        self._repairs[node] = self._now_s_origin + back_s
        heappush(self._heap, (self._now_s_origin + lost_s, _LOST, node, 0))

    @property
    def _now_s_origin(self) -> float:
        return self._jobs[0].submit_s if self._jobs else 0

    def _lose_node(self, node: int) -> bool:
        heappush(self._heap, (self._repairs[node], _BACK, node, 0))
        if not self._cluster.up[node]:
            return False
        self._count_capacity()
        self._down[node] = self._now_s
        self._cluster.lose(node)
        touched: set[int] = set()
        for number in sorted(self._active):
            active = self._active[number]
            if any(n == node for n, _ in active.allocation):
                touched |= self._fail(active)
                self._show(active)
        self._recondition(touched)
        return True

    def _fail(self, active: Active) -> set[int]:
        """The job loses its GPUs and its progress since the last checkpoint."""
        self._checkpoint(active)
        if self._failures.checkpoint_s <= 0:
            active.run.advance(self._now_s)
            active.run.mark()
        else:
            since_s = max(active.marked_s, min(active.ready_s, self._now_s))
            active.outcome.wasted_gpu_s += active.gpus * (self._now_s - since_s)
            active.run.restore()
        active.outcome.failures += 1
        return self._close(active, self._now_s, "node-lost")

    def _bring_node(self, node: int) -> None:
        self._count_capacity()
        self._coming.discard(node)
        if node in self._down:
            self._outages.append((node, self._down.pop(node), self._now_s))
        self._cluster.bring(node)
        if self._outage_plans and self._repairs[node] == self._now_s:
            self._next_outage(node)

    def _scale(self, desired: int, scaling: Scaling) -> None:
        """Grow from the lowest index (after the provisioning time), shrink from the highest: only
        idle machines go, so it is the policy's plan that vacates them."""
        desired = min(max(desired, scaling.nodes_min), scaling.nodes_max, len(self._cluster.up))
        for node, up in enumerate(self._cluster.up):
            if node < desired and not up and node not in self._coming and node not in self._down:
                self._coming.add(node)
                at_s = self._now_s + scaling.provision_s
                heappush(self._heap, (at_s, _BACK, node, 0))
            elif node >= desired and up and self._cluster.idle(node):
                self._count_capacity()
                self._cluster.lose(node)

    def _count_capacity(self) -> None:
        elapsed_s = self._now_s - self._capacity_since_s
        self._capacity_gpu_s += self._cluster.view.gpus * elapsed_s
        self._capacity_since_s = self._now_s
