"""The discrete-event engine: a heap of instants, one decision for each, exact accounts.

**One decision per instant.** Events are (time, kind, number, generation); everything that happens
at an instant (completions, then nodes, then arrivals, then what the policy asked to be woken for)
is applied before the policy is asked once. An event of an older generation is stale and skipped.

**Lazy.** A running job is touched when its own allocation or conditions change, and when its run
says so; a waiting job is not touched at all. Snapshots are made of structs that stay valid between
changes, so an event costs what it changes.

**Exact.** Where the job model counts whole seconds, so does the engine: GPU-seconds are integers,
and jobs in equal jobs out. `Active` keeps a job's account, `Machines` the cluster's.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from slackwater.common.base.errors import Fatal
from slackwater.loadgen.simulator.gpu.active import Active
from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.events import ARRIVAL, LOST, RUN, WAKE, Heap
from slackwater.loadgen.simulator.gpu.interference import Surroundings
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions, JobModel, JobRun, Tuned
from slackwater.loadgen.simulator.gpu.machines import Machines
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
from slackwater.loadgen.simulator.gpu.vacating import Vacating
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.scheduler import Decision, Scheduler
from slackwater.services.master.scheduling.view import (
    Allocation,
    JobView,
    Pending,
    Policy,
    View,
)

__all__ = ["Costs", "Engine", "Outcome", "Result", "Scaling", "Segment", "Settings"]

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
        self._record, self._on_progress = record, on_progress
        self._may_wait_for_ever = settings.may_wait_for_ever
        self._ask_why_s = sorted(settings.ask_why_s, reverse=True)
        self._heap: Heap = []
        self._machines = Machines(cluster, settings.failures, settings.scaling, self._heap)
        self._vacating = Vacating(len(cluster.sizes), settings.costs.stop_s)
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
        self._reasons: list[tuple[float, Pending]] = []
        self.decisions = 0
        self.events = 0

    # The loop ----------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run until every job is done, or nothing can happen any more. Raises Fatal where a policy
        leaves jobs waiting for ever, unless the settings allow that."""
        if self._jobs:
            self._now_s = self._arrives_s(0)
            heappush(self._heap, (self._now_s, ARRIVAL, 0, 0))
            self._machines.begin(self._now_s, self._jobs[0].submit_s)
        while self._done < len(self._jobs):
            if not self._heap:
                if self._may_wait_for_ever:
                    break
                raise Fatal(self._stuck())
            if self._happen():
                self._decide()
                self._ask_why()
        up_gpu_s, outages = self._machines.account(self._now_s)
        return Result(
            self._outcomes, self._segments, self._now_s, up_gpu_s, self.decisions, self.events,
            outages, self._reasons,
        )  # fmt: skip

    def _happen(self) -> bool:
        """Everything of the next instant; False if all of it was stale."""
        heap = self._heap
        now_s = self._now_s = heap[0][0]
        something = False
        while heap and heap[0][0] == now_s:
            _, kind, number, generation = heappop(heap)
            self.events += 1
            if kind == RUN:
                something |= self._progress(number, generation)
            elif kind == ARRIVAL:
                self._arrive(number)
                something = True
            elif kind == WAKE:
                if now_s == self._wake_s:
                    self._wake_s = inf
                    something = True
            elif kind == LOST:
                something |= self._lose_node(number)
            else:
                self._machines.bring(number, now_s)
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
        active = Active(job, run, outcome, self._now_s, self._costs.told_s(job.spec.model))
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
            heappush(self._heap, (at_s, ARRIVAL, self._next_arrival, 0))

    def _arrives_s(self, number: int) -> float:
        at_s, begun_s = self._jobs[number].submit_s, self._begun.at_s
        return at_s if at_s > begun_s else begun_s

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
        touched = self._release(active, "completed")
        active.outcome.end_s = self._now_s
        active.outcome.restarts = active.restarts
        if isinstance(active.run, Tuned):
            active.outcome.tunings = tuple(active.run.tunings)
        del self._active[number], self._views[active.view.id]
        del self._number[active.view.id]
        self._changed.append(active.view.id)
        self._done += 1
        self._recondition(touched)
        return True

    def _schedule(self, active: Active) -> None:
        at_s = active.run.next_s()
        if at_s < inf:
            heappush(self._heap, (at_s, RUN, active.job.number, active.generation))

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
            heappush(self._heap, (decision.wake_s, WAKE, 0, 0))
        self._wake_s = decision.wake_s
        if decision.desired_nodes is not None:
            self._machines.scale(decision.desired_nodes, self._now_s)

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
            touched |= self._vacate(active, "preempted")
            active.outcome.preemptions += 1
            self._show(active)
        given: list[tuple[Active, Allocation, str, bool]] = []
        for job_id, allocation in decision.resize.items():
            active, group = self._active[self._number[job_id]], decision.groups.get(job_id, "")
            # Others may come onto a job's GPUs, or leave them, at no cost to it.
            alone = not (group and active.group)
            free_of_charge = allocation == active.allocation and alone
            if free_of_charge:
                touched |= self._release(active, "regrouped")
            else:
                touched |= self._vacate(active, "resized")
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
        now_s = self._now_s
        if free:
            ready_s = max(active.ready_s, now_s)
        else:
            active.awaited = self._vacating.take(allocation, self._cluster.free, now_s)
            begins_s = max(now_s, active.left_s, *(until_s for _, until_s in active.awaited))
            active.starting_s = self._delay_s(active)
            ready_s = begins_s + active.starting_s
        self._cluster.take(allocation, group)
        active.hold(now_s, allocation, group, ready_s, free)
        return self._surroundings.enter(active.job.number, allocation, group)

    def _delay_s(self, active: Active) -> float:
        if active.first_start_s == inf:
            return self._costs.start_s
        return self._costs.known_s(active.job.spec.model) or 0

    def _vacate(self, active: Active, why: str) -> set[int]:
        """It saves and leaves its GPUs; answers whom that concerns."""
        active.left_s = self._vacating.leave(
            active.allocation, active.awaited, active.ready_s, self._now_s
        )
        if self._costs.known_s(active.job.spec.model) is None:
            active.measured(self._now_s)
        return self._release(active, why)

    def _release(self, active: Active, why: str) -> set[int]:
        """The job's segment ends now; answers whom that concerns."""
        active.run.advance(self._now_s)
        active.run.mark()
        return self._close(active, why)

    def _close(self, active: Active, why: str) -> set[int]:
        segment = active.let_go(self._now_s, why)
        if self._record and (segment.start_s < self._now_s or why == "completed"):
            self._segments.append(segment)
        self._cluster.give_back(segment.allocation, segment.group)
        return self._surroundings.leave(segment.number, segment.allocation, segment.group)

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
            others = self._surroundings.members(active.group)
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
            active.checkpoint(self._now_s, self._failures)
            active.run.advance(self._now_s)
            self._resume(active)
            self._show(active)

    def _show(self, active: Active) -> None:
        view = active.show()
        self._views[view.id] = view
        self._changed.append(view.id)

    def _lose_node(self, node: int) -> bool:
        if not self._machines.lose(node, self._now_s):
            return False
        touched: set[int] = set()
        for number in sorted(self._active):
            active = self._active[number]
            if any(n == node for n, _ in active.allocation):
                active.fail(self._now_s, self._failures)
                touched |= self._close(active, "node-lost")
                self._show(active)
        self._recondition(touched)
        return True
