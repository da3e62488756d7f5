"""Iterations of a CPU and a network subtask, alone or beside other jobs' (Harmony).

Lee's dissertation, section 4.3.2. A job is its number of iterations; the trace's stages are the
times of both subtasks (`cpu`, `network`) on the machines it asks for. Alone it iterates in
Tcpu(m) + Tnet. Jobs that share machines (a group) iterate together, in the group's time of
eq. 4.1; in a group whose label starts with `naive-` nobody orders the subtasks, and jobs meet at
random (`common.models.group.uncoordinated_s`). Machines are GPUs.

`error` lets policies see other times than the true ones: each job's two are off by factors drawn
evenly from 1 - error to 1 + error (section 4.4.6).
"""

from collections.abc import Sequence
from random import Random
from typing import Annotated, Final

import msgspec

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
from slackwater.services.master.scheduling.registry import AtLeast0, Count
from slackwater.services.master.scheduling.view import ClusterView, Policy

CONTENTION: Final = 0.34
"""The part by which each job that another one finds at a resource slows it down, where nobody
orders them: with it naive co-location gains as little as published, on average (section 4.4.3)."""


class SubtasksRun(IteratedRun):
    __slots__ = ("_contention", "_true", "profile")

    def __init__(self, job: Submission, contention: float, profile: Subtasks) -> None:
        """`profile`: what policies see."""
        super().__init__(job)
        self._true, self.profile, self._contention = subtasks_of(job), profile, contention

    @property
    def speed(self) -> float:
        return self._rate * self._true.iteration_s(self.job.spec.gpus)

    @property
    def useful_gpu_s(self) -> float:
        """Machine-seconds of its CPU subtasks so far."""
        return self.work_done * self._true.cpu_s * self._true.machines

    def rate(self, gpus: int, conditions: Conditions) -> float:
        alone_s = self._iteration_s(gpus, conditions)
        return conditions.gpu_speed / conditions.slowdown / alone_s

    def _iteration_s(self, machines: int, conditions: Conditions) -> float:
        others = [subtasks_of(peer.job) for peer in conditions.peers]
        if not others:
            return self._true.iteration_s(machines)
        if conditions.group.startswith(NAIVE):
            return uncoordinated_s((self._true, *others), machines, self._contention)[0]
        return group_iteration_s([self._true, *others], machines)

    def remaining_s(self) -> float:
        return (self.work_total - self.work_done) * self._true.iteration_s(self.job.spec.gpus)

    def alone_s(self, gpus: int) -> float:
        return self.work_total * self._true.iteration_s(gpus)


class SubtasksModel:
    name = "subtasks"
    integer_times = False

    def __init__(
        self,
        contention: AtLeast0 = CONTENTION,
        error: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.0,
        seed: Count = 0,
    ) -> None:
        self.contention, self.error, self.seed = contention, error, seed

    def adapt(self, jobs: Sequence[Submission], policy: Policy) -> list[Submission]:
        """Under a policy that chooses sizes, jobs may run on any number of nodes."""
        return any_size(jobs) if getattr(policy, "elastic", False) else list(jobs)

    def run(self, job: Submission, cluster: ClusterView) -> SubtasksRun:
        if job.oracle.iterations < 1:
            raise Rejected(
                f"job {job.spec.id} has no iterations; the subtasks model counts progress in them: "
                "use a trace with that column, or `generate:harmony`"
            )
        return SubtasksRun(job, self.contention, self._seen(job))

    def _seen(self, job: Submission) -> Subtasks:
        true = subtasks_of(job)
        if not self.error:
            return true
        rng = Random(f"{self.seed}/{job.spec.id}")
        cpu, network = (rng.uniform(1.0 - self.error, 1.0 + self.error) for _ in range(2))
        return msgspec.structs.replace(
            true, cpu_s=cpu * true.cpu_s, network_s=network * true.network_s
        )


def subtasks_of(job: Submission) -> Subtasks:
    stages_s = job.oracle.stages_s
    if len(stages_s) != 2:
        raise Rejected(
            f"job {job.spec.id} has {len(stages_s)} stages; the subtasks model needs two, the "
            "times of an iteration on the CPU and on the network"
        )
    machines = max(job.spec.gpus, 1)
    extra = job.oracle.extra
    sizes_gb = (float(extra.get(name, 0.0)) for name in ("input_gb", "model_gb"))
    found = Subtasks(*stages_s, machines, 1e9 * sum(sizes_gb))
    check(found, f"job {job.spec.id}")
    return found
