"""Iterations of a CPU and a network subtask, alone or beside other jobs' (Harmony).

Lee's dissertation, section 4.3.2. A job is its number of iterations; the trace's stages are the
times of both subtasks (`cpu`, `network`) on the machines it asks for. Alone it iterates in
Tcpu(m) + Tnet. Jobs that share machines (a group) iterate together, in the group's time of
eq. 4.1; in a group whose label starts with `naive-` nobody orders the subtasks, and jobs meet at
random (`common.models.group.uncoordinated_s`). Machines are GPUs.
"""

from collections.abc import Sequence

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.group import (
    NAIVE,
    Subtasks,
    check,
    group_iteration_s,
    uncoordinated_s,
)
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.jobmodels.iterated import IteratedRun
from slackwater.loadgen.simulator.gpu.workload import Submission, any_size
from slackwater.services.master.scheduling.view import ClusterView, Policy


class SubtasksRun(IteratedRun):
    __slots__ = ("profile",)

    def __init__(self, job: Submission) -> None:
        super().__init__(job)
        self.profile = subtasks_of(job)

    @property
    def speed(self) -> float:
        return self._rate * self.profile.iteration_s(self.job.spec.gpus)

    @property
    def useful_gpu_s(self) -> float:
        """Machine-seconds of its CPU subtasks so far."""
        return self.work_done * self.profile.cpu_s * self.profile.machines

    def rate(self, gpus: int, conditions: Conditions) -> float:
        alone_s = self._iteration_s(gpus, conditions)
        return conditions.gpu_speed / conditions.slowdown / alone_s

    def _iteration_s(self, machines: int, conditions: Conditions) -> float:
        others = [peer.profile for peer in conditions.peers]
        if not others:
            return self.profile.iteration_s(machines)
        if conditions.group.startswith(NAIVE):
            return uncoordinated_s((self.profile, *others), machines)[0]
        return group_iteration_s([self.profile, *others], machines)

    def remaining_s(self) -> float:
        return (self.work_total - self.work_done) * self.profile.iteration_s(self.job.spec.gpus)

    def alone_s(self, gpus: int) -> float:
        return self.work_total * self.profile.iteration_s(gpus)


class SubtasksModel:
    name = "subtasks"
    integer_times = False

    def adapt(self, jobs: Sequence[Submission], policy: Policy) -> list[Submission]:
        """Under a policy that chooses sizes, jobs may run on any number of nodes."""
        return any_size(jobs) if getattr(policy, "elastic", False) else list(jobs)

    def run(self, job: Submission, cluster: ClusterView) -> SubtasksRun:
        if job.oracle.iterations < 1:
            raise Rejected(
                f"job {job.spec.id} has no iterations; the subtasks model counts progress in them: "
                "use a trace with that column, or `generate:harmony`"
            )
        return SubtasksRun(job)


def subtasks_of(job: Submission) -> Subtasks:
    stages_s = job.oracle.stages_s
    if len(stages_s) != 2:
        raise Rejected(
            f"job {job.spec.id} has {len(stages_s)} stages; the subtasks model needs two, the "
            "times of an iteration on the CPU and on the network"
        )
    found = Subtasks(*stages_s, max(job.spec.gpus, 1))
    check(found, f"job {job.spec.id}")
    return found
