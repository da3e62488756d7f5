"""Pollux's workload: Qiao's thesis, section 3.5.1 and table 3.1.

Published: 160 jobs over the busiest 8 hours of Philly's day; 2 % ImageNet, 6 % YOLOv3, 10 %
DeepSpeech2, 10 % BERT, 36 % CIFAR-10 and 36 % NeuMF, each with its initial batch size M0. Tuned
jobs pick one of their valid (GPUs, batch size) pairs at random; realistic ones keep the trace's
GPUs and multiply M0 by them. `load` scales the number of jobs in the same 8 hours.

The valid pairs, the GPUs of realistic jobs and the submissions per hour (figure 3.9 has no numbers)
are read off the authors' published workloads, whose jobs were drawn in the same way.

`extra`: `category` (the GPU-time class of table 3.1). There is no duration: it follows from the
application's profile.
"""

from dataclasses import dataclass
from random import Random

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.generate.draws import require_count, require_positive
from slackwater.loadgen.traces.record import TraceJob

JOBS_AT_LOAD_1 = 160
HOUR_WEIGHTS = (190, 168, 100, 195, 254, 359, 177, 157)
"""Submissions in each of the eight hours, over the published workloads of load 2."""


@dataclass(frozen=True, slots=True)
class Application:
    part: float
    """The share of all jobs, table 3.1."""
    category: str
    batch_size_initial: int
    """M0."""
    tuned: tuple[tuple[int, int], ...]
    """Valid (GPUs, batch size)."""
    realistic: tuple[tuple[int, int], ...]
    """(GPUs, jobs that asked for them)."""


APPLICATIONS: dict[str, Application] = {
    "imagenet": Application(
        0.02, "xlarge", 200, ((24, 3200), (32, 6400), (48, 6400)), ((8, 11), (16, 2), (32, 1))
    ),
    "yolov3": Application(
        0.06, "large", 8, ((4, 64),), ((1, 16), (2, 1), (4, 13), (8, 4), (16, 1))
    ),
    "deepspeech2": Application(
        0.10, "medium", 20, ((6, 320), (8, 320), (12, 640)), ((1, 67), (4, 2), (8, 2))
    ),
    "bert": Application(
        0.10, "medium", 12, ((6, 384), (8, 384), (12, 384), (16, 384)), ((1, 53), (4, 2))
    ),
    "cifar10": Application(
        0.36,
        "small",
        128,
        ((6, 2048), (8, 2048), (12, 4096), (16, 4096)),
        ((1, 298), (4, 4), (8, 1)),
    ),
    "ncf": Application(0.36, "small", 256, ((1, 32_768),), ((1, 317), (4, 4), (8, 1))),
}


def workload(
    rng: Random, *, load: float = 1.0, configuration: str = "tuned"
) -> tuple[TraceJob, ...]:
    require_positive("load", load)
    jobs = round(JOBS_AT_LOAD_1 * load)
    require_count("the number of jobs (160 times load)", jobs)
    if configuration not in ("tuned", "realistic"):
        raise Rejected(f"configuration is {configuration!r}; give tuned or realistic")
    hours = rng.choices(range(len(HOUR_WEIGHTS)), weights=HOUR_WEIGHTS, k=jobs)
    arrivals = sorted(3600 * hour + rng.randrange(3600) for hour in hours)
    names = list(APPLICATIONS)
    parts = [application.part for application in APPLICATIONS.values()]
    drawn = rng.choices(names, weights=parts, k=jobs)
    return tuple(
        _job(rng, number, at_s, name, configuration == "tuned")
        for number, (at_s, name) in enumerate(zip(arrivals, drawn, strict=True))
    )


def _job(rng: Random, number: int, at_s: int, name: str, tuned: bool) -> TraceJob:
    application = APPLICATIONS[name]
    if tuned:
        gpus, batch_size = rng.choice(application.tuned)
    else:
        sizes, counts = zip(*application.realistic, strict=True)
        gpus = rng.choices(sizes, weights=counts)[0]
        batch_size = application.batch_size_initial * gpus
    return TraceJob(
        id=f"{name}-{number}",
        submit_s=float(at_s),
        gpus=gpus,
        model=name,
        batch_size=batch_size,
        extra={"category": application.category},
    )
