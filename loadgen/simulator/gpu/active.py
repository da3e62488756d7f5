"""A job that was submitted and has not ended: what it holds, and its account.

Service, run time and waiting time are kept in segments: one segment is one allocation held under
one set of conditions' start and end, the unit of the event log.
"""

from math import floor, inf
from typing import Final

from msgspec.structs import replace

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.loadgen.simulator.gpu.failures import Failures
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions, JobRun
from slackwater.loadgen.simulator.gpu.outcome import Outcome, Segment
from slackwater.loadgen.simulator.gpu.vacating import Awaited
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.delays import reallocation_s
from slackwater.services.master.scheduling.shown import shown, size_bounds
from slackwater.services.master.scheduling.view import NOTHING, Allocation, JobView

_ALONE: Final = Conditions()


class Active:
    """The engine's mutable side of an active job; `view` is what the policy sees of it."""

    __slots__ = (
        "allocation", "attained", "awaited", "first_start_s", "furthest", "generation", "gpus",
        "group", "job", "keeps_size", "left_s", "marked_s", "outcome", "ready_s", "restarts", "run",
        "run_s", "since_s", "starting_s", "useful", "vain", "view", "work",
    )  # fmt: skip

    def __init__(
        self, job: Submission, run: JobRun, outcome: Outcome, now_s: float, restart_s: float | None
    ) -> None:
        self.job, self.run, self.outcome = job, run, outcome
        self.generation = 0
        self.allocation: Allocation = NOTHING
        self.group = ""
        self.gpus = 0
        self.since_s: float = now_s
        self.ready_s: float = now_s
        self.awaited: Awaited = ()
        """GPUs that others were leaving when it was given them."""
        self.left_s: float = now_s
        """When it has left, or will have left, the GPUs that it held last."""
        self.starting_s: float = 0
        """Seconds that its present start takes, once its GPUs are free."""
        self.marked_s: float = now_s
        self.attained: float = 0
        self.run_s: float = 0
        self.first_start_s = inf
        self.restarts = 0
        self.furthest, self.vain = run.work_done, 0
        """Its best progress, and how often it has held GPUs since without getting further."""
        self.work: float = 0
        self.useful: float = 0
        self.view = shown(
            job.spec, job.number, job.submit_s, skew=job.oracle.skew, restart_s=restart_s
        )
        """The view last shown to the policy. A changed copy costs a quarter of a new one."""
        self.keeps_size = not job.spec.adaptive and self.view.gpus_min < self.view.gpus_max
        """It may be started with several numbers of GPUs, and then keeps its number."""

    def begun(self, before: JobView) -> None:
        """Take over what it did before the simulation begins."""
        self.attained, self.run_s = before.attained_gpu_s_then, before.run_s_then
        self.first_start_s = self.outcome.start_s = before.first_start_s
        self.restarts, self.since_s = before.restarts, before.since_s

    def show(self) -> JobView:
        """Make a new struct for the policy: the job's state changed."""
        run = self.run
        if self.keeps_size:
            least, most = size_bounds(self.job.spec, self.gpus)
            self.view = replace(self.view, gpus_min=least, gpus_max=most)
        self.view = replace(
            self.view,
            allocation=self.allocation, group=self.group, since_s=self.since_s,
            attained_gpu_s_then=self.attained, run_s_then=self.run_s,
            first_start_s=self.first_start_s, restarts=self.restarts,
            remaining_s_then=run.remaining_s(), speed=run.speed, ready_s=self.ready_s,
            profile=run.profile,
        )  # fmt: skip
        return self.view

    def measured(self, now_s: float) -> None:
        """Learn, as the live master does, what a re-allocation costs it: it has left, or knows when
        it will have."""
        if now_s < self.ready_s:
            return
        cost_s = reallocation_s(self.view.restart_s or 0, self.left_s - now_s, self.starting_s)
        if cost_s > 0:
            self.view = replace(self.view, restart_s=cost_s)

    def hold(
        self, now_s: float, allocation: Allocation, group: str, ready_s: float, free: bool
    ) -> None:
        """Hold these GPUs from now on; `free`: it has held them before, and does not restart."""
        self.allocation, self.group = allocation, group
        self.gpus = sum(gpus for _, gpus in allocation)
        self.since_s = self.marked_s = now_s
        self.ready_s = ready_s
        self.work, self.useful = self.run.work_done, self.run.useful_gpu_s
        if self.first_start_s == inf:
            self.first_start_s = self.outcome.start_s = now_s
        elif not free:
            self.restarts += 1

    def let_go(self, now_s: float, why: str) -> Segment:
        """Hold nothing from now on, and put what was held on the account."""
        run, outcome = self.run, self.outcome
        work = run.work_done
        if work > self.furthest:
            self.furthest, self.vain = work, 0
        else:
            self._count_vain(now_s)
        segment = Segment(
            self.job.number, self.since_s, now_s, self.ready_s, self.allocation, self.group,
            self.work, work, run.useful_gpu_s - self.useful, why,
        )  # fmt: skip
        held_s = now_s - self.since_s
        outcome.wasted_gpu_s += self.gpus * max(0, min(now_s, self.ready_s) - self.since_s)
        self.attained += self.gpus * held_s
        self.run_s += held_s
        outcome.run_s, outcome.gpu_s = self.run_s, self.attained
        self.allocation, self.group, self.gpus = NOTHING, "", 0
        self.since_s = now_s
        self.generation += 1
        run.resume(now_s, NOTHING, _ALONE)
        return segment

    def checkpoint(self, now_s: float, failures: Failures) -> None:
        """Note the last checkpoint that lies behind us: progress since then may yet be lost."""
        every_s = failures.checkpoint_s
        if failures.mtbf_s <= 0 or every_s <= 0:
            return
        at_s = self.since_s + floor((now_s - self.since_s) / every_s) * every_s
        if at_s > self.marked_s:
            self.run.advance(at_s)
            self.run.mark()
            self.marked_s = at_s

    def fail(self, now_s: float, failures: Failures) -> None:
        """Lose the progress since the last checkpoint."""
        self.checkpoint(now_s, failures)
        if failures.checkpoint_s <= 0:
            self.run.advance(now_s)
            self.run.mark()
        else:
            since_s = max(self.marked_s, min(self.ready_s, now_s))
            self.outcome.wasted_gpu_s += self.gpus * (now_s - since_s)
            self.run.restore()
        self.outcome.failures += 1

    def _count_vain(self, now_s: float) -> None:
        """Raise Rejected for a job that gets no further however often it is given GPUs."""
        self.vain += 1
        if self.vain >= limits.STARTS_IN_VAIN_MAX or now_s > limits.TRACE_SECONDS_MAX:
            done = self.furthest / self.run.work_total
            raise Rejected(
                f"job {self.view.id} held GPUs {self.vain} times, until {now_s} s, and got no "
                f"further than {done:.0%}: it loses them before its restart is over or its next "
                "checkpoint; give it checkpoints (--checkpoint-s), cheaper restarts "
                "(--restart-s), longer turns, or machines that fail less (--mtbf-s)"
            )
