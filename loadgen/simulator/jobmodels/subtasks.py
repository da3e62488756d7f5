"""Iterations of a CPU and a network subtask, alone or beside other jobs' (Harmony).

Lee's dissertation, section 4.3.2. A job is its number of iterations; the trace's stages are the
times of both subtasks (`cpu`, `network`) on the machines it asks for. Alone it iterates in
Tcpu(m) + Tnet. Jobs that share machines (a group) iterate together, in the group's time of
eq. 4.1; in a group whose label starts with `naive-` nobody orders the subtasks, and jobs meet at
random (`common.models.group.uncoordinated_s`). Machines are GPUs.
"""

from collections.abc import Sequence
from typing import Final

from slackwater.common.errors import Rejected
from slackwater.common.models.group import (
    NAIVE,
    Subtasks,
    check,
    group_iteration_s,
    uncoordinated_s,
)
from slackwater.loadgen.simulator.jobmodels.base import Conditions
from slackwater.loadgen.simulator.workload import SimJob, any_size
from slackwater.services.master.policies.view import Allocation, ClusterView, Policy

_NEVER: Final = float("inf")


class SubtasksRun:
    __slots__ = ("_at_s", "_end_s", "_marked", "_rate", "job", "profile", "work_done", "work_total")

    def __init__(self, job: SimJob) -> None:
        self.job = job
        self.profile = subtasks_of(job)
        self.work_total = float(job.iterations)
        self.work_done = 0.0
        self._marked = 0.0
        self._rate = 0.0
        self._at_s = 0.0
        self._end_s = _NEVER

    @property
    def done(self) -> bool:
        return self.work_done >= self.work_total

    @property
    def speed(self) -> float:
        return self._rate * self.profile.iteration_s(self.job.gpus)

    @property
    def useful_gpu_s(self) -> float:
        """Machine-seconds of its CPU subtasks so far."""
        return self.work_done * self.profile.cpu_s * self.profile.machines

    def resume(self, now_s: float, allocation: Allocation, conditions: Conditions) -> None:
        machines = sum(count for _, count in allocation)
        self._rate = 0.0
        if machines:
            alone_s = self._iteration_s(machines, conditions)
            self._rate = conditions.gpu_speed / conditions.slowdown / alone_s
        self._at_s = now_s + conditions.delay_s
        left = self.work_total - self.work_done
        self._end_s = self._at_s + left / self._rate if self._rate else _NEVER

    def _iteration_s(self, machines: int, conditions: Conditions) -> float:
        others = [peer.profile for peer in conditions.peers]
        if not others:
            return self.profile.iteration_s(machines)
        if conditions.group.startswith(NAIVE):
            return uncoordinated_s((self.profile, *others), machines)[0]
        return group_iteration_s([self.profile, *others], machines)

    def advance(self, now_s: float) -> None:
        if now_s >= self._end_s:
            self.work_done = self.work_total
        elif now_s > self._at_s:
            moved = self.work_done + (now_s - self._at_s) * self._rate
            self.work_done = min(moved, self.work_total)
        self._at_s = max(self._at_s, now_s)

    def next_s(self) -> float:
        return self._end_s

    def remaining_s(self) -> float:
        return (self.work_total - self.work_done) * self.profile.iteration_s(self.job.gpus)

    def alone_s(self, gpus: int) -> float:
        return self.work_total * self.profile.iteration_s(gpus)

    def mark(self) -> None:
        self._marked = self.work_done

    def restore(self) -> None:
        self.work_done = self._marked


class SubtasksModel:
    name = "subtasks"
    integer_times = False

    def adapt(self, jobs: Sequence[SimJob], policy: Policy) -> list[SimJob]:
        """Under a policy that chooses sizes, jobs may run on any number of nodes."""
        return any_size(jobs) if getattr(policy, "elastic", False) else list(jobs)

    def run(self, job: SimJob, cluster: ClusterView) -> SubtasksRun:
        if job.iterations < 1:
            raise Rejected(
                f"job {job.id} has no iterations; the subtasks model counts progress in them: use "
                "a trace with that column, or `generate:harmony`"
            )
        return SubtasksRun(job)


def subtasks_of(job: SimJob) -> Subtasks:
    if len(job.stages_s) != 2:
        raise Rejected(
            f"job {job.id} has {len(job.stages_s)} stages; the subtasks model needs two, the times "
            "of an iteration on the CPU and on the network"
        )
    found = Subtasks(job.stages_s[0], job.stages_s[1], max(job.gpus, 1))
    check(found, f"job {job.id}")
    return found
