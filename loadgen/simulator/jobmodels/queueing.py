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
from typing import Final, cast, get_args

from slackwater.common.errors import ConfigRejected, Rejected
from slackwater.common.models.queueing import Method, StepTimes, sharing_above, throughputs
from slackwater.common.models.speedup import ElasticProfile, SpeedupCurve
from slackwater.loadgen.simulator.jobmodels.base import Conditions
from slackwater.loadgen.simulator.workload import SimJob, any_size
from slackwater.services.master.policies.view import Allocation, ClusterView, Policy

_NEVER: Final = float("inf")


class QueueingRun:
    __slots__ = ("_at_s", "_end_s", "_marked", "_rate", "job", "profile", "work_done", "work_total")

    def __init__(self, job: SimJob, curve: SpeedupCurve) -> None:
        self.job = job
        self.work_total = float(job.iterations)
        self.profile = ElasticProfile(curve, self.work_total)
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
        return self._rate / self._x(self.job.gpus)

    @property
    def useful_gpu_s(self) -> float:
        """What the steps so far would have taken on one node."""
        return self.work_done / self._x(1)

    def _x(self, gpus: int) -> float:
        curve = self.profile.curve
        return curve.x[min(gpus, curve.nodes)]

    def resume(self, now_s: float, allocation: Allocation, conditions: Conditions) -> None:
        gpus = sum(count for _, count in allocation)
        rate = self._x(gpus) * conditions.gpu_speed / conditions.slowdown if gpus else 0.0
        self._rate, self._at_s = rate, now_s + conditions.delay_s
        left = self.work_total - self.work_done
        self._end_s = self._at_s + left / rate if rate else _NEVER

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
        return (self.work_total - self.work_done) / self._x(self.job.gpus)

    def alone_s(self, gpus: int) -> float:
        return self.work_total / self._x(gpus)

    def mark(self) -> None:
        self._marked = self.work_done

    def restore(self) -> None:
        self.work_done = self._marked


class QueueingModel:
    name = "queueing"
    integer_times = False

    def __init__(
        self,
        method: str = "exact",
        servers: int = 1,
        charge_server: bool = False,
        overlap_above: float = 0.8,
    ) -> None:
        if method not in get_args(Method):
            raise ConfigRejected(f"method={method!r}; choose one of {', '.join(get_args(Method))}")
        if servers < 1 or not 0 <= overlap_above < 1:
            raise ConfigRejected(
                f"servers={servers}, overlap_above={overlap_above}; give at least 1 server and a "
                "utilisation from 0 to below 1"
            )
        self.method = cast(Method, method)
        self.servers, self.charge_server = servers, charge_server
        self.sharing = sharing_above(overlap_above)
        self._curves: dict[tuple[StepTimes, int], SpeedupCurve] = {}

    def adapt(self, jobs: Sequence[SimJob], policy: Policy) -> list[SimJob]:
        """Under a policy that chooses sizes, jobs may run on any number of nodes."""
        return any_size(jobs) if getattr(policy, "elastic", False) else list(jobs)

    def run(self, job: SimJob, cluster: ClusterView) -> QueueingRun:
        if job.iterations < 1:
            raise Rejected(
                f"job {job.id} has no iterations; the queueing model counts progress in steps: "
                "use a trace with that column, or `generate:lin`"
            )
        nodes = max(job.gpus, min(job.gpus_max, sum(node.gpus for node in cluster.nodes)), 1)
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


def step_times(job: SimJob) -> StepTimes:
    match job.stages_s:
        case (worker_s, uplink_s, downlink_s):
            return StepTimes(worker_s, 0.0, uplink_s, downlink_s)
        case (worker_s, uplink_s, server_s, downlink_s):
            return StepTimes(worker_s, server_s, uplink_s, downlink_s)
        case _:
            raise Rejected(
                f"job {job.id} has {len(job.stages_s)} stages; the queueing model needs the times "
                "of worker, uplink, (server,) downlink"
            )
