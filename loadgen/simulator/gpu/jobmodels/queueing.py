"""Asynchronous SGD with a parameter server: progress in steps, at the queueing model's rate.

Lin et al. (2018). A job is its number of steps; on w nodes it does X(w) of them a second
(`common.models.queueing`, by `method`). Its step is measured in the trace's stages: worker, uplink,
downlink, or worker, uplink, server, downlink. Nodes are GPUs.

By default every node is a worker and the server's node is not charged, and X(1) includes the
transfers: the reading under which the published figures come out (AlexNet: 12 days on one node,
limit speed-up 4.8). `charge_server` takes one of w > 1 nodes for the server, which leaves w - 1
workers; one node alone then needs no transfers, so X(2) < X(1).

Policies see the curve and the steps at submission (`ElasticProfile`). A slowdown or a slower GPU
divides the rate as a whole.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.queueing import Method, StepTimes, sharing_above, throughputs
from slackwater.common.domains.models.speedup import ElasticProfile, SpeedupCurve
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.jobmodels.iterated import IteratedRun
from slackwater.loadgen.simulator.gpu.workload import Submission, any_size
from slackwater.services.master.scheduling.registry import Count
from slackwater.services.master.scheduling.view import ClusterView, Policy


class QueueingRun(IteratedRun):
    __slots__ = ("profile",)

    def __init__(self, job: Submission, curve: SpeedupCurve) -> None:
        super().__init__(job)
        self.profile = ElasticProfile(curve, self.work_total)

    @property
    def speed(self) -> float:
        return self._rate / self._x(self.job.spec.gpus)

    @property
    def useful_gpu_s(self) -> float:
        """GPU seconds that the steps so far would have taken on one node."""
        return self.work_done / self._x(1)

    def _x(self, gpus: int) -> float:
        curve = self.profile.curve
        return curve.x[min(gpus, curve.nodes)]

    def rate(self, gpus: int, conditions: Conditions) -> float:
        return self._x(gpus) * conditions.gpu_speed / conditions.slowdown

    def remaining_s(self) -> float:
        return (self.work_total - self.work_done) / self._x(self.job.spec.gpus)

    def alone_s(self, gpus: int) -> float:
        return self.work_total / self._x(gpus)


class QueueingModel:
    name = "queueing"
    integer_times = False

    def __init__(
        self,
        method: Method = "exact",
        servers: Count = 1,
        charge_server: bool = False,
        overlap_above: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.8,
    ) -> None:
        self.method = method
        self.servers, self.charge_server = servers, charge_server
        self.sharing = sharing_above(overlap_above)
        self._curves: dict[tuple[StepTimes, int], SpeedupCurve] = {}

    def adapt(self, jobs: Sequence[Submission], policy: Policy) -> list[Submission]:
        """Under a policy that chooses sizes, jobs may run on any number of nodes."""
        return any_size(jobs) if getattr(policy, "elastic", False) else list(jobs)

    def run(self, job: Submission, cluster: ClusterView) -> QueueingRun:
        if job.oracle.iterations < 1:
            raise Rejected(
                f"job {job.spec.id} has no iterations; the queueing model counts progress in "
                "steps: use a trace with that column, or `generate:lin`"
            )
        asked, (_, most) = job.spec.gpus, job.spec.gpu_bounds
        nodes = max(asked, min(most, sum(node.gpus for node in cluster.nodes)), 1)
        key = (step_times(job), nodes)
        if key not in self._curves:
            self._curves[key] = self.curve(*key)
        return QueueingRun(job, self._curves[key])

    def curve(self, step: StepTimes, nodes: int) -> SpeedupCurve:
        x = throughputs(step, nodes, self.method, servers=self.servers, sharing=self.sharing)
        if not self.charge_server:
            return SpeedupCurve(x.tolist())
        alone = 1.0 / (step.worker_s + step.server_s)
        return SpeedupCurve([0.0, alone, *x.tolist()[1:nodes]])


def step_times(job: Submission) -> StepTimes:
    stages_s = job.oracle.stages_s
    match stages_s:
        case (worker_s, uplink_s, downlink_s):
            return StepTimes(worker_s, 0.0, uplink_s, downlink_s)
        case (worker_s, uplink_s, server_s, downlink_s):
            return StepTimes(worker_s, server_s, uplink_s, downlink_s)
        case _:
            raise Rejected(
                f"job {job.spec.id} has {len(stages_s)} stages; the queueing model needs the times "
                "of worker, uplink, (server,) downlink"
            )
