"""The fixed model with measured stage times: jobs that share GPUs interleave their stages.

Everything as in `fixed`, but a job's speed depends on who holds the same GPUs: the stage times of
the trace (Muri's `resource_time_*`) give the group's period (`common.models.interleave`). A job
without stage times is one that fills its GPUs: it gains nothing from sharing.
"""

from slackwater.common.domains.models.interleave import StageProfile, speeds
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedRun
from slackwater.loadgen.simulator.gpu.workload import Submission
from slackwater.services.master.scheduling.view import ClusterView


class InterleavedRun(FixedRun):
    __slots__ = ("_profile",)

    def __init__(self, job: Submission) -> None:
        super().__init__(job)
        self._profile = stage_profile(job)

    @property
    def profile(self) -> StageProfile:
        return self._profile

    def relative_speed(self, conditions: Conditions) -> float:
        alone = super().relative_speed(conditions)
        if not conditions.peers:
            return alone
        members = [self._profile, *(peer.profile for peer in conditions.peers)]
        return alone * speeds(members)[0]


def stage_profile(job: Submission) -> StageProfile:
    oracle = job.oracle
    if not oracle.stages_s:
        return StageProfile((1.0,), 1.0)
    return StageProfile(oracle.stages_s, oracle.iteration_s or sum(oracle.stages_s))


class InterleavedModel:
    name = "interleaved"
    integer_times = True

    def run(self, job: Submission, cluster: ClusterView) -> InterleavedRun:
        return InterleavedRun(job)
