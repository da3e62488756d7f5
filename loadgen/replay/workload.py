"""The replayed workload: which job arrives when, and what it asks for.

The built-in workload is the paper's shared-aggregation experiment (gu2021-parameter-service,
figures 8 and 10): three VGG19 "2s-2w" jobs arrive one after another, an AlexNet "2s-2w" job comes
and goes while only the first runs, as in figure 10: the scheme fits it in by utilisation, and the
short iterations lose to the long ones' bursts. A trace row becomes a job as well: its arrival,
duration and number of GPUs are the trace's, its model is drawn by a seed.
"""

import random
from collections.abc import Sequence

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.loadgen import models
from slackwater.loadgen.traces.record import TraceJob
from slackwater.schemas.jobs import Aggregation, Consistency, JobSpec, Staleness
from slackwater.schemas.tensors import UpdateRule

COMPUTE_S = {
    "alexnet": 0.13,
    "awd-lm": 0.8,
    "bert-large": 1.4,
    "googlenet": 0.25,
    "inception3": 0.55,
    "inception4": 0.9,
    "resnet50": 0.4,
    "resnet101": 0.65,
    "resnet152": 0.9,
    "vgg11": 0.5,
    "vgg16": 0.85,
    "vgg19": 1.0,
}
"""Seconds of forward and backward of one iteration: an input of the emulation. AlexNet's and
VGG19's are the experiment's; the others follow the models' relative cost on the same GPU."""

DUTY_TARGET = {"vgg19": (0.25, 0.35), "alexnet": (1.0, 1.1)}
"""Share of one server that a job's aggregation keeps busy, as the papers bound it. An outcome:
a run whose profiled duty is more than DUTY_TOLERANCE outside is inconclusive."""
DUTY_TOLERANCE = 0.2

UPDATE = UpdateRule(name="momentum", learning_rate=1e-3, momentum=0.9)
TRACE_MODELS = ("alexnet", "vgg11", "vgg16", "vgg19", "resnet50", "resnet101", "awd-lm")
WORKERS_PER_JOB_MAX = 4
ITERATIONS_MIN = 12


class PlannedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job and the second (after the replay's start) at which it is submitted."""

    at_s: float
    spec: JobSpec
    compute_s: float
    source: dict[str, str] = {}


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    jobs: tuple[PlannedJob, ...]
    bytes_scale: float
    time_scale: float
    seed: int

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({job.spec.model for job in self.jobs}))

    def with_policy(self, policy: Aggregation, prefix: str) -> "Workload":
        """The same jobs under another policy and other ids."""
        jobs = tuple(
            msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, aggregation=policy))
            for job in self.renamed(prefix).jobs
        )
        return msgspec.structs.replace(self, jobs=jobs, name=f"{prefix} {self.name}")

    def renamed(self, prefix: str) -> "Workload":
        """The same jobs under other ids, to be played once more."""
        jobs = tuple(
            msgspec.structs.replace(
                job, spec=msgspec.structs.replace(job.spec, id=f"{prefix}-{job.spec.id}")
            )
            for job in self.jobs
        )
        return msgspec.structs.replace(self, jobs=jobs)

    def with_gpus(self) -> "Workload":
        """The same jobs, each of whose workers asks for a GPU."""
        jobs = tuple(
            msgspec.structs.replace(
                job, spec=msgspec.structs.replace(job.spec, gpus=job.spec.workers)
            )
            for job in self.jobs
        )
        return msgspec.structs.replace(self, jobs=jobs)

    def shortened(self, iterations: int, spacing_s: float) -> "Workload":
        """The same jobs in the same order, closer together and with at most `iterations`
        iterations of the slowest model (faster ones in proportion)."""
        slowest_s = max(job.compute_s for job in self.jobs)
        jobs = []
        for index, job in enumerate(self.jobs):
            most = round(iterations * slowest_s / job.compute_s)
            spec = respecified(job.spec, min(job.spec.iterations, most))
            jobs.append(msgspec.structs.replace(job, at_s=index * spacing_s, spec=spec))
        return msgspec.structs.replace(self, jobs=tuple(jobs))


def emulated(
    id: str,
    model: str,
    *,
    workers: int,
    servers: int,
    iterations: int,
    compute_s: float,
    bytes_scale: float,
    seed: int,
    update: UpdateRule = UPDATE,
    aggregation: Aggregation | None = None,
    consistency: Consistency = "synchronous",
    staleness: int = 0,
) -> JobSpec:
    """A job whose program emulates training with real bytes. Raises Rejected: unknown model."""
    models.resolve(model)
    program = (
        "python", "-m", "slackwater.loadgen.emulate",
        "--model", model,
        "--bytes-scale", repr(bytes_scale),
        "--compute-s", repr(compute_s),
        "--iterations", str(iterations),
        "--seed", str(seed),
    )  # fmt: skip
    return JobSpec(
        id=id,
        model=model,
        workers=workers,
        servers=servers,
        iterations=iterations,
        program=program,
        update=update,
        seed=seed,
        aggregation=aggregation,
        consistency=consistency,
        staleness=staleness,
        fractional_share=True,
    )


def respecified(spec: JobSpec, iterations: int) -> JobSpec:
    """The same emulated job with another number of iterations."""
    program = list(spec.program)
    program[program.index("--iterations") + 1] = str(iterations)
    return msgspec.structs.replace(spec, iterations=iterations, program=tuple(program))


def shared_aggregation(*, time_scale: float, bytes_scale: float, seed: int) -> Workload:
    """The built-in workload: (model, arrival, iterations) at time scale 1."""
    plan = [
        ("vgg19-1", "vgg19", 0.0, 118),
        ("alexnet-1", "alexnet", 22.0, 200),
        ("vgg19-2", "vgg19", 42.0, 82),
        ("vgg19-3", "vgg19", 57.0, 68),
    ]
    jobs = tuple(
        PlannedJob(
            at_s=at_s * time_scale,
            compute_s=COMPUTE_S[model] * time_scale,
            spec=emulated(
                id,
                model,
                workers=2,
                servers=2,
                iterations=iterations,
                compute_s=COMPUTE_S[model] * time_scale,
                bytes_scale=bytes_scale,
                seed=seed + index,
            ),
        )
        for index, (id, model, at_s, iterations) in enumerate(plan)
    )
    return Workload(
        name="shared-aggregation",
        jobs=jobs,
        bytes_scale=bytes_scale,
        time_scale=time_scale,
        seed=seed,
    )


def from_trace(
    rows: Sequence[TraceJob],
    *,
    time_scale: float,
    compute_scale: float,
    bytes_scale: float,
    seed: int,
) -> Workload:
    """Arrivals and durations of the trace times `time_scale`; workers = min(GPUs, 4), servers =
    max(1, workers // 2); the model is the row's where it names one we know, else drawn by `seed`;
    an iteration computes for the model's time times `compute_scale`. The columns `consistency` and
    `staleness` of our own format, where a row has them, are the job's.

    Raises Rejected when no row is left, or a row cannot be a job.
    """
    if not rows:
        raise Rejected("no job of the trace is left to replay; widen --min-gpus, --jobs or --start")
    rng = random.Random(seed)
    origin_s = min(row.submit_s for row in rows)
    jobs = []
    for index, row in enumerate(sorted(rows, key=lambda row: row.submit_s)):
        drawn = rng.choice(TRACE_MODELS)
        model = row.model if row.model in COMPUTE_S else drawn
        compute_s = COMPUTE_S[model] * compute_scale
        workers = min(row.gpus, WORKERS_PER_JOB_MAX)
        if row.duration_s is None:
            raise Rejected(f"job {row.id} of the trace has no duration; replay another trace")
        iterations = max(ITERATIONS_MIN, round(row.duration_s * time_scale / compute_s))
        consistency, staleness = _mode(row)
        spec = emulated(
            f"t{index:03d}-{model}",
            model,
            workers=workers,
            servers=max(1, workers // 2),
            iterations=iterations,
            compute_s=compute_s,
            bytes_scale=bytes_scale,
            seed=seed + index,
            consistency=consistency,
            staleness=staleness,
        )
        jobs.append(
            PlannedJob(
                at_s=(row.submit_s - origin_s) * time_scale,
                compute_s=compute_s,
                spec=spec,
                source={"id": row.id, "gpus": str(row.gpus), "duration_s": repr(row.duration_s)},
            )
        )
    return Workload(
        name="trace", jobs=tuple(jobs), bytes_scale=bytes_scale, time_scale=time_scale, seed=seed
    )


def _mode(row: TraceJob) -> tuple[Consistency, int]:
    """Read the job's consistency. Raises Rejected, which names job and value."""
    try:
        return (
            msgspec.convert(row.extra.get("consistency") or "synchronous", Consistency),
            msgspec.convert(row.extra.get("staleness") or 0, Staleness, strict=False),
        )
    except msgspec.ValidationError as error:
        raise Rejected(
            f"job {row.id} of the trace: consistency {row.extra.get('consistency')!r}, staleness "
            f"{row.extra.get('staleness')!r}: {error}"
        ) from error
