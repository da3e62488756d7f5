"""Tiresias' testbed workload: 480 jobs (Gu, dissertation, section 3.5.1, tables 3.3 and 3.4).

Published: 240 jobs of one GPU, 40 of 2, 80 of 4, 90 of 8, 25 of 16 and 5 of 32; each of ten models
48 times; training times from 2 minutes to 2 hours; Poisson arrivals, 30 s apart on average; as many
parameter servers as GPUs in a distributed job. Table 3.4 gives the bins: 63.5 % small and short,
12.5 % small and long, 16.5 % large and short, 7.5 % large and long, where small is at most 4 GPUs
and short is under 800 s. The GPU counts make 75 % of the jobs small and the table 76 %: the counts
are kept, and the short part within small and within large is the table's.

Not published, and chosen here: inside a bin the training time is log-uniform; iteration times are
those of the authors' sample trace (60 jobs of the same models on 1 to 8 GPUs), and wider jobs
iterate like those on 8.

`extra`: `servers` (parameter servers; 0 for a job on one GPU).
"""

from itertools import islice
from math import ceil, floor
from random import Random

from slackwater.loadgen.generate.draws import (
    log_uniform,
    poisson_arrivals,
    require_positive,
)
from slackwater.loadgen.traces.record import TraceJob

JOBS_BY_GPUS = {1: 240, 2: 40, 4: 80, 8: 90, 16: 25, 32: 5}
SMALL_GPUS_MAX = 4
SHORT_PART_OF_SMALL = 63.5 / (63.5 + 12.5)
SHORT_PART_OF_LARGE = 16.5 / (16.5 + 7.5)
TRAINING_S_MIN = 120.0
TRAINING_S_LONG = 800.0
TRAINING_S_MAX = 7200.0

ITERATION_S: dict[str, tuple[float, float, float, float]] = {
    "vgg19": (0.271, 0.662, 0.858, 1.110),
    "vgg16": (0.236, 0.660, 0.877, 1.071),
    "vgg11": (0.156, 0.632, 0.846, 1.105),
    "alexnet": (0.0545, 0.269, 0.366, 0.445),
    "resnet152": (0.371, 0.646, 0.703, 0.720),
    "resnet101": (0.260, 0.469, 0.521, 0.527),
    "resnet50": (0.153, 0.300, 0.332, 0.337),
    "inception4": (0.478, 0.809, 0.847, 0.857),
    "inception3": (0.232, 0.442, 0.472, 0.479),
    "googlenet": (0.140, 0.140, 0.140, 0.140),
}
"""Seconds of an iteration on 1, 2, 4 and at least 8 GPUs."""


def workload(rng: Random, *, mean_gap_s: float = 30.0) -> tuple[TraceJob, ...]:
    require_positive("mean_gap_s", mean_gap_s, allow_zero=True)
    sizes = [gpus for gpus, count in JOBS_BY_GPUS.items() for _ in range(count)]
    models = [model for model in ITERATION_S for _ in range(len(sizes) // len(ITERATION_S))]
    shapes = list(zip(sizes, _short_flags(rng, sizes), strict=True))
    rng.shuffle(shapes)
    rng.shuffle(models)
    arrivals = islice(poisson_arrivals(rng, mean_gap_s), len(sizes))
    return tuple(
        _job(rng, number, at_s, gpus, short, model)
        for number, ((gpus, short), model, at_s) in enumerate(
            zip(shapes, models, arrivals, strict=True)
        )
    )


def _short_flags(rng: Random, sizes: list[int]) -> list[bool]:
    """Choose the short jobs: the table's part of the small ones and of the large ones, exactly."""
    flags = [False] * len(sizes)
    for small, part in ((True, SHORT_PART_OF_SMALL), (False, SHORT_PART_OF_LARGE)):
        members = [i for i, gpus in enumerate(sizes) if (gpus <= SMALL_GPUS_MAX) == small]
        for index in rng.sample(members, round(part * len(members))):
            flags[index] = True
    return flags


def _job(rng: Random, number: int, at_s: float, gpus: int, short: bool, model: str) -> TraceJob:
    bounds = (TRAINING_S_MIN, TRAINING_S_LONG) if short else (TRAINING_S_LONG, TRAINING_S_MAX)
    iteration_s = ITERATION_S[model][min(gpus.bit_length() - 1, 3)]
    # Whole iterations, without leaving the bin: a short job stays below 800 s.
    fewest, most = ceil(bounds[0] / iteration_s), ceil(bounds[1] / iteration_s) - 1
    iterations = floor(log_uniform(rng, *bounds) / iteration_s)
    iterations = min(max(iterations, fewest), most)
    return TraceJob(
        id=f"t{number}",
        submit_s=at_s,
        gpus=gpus,
        duration_s=iterations * iteration_s,
        model=model,
        iterations=iterations,
        iteration_s=iteration_s,
        extra={"servers": gpus if gpus > 1 else 0},
    )
