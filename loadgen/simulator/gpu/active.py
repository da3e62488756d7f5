"""The engine's mutable side of a job that was submitted and has not ended."""

from math import inf

from slackwater.loadgen.simulator.gpu.jobmodels.base import JobRun
from slackwater.loadgen.simulator.gpu.outcome import Outcome
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.shown import shown
from slackwater.services.master.scheduling.view import NOTHING, Allocation, JobView


class Active:
    """An active job; `view` is what the policy sees of it."""

    __slots__ = (
        "allocation", "attained", "first_start_s", "furthest", "generation", "gpus", "group", "job",
        "keeps_size", "marked_s", "outcome", "ready_s", "restarts", "run", "run_s", "since_s",
        "useful", "vain", "view", "work",
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
