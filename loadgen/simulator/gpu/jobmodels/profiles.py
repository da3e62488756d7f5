"""The profiles model: jobs replayed from measured step times and gradient statistics.

As Pollux's simulator does (Qiao, thesis, section 3.5.3): a job's true step time comes from its
placement and per-GPU batch, its true statistical efficiency from the epoch it is in and its total
batch; their product is its progress, in iterations of M0. An adaptive job also holds an agent
(section 3.4.1; pollux_agent.py), tells it what it measures, and re-tunes (m, s) at every report and
at every epoch's end. Its measurements have no noise: one iteration of a configuration says it all,
and accumulation steps are not timed. Policies see what the agent knows, never the truth;
those with an oracle ask for it (`iteration_s`, `remaining_iterations`).

**The authors' conditions** (docs/readings.md): NeuMF is fixed at one GPU and a batch of 32768,
because its optimum is reached there; on one GPU a batch above M0 accumulates; epochs end in whole
seconds, and an end that is rounded back onto a report is seen after it.

Lazy: a run has at most three instants of its own ahead, the end of its epoch, its next measurement
and its next review; the last two only while they could change something.
"""

import os
import re
from collections.abc import Mapping, Sequence
from math import ceil, inf
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.base.thinned import Thinned
from slackwater.common.domains.models.fitting import Observation
from slackwater.common.domains.models.goodput import BatchLimits, GoodputModel, split_batch
from slackwater.common.domains.models.pollux_agent import PolluxAgent, next_report_s
from slackwater.common.domains.models.throughput import Throughput
from slackwater.loadgen.simulator.gpu.jobmodels.applications import (
    Application,
    Shape,
    read_applications,
)
from slackwater.loadgen.simulator.gpu.jobmodels.base import TUNINGS_MAX, Conditions, Tuning
from slackwater.loadgen.simulator.gpu.workload import Submission, resizable
from slackwater.services.master.scheduling.registry import Period
from slackwater.services.master.scheduling.view import Allocation, ClusterView, Policy

FIXED: Final[Mapping[str, tuple[int, int]]] = {"ncf": (1, 32768)}
"""Application -> (GPUs, batch) that the authors' adaptive runs hold fixed."""
GPUS_MAX: Final = 64
"""The profiles were measured on 64 GPUs."""


class Options(msgspec.Struct, frozen=True):
    adaptive: bool = True
    """Jobs that do not say tune their own batch; otherwise they keep the trace's."""
    report_s: float = 60.0
    """Reports and reviews happen at multiples of this."""
    fixed: Mapping[str, tuple[int, int]] = msgspec.field(default_factory=lambda: dict(FIXED))
    whole_seconds: bool = True
    """Epochs end in whole seconds, as the authors' do."""
    throughput_only: bool = False
    """Agents take every example for equally useful: Or et al.'s scaling (section 3.5.4)."""
    bootstrap: bool = True
    """A job that has run once was timed on one GPU of every measured type before (Sia)."""
    known: Mapping[str, Mapping[str, Throughput]] = msgspec.field(default_factory=dict)
    """Application -> GPU type -> its throughput known beforehand, for the cost of exploring
    (section 3.5.3)."""


class ProfileRun:
    """One job. Also the `profile` that policies see: `model`, `gpus_seen` (Pollux), `iteration_s`,
    `remaining_iterations` (oracles)."""

    def __init__(
        self, job: Submission, application: Application, cluster: ClusterView, options: Options
    ) -> None:
        self.job = job
        self._application, self._options = application, options
        self._node_gpus = max(1, cluster.node_gpus_max)
        self._types = tuple(node.gpu_type for node in cluster.nodes)
        self._limits = limits_of(job, application, options)
        self._agents = {kind: self._new_agent(kind) for kind in self._kinds()}
        self._epoch, self._progress = 0, 0.0
        self._marked = (0, 0.0)
        self._useful = 0.0
        self.tunings = Thinned[Tuning](TUNINGS_MAX)
        self._allocation: Allocation = ()
        self._shape: Shape = ()
        self._gpu_type, self._gpu_speed, self._slowdown = "", 1.0, 1.0
        self._per_gpu, self._steps = 0, 0
        self._rate, self._efficiency = 0.0, 0.0
        self._at_s = 0.0
        self._measure_s = self._review_s = self._epoch_end_s = inf

    def _kinds(self) -> list[str]:
        """Types that have measurements of their own, and "" for all others."""
        return sorted({self._kind(gpu_type) for gpu_type in self._types} | {""})

    def _kind(self, gpu_type: str) -> str:
        return gpu_type if self._application.measured(gpu_type) else ""

    def _new_agent(self, kind: str) -> PolluxAgent:
        return PolluxAgent(
            limits_of(self.job, self._application, self._options, kind),
            known=self._options.known.get(self.job.spec.model, {}).get(kind),
            throughput_only=self._options.throughput_only,
            smoothing=0.0,  # The profiles' moments are means already.
        )

    @property
    def agent(self) -> PolluxAgent:
        """The one that learns about the type that the job runs on, or ran on last."""
        return self._agents[self._kind(self._gpu_type)]

    # For the engine -------------------------------------------------------------------------------

    @property
    def work_done(self) -> float:
        return self._progress

    @property
    def work_total(self) -> float:
        return self._application.progress_at(self._application.epochs)

    @property
    def done(self) -> bool:
        return self._epoch >= self._application.epochs

    @property
    def useful_gpu_s(self) -> float:
        """GPU-seconds of progress, weighted by statistical efficiency (figure 3.10)."""
        return self._useful

    @property
    def profile(self) -> Any:
        return self

    @property
    def model(self) -> GoodputModel | None:
        return self.agent.model

    def model_on(self, gpu_type: str) -> GoodputModel | None:
        """Return the model of a GPU type. On a type that it was not measured on: as on the type
        where it ran last."""
        return self._agents[self._kind(gpu_type)].model or self.model

    @property
    def gpus_seen(self) -> int:
        return max(agent.gpus_seen for agent in self._agents.values())

    @property
    def speed(self) -> float:
        if not self._allocation or self.done:
            return 0.0
        alone = self._alone_s(self.job.spec.gpus)
        epoch_s = alone[self._epoch + 1] - alone[self._epoch]
        length = self._length(self._epoch)
        return self._rate * epoch_s / length

    def _length(self, epoch: int) -> float:
        return self._application.progress_at(epoch + 1) - self._application.progress_at(epoch)

    def next_s(self) -> float:
        return min(self._measure_s, self._review_s, self._epoch_end_s)

    def resume(self, now_s: float, allocation: Allocation, conditions: Conditions) -> None:
        moved = allocation != self._allocation
        self._allocation = allocation
        if not allocation:
            self._rate = 0.0
            self._measure_s = self._review_s = self._epoch_end_s = inf
            return
        self._slowdown, self._gpu_speed = conditions.slowdown, conditions.gpu_speed
        if self.done:  # A neighbour's end, at the same instant, changed its conditions.
            self._rate, self._epoch_end_s = 0.0, now_s
            return
        self._at_s = now_s + conditions.delay_s
        if moved:
            self._shape = tuple(gpus for _, gpus in allocation)
            self._gpu_type = self._types[allocation[0][0]]
            self._tune()
            if self._reports:
                self._measure_s = self._at_s + self._step_times()[0]
                self._review_s = next_report_s(self._at_s, self._options.report_s)
        self._set_rate()

    def advance(self, now_s: float) -> None:
        while self.next_s() <= now_s and not self.done:
            due_s = self.next_s()
            self._integrate(due_s)
            if due_s == self._measure_s:
                self._measure_s = inf
                self._measure()
            elif due_s == self._epoch_end_s:
                self._end_epoch(due_s)
            else:
                self._review(due_s)
        self._integrate(now_s)

    def mark(self) -> None:
        self._marked = self._epoch, self._progress

    def restore(self) -> None:
        self._epoch, self._progress = self._marked

    # Progress ----------------------------------------------------------------------------------

    def _integrate(self, now_s: float) -> None:
        if now_s > self._at_s and self._allocation and not self.done:
            elapsed_s = now_s - self._at_s
            end = self._application.progress_at(self._epoch + 1)
            self._progress = min(end, self._progress + self._rate * elapsed_s)
            self._useful += elapsed_s * sum(self._shape) * self._efficiency
            self._at_s = now_s

    def _end_epoch(self, now_s: float) -> None:
        self._measure()
        self._epoch += 1
        self._progress = self._application.progress_at(self._epoch)
        if self.done:
            self._rate, self._epoch_end_s = 0.0, inf
            return
        if self._options.whole_seconds:
            self._at_s = min(self._at_s, float(round(now_s)))
        self._tune()
        self._set_rate()
        self._measure()
        if self._adaptive:
            self._review_s = next_report_s(now_s, self._options.report_s)

    def _review(self, now_s: float) -> None:
        """Measured, fitted, reported; and then re-tuned, as long as that changes anything."""
        self._measure()
        before = self._per_gpu, self._steps
        if self._adaptive:
            self._tune()
        changed = before != (self._per_gpu, self._steps)
        self._review_s = next_report_s(now_s, self._options.report_s) if changed else inf
        if changed:
            self._set_rate()

    def _set_rate(self) -> None:
        """The true speed of the configuration in force, and with it the end of the epoch."""
        gpus = sum(self._shape)
        batch = gpus * self._per_gpu * (self._steps + 1)
        step_s, sync_s = self._step_times()
        seconds = (step_s + (step_s - sync_s) * self._steps) * self._slowdown
        self._efficiency = self._true_efficiency(batch, self._epoch)
        self._rate = batch / self._application.batch_initial * self._efficiency / seconds
        left = self._application.progress_at(self._epoch + 1) - self._progress
        end_s = self._at_s + max(0.0, left) / self._rate
        if self._options.whole_seconds:
            whole_s = float(round(end_s))
            if whole_s > end_s or whole_s % self._options.report_s:
                end_s = max(self._at_s, whole_s)
        self._epoch_end_s = end_s
        rate_scale = self.agent.learning_rate_scale(batch)
        done = self._progress / self.work_total
        self.tunings.add(
            Tuning(self._at_s, gpus, batch, self._steps, rate_scale, self._efficiency, done)
        )

    def _true_efficiency(self, batch: float, epoch: int) -> float:
        initial = self._application.batch_initial
        moments = self._application.moments(batch, epoch)
        if moments.sqr <= 0.0:
            return 1.0
        scale = batch / initial
        gain = (moments.var + moments.sqr) / (moments.var / scale + moments.sqr)
        return gain / scale

    def _step_times(self) -> tuple[float, float]:
        return self._times_of(self._shape, self._per_gpu)

    def _times_of(self, shape: Shape, per_gpu: int) -> tuple[float, float]:
        step_s, sync_s = self._application.step_times(shape, per_gpu, self._gpu_type)
        if self._gpu_type and self._application.measured(self._gpu_type):
            return step_s, sync_s
        return (step_s - sync_s) / self._gpu_speed + sync_s, sync_s

    # The job's agent ---------------------------------------------------------------------------

    @property
    def _reports(self) -> bool:
        return self._options.adaptive or self._adaptive

    @property
    def _adaptive(self) -> bool:
        return self._limits.fixed is None

    def _tune(self) -> None:
        """(m, s) for the current allocation, from what is known."""
        nodes, gpus = len(self._shape), sum(self._shape)
        self._per_gpu, self._steps = self.agent.batch_split(nodes, gpus, self._gpu_speed)

    def _measure(self) -> None:
        """One iteration was seen: its time, exact at once, and its gradients' statistics."""
        if not self._reports:
            return
        agent, nodes, gpus = self.agent, len(self._shape), sum(self._shape)
        if not agent.has_seen(nodes, gpus, self._per_gpu):
            step_s, sync_s = self._step_times()
            # Parameters are those of the reference type; the scheduler scales them by type.
            step_s = (step_s - sync_s) * self._gpu_speed + sync_s
            agent.saw_iteration(Observation(nodes, gpus, self._per_gpu, 0, step_s, step_s - sync_s))
        if self._options.bootstrap:
            self._bootstrap()
        for each in self._agents.values():
            if not self._options.throughput_only:
                batch = gpus * self._per_gpu * (self._steps + 1)
                each.saw_gradients(self._application.moments(batch, self._epoch))
            each.refit()

    def _bootstrap(self) -> None:
        """One GPU of every measured type, at the smallest batch that it was measured with."""
        for kind, agent in self._agents.items():
            per_gpu = agent.limits.per_gpu_min
            if kind and not agent.gpus_seen:
                step_s, sync_s = self._application.step_times((1,), per_gpu, kind)
                agent.saw_iteration(Observation(1, 1, per_gpu, 0, step_s, step_s - sync_s))

    # Oracles -----------------------------------------------------------------------------------

    @property
    def remaining_iterations(self) -> float:
        """Count the iterations left at the trace's batch size, by the measured runs; 1 in the last
        epoch."""
        application, batch = self._application, float(self.job.spec.batch_size)
        last = application.epochs - 1
        if self._epoch >= last:
            return 1.0
        return application.iterations_at(batch, last) - application.iterations_at(
            batch, self._epoch
        )

    def iteration_s(self, gpus: int) -> float:
        """True time of an iteration of the trace's batch on so many GPUs on full machines."""
        full, rest = divmod(gpus, self._node_gpus)
        shape = (self._node_gpus,) * full + ((rest,) if rest else ())
        limits, batch = self._limits, self.job.spec.batch_size
        if gpus == 1:
            share = ceil(batch / limits.per_gpu_max)
            steps = max(1, share - 1)
            per_gpu = min(ceil(batch / (steps + 1)), limits.total_max // (steps + 1))
        else:
            m, s = split_batch(limits, batch, gpus)
            per_gpu, steps = int(m), int(s)
        step_s, sync_s = self._times_of(shape, per_gpu)
        return step_s + (step_s - sync_s) * steps

    def remaining_s(self) -> float:
        alone = self._alone_s(self.job.spec.gpus)
        if self.done:
            return 0.0
        begun = self._progress - self._application.progress_at(self._epoch)
        part = begun / self._length(self._epoch)
        done_s = alone[self._epoch] * (1 - part) + alone[self._epoch + 1] * part
        return alone[-1] - done_s

    def alone_s(self, gpus: int) -> float:
        return self._alone_s(gpus)[-1]

    def _alone_s(self, gpus: int) -> list[float]:
        """Seconds to the end of each epoch with the trace's batch on `gpus` GPUs to itself."""
        batch = self._limits.fixed or self.job.spec.batch_size or self._limits.initial
        known = self._application.alone_s
        if (gpus, batch) not in known:
            ends = [0.0]
            per_gpu, steps = (int(x) for x in split_batch(self._limits, batch, gpus))
            full, rest = divmod(gpus, self._node_gpus)
            shape = (self._node_gpus,) * full + ((rest,) if rest else ())
            step_s, sync_s = self._application.step_times(shape, per_gpu)
            seconds = step_s + (step_s - sync_s) * steps
            true_batch = gpus * per_gpu * (steps + 1)
            for epoch in range(self._application.epochs):
                gain = self._true_efficiency(true_batch, epoch) * true_batch
                iterations = self._length(epoch) * self._application.batch_initial / gain
                ends.append(ends[-1] + iterations * seconds)
            known[gpus, batch] = ends
        return known[gpus, batch]


def limits_of(
    job: Submission, application: Application, options: Options, gpu_type: str = ""
) -> BatchLimits:
    fixed = None
    per_gpu_min, per_gpu_max = application.per_gpu_bounds(gpu_type)
    asked = job.spec.batch
    if asked == "fixed" or (asked is None and not options.adaptive):
        fixed = job.spec.batch_size or application.batch_initial
    elif asked is None and job.spec.model in options.fixed:
        fixed = options.fixed[job.spec.model][1]
    return BatchLimits(
        initial=application.batch_initial,
        total_max=application.batch_max,
        per_gpu_max=per_gpu_max,
        per_gpu_min=per_gpu_min,
        fixed=fixed,
        accumulate_alone=True,
    )


class ProfilesModel:
    """`folder`: the profiles. `batch`: who tunes it: `policy` asks the policy's `adaptive`, `job`
    always, `trace` never. `known`: agents know their throughput from the first iteration on, as
    theta_sys fitted to all measurements (true) or as the measurements themselves (table). `fixed`:
    application=GPUSxBATCH,... that adaptive jobs hold fixed. `time_scale`: factor for all measured
    times, for a trace whose submissions have the same."""

    name = "profiles"
    integer_times = False

    def __init__(
        self,
        folder: str = "",
        batch: Literal["policy", "job", "trace"] = "policy",
        report_s: Period = 60.0,
        whole_seconds: bool = True,
        throughput_only: bool = False,
        known: bool | Literal["table"] = False,
        fixed: str = "ncf=1x32768",
        bootstrap: bool = True,
        time_scale: Period = 1.0,
    ) -> None:
        self.applications = read_applications(_folder(folder), time_scale)
        self._ask_policy = batch == "policy"
        models: dict[str, dict[str, Throughput]] = {}
        if known:
            for name, application in self.applications.items():
                tables = {kind: application.throughput(kind) for kind in application.gpu_types}
                models[name] = {k: t if known == "table" else t.fitted for k, t in tables.items()}
        self.options = Options(
            adaptive=batch != "trace",
            report_s=report_s,
            whole_seconds=whole_seconds,
            throughput_only=throughput_only,
            fixed=_parse_fixed(fixed),
            bootstrap=bootstrap,
            known=models,
        )

    @classmethod
    def of(cls, applications: Mapping[str, Application], options: Options) -> "ProfilesModel":
        """With profiles that were read already."""
        model = cls.__new__(cls)
        model.applications, model.options = dict(applications), options
        model._ask_policy = False
        return model

    def run(self, job: Submission, cluster: ClusterView) -> ProfileRun:
        return ProfileRun(job, self._application(job), cluster, self.options)

    def adapt(self, jobs: Sequence[Submission], policy: Policy) -> list[Submission]:
        """Return the jobs in the form that the policy can use: free in size if it is `elastic`,
        with their own agents if it is `adaptive`."""
        if self._ask_policy:
            adaptive = bool(getattr(policy, "adaptive", False))
            self.options = msgspec.structs.replace(self.options, adaptive=adaptive)
        return self.elastic(jobs) if getattr(policy, "elastic", False) else list(jobs)

    def elastic(self, jobs: Sequence[Submission], gpus: int = GPUS_MAX) -> list[Submission]:
        """The same jobs, free to run on any number of GPUs that their batch allows."""
        return [self._elastic(job, gpus) for job in jobs]

    def _elastic(self, job: Submission, gpus: int) -> Submission:
        limits = limits_of(job, self._application(job), self.options)
        most = min(gpus, GPUS_MAX, limits.gpus_max)
        if job.spec.model in self.options.fixed:
            most = self.options.fixed[job.spec.model][0]
        return resizable(job, most)

    def _application(self, job: Submission) -> Application:
        model = job.spec.model
        if model not in self.applications:
            raise Rejected(
                f"job {job.spec.id} trains {model!r}, which has no profile; profiles exist for "
                f"{', '.join(sorted(self.applications))}"
            )
        return self.applications[model]


def _folder(given: str) -> Path:
    """The given folder, or where the shared traces are."""
    if given:
        return Path(given)
    return Path(os.environ.get("SLACKWATER_TRACES", "../shared/traces")) / "pollux" / "profiles"


def _parse_fixed(text: str) -> dict[str, tuple[int, int]]:
    fixed = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        found = re.fullmatch(r"([^=]+)=(\d+)x(\d+)", part)
        if found is None:
            raise ConfigRejected(f"profiles.fixed: {part!r} is not APPLICATION=GPUSxBATCH")
        fixed[found[1]] = (int(found[2]), int(found[3]))
    return fixed
