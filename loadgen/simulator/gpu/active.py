"""The engine's mutable side of a job that was submitted and has not ended."""

from math import inf

from slackwater.loadgen.simulator.gpu.jobmodels.base import JobRun
from slackwater.loadgen.simulator.gpu.outcome import Outcome
from slackwater.loadgen.simulator.gpu.workload import SimJob
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.view import NOTHING, Allocation, JobView


class Active:
    """An active job; `view` is what the policy sees of it."""

    __slots__ = (
        "allocation", "attained", "first_start_s", "furthest", "generation", "gpus", "group", "job",
        "marked_s", "outcome", "ready_s", "restarts", "run", "run_s", "since_s", "useful", "vain",
        "view", "work",
    )  # fmt: skip

    def __init__(
        self, job: SimJob, run: JobRun, outcome: Outcome, now_s: float, restart_s: float | None
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
        self.view = JobView(
            id=JobId(job.id), number=job.number, submitted_s=job.submit_s, gpus=job.gpus,
            gpus_min=job.gpus_min, gpus_max=job.gpus_max, model=job.model, tenant=job.tenant,
            priority=job.priority, batch_size=job.batch_size, skew=job.skew, speeds=job.speeds,
            restart_s=restart_s,
        )  # fmt: skip
        """The view last shown to the policy. A changed copy costs a quarter of a new one."""

    def begun(self, before: JobView) -> None:
        """Take over what it did before the simulation begins."""
        self.attained, self.run_s = before.attained_gpu_s_then, before.run_s_then
        self.first_start_s = self.outcome.start_s = before.first_start_s
        self.restarts, self.since_s = before.restarts, before.since_s
