"""Harmony's 80 jobs: Lee's dissertation, section 4.4.2, table 4.1 and figure 4.9.

Published: four applications, two data sets each, ten hyper-parameters each; statistics measured at
16 machines a job; all jobs submitted at once, or with Poisson arrivals (section 4.4.5). Figure 4.9
gives the distributions of iteration time and of computation to communication without numbers.

Chosen here: Tcpu and Tnet of an iteration are independent and log-uniform from 10 to 120 s at 16
machines, and the number of iterations is log-normal (median 50, sigma 0.5 by default).

`gpus` counts the machines of the profiled degree of parallelism, `stages_s` is (`cpu`, `network`)
at that degree (Tcpu scales with profiled / actual machines, Tnet does not), and the duration is the
job's alone on them. `most=cpu` and `most=network` leave the 60 jobs with the largest or smallest
part of computing (section 4.4.5). `extra`: `dataset`, `hyperparameter`, and table 4.1's sizes in
main memory, `input_gb` and `model_gb`. `machines` is the number that each job asks for; 0: the
fewest whose memory holds its input and model, where the processors of each are used most (section
4.4.1, isolated).
"""

from itertools import islice
from math import ceil
from random import Random

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.generate.draws import log_uniform, poisson_arrivals, require_positive
from slackwater.loadgen.traces.record import TraceJob

MACHINES_PROFILED = 16
STAGE_S_MIN = 10.0
STAGE_S_MAX = 120.0
HYPERPARAMETERS = 10
MEMORY_GB = 32.0
"""Main memory of a machine (m4.2xlarge)."""
MOST = ("cpu", "network")
JOBS_OF_A_KIND = 60
DATASETS: dict[str, tuple[str, str]] = {
    "nmf": ("netflix64x", "netflix128x"),
    "lda": ("pubmed", "nytimes"),
    "mlr": ("synthetic78", "synthetic155"),
    "lasso": ("synthetic78", "synthetic155"),
}
SIZES_GB: dict[str, tuple[float, float]] = {
    "netflix64x": (45.6, 1.0), "netflix128x": (91.2, 5.0), "pubmed": (4.3, 2.1),
    "nytimes": (0.6, 1.1), "synthetic78": (78.4, 12.0), "synthetic155": (155.0, 24.0),
}  # fmt: skip
"""Sizes of the input and of the model (table 4.1)."""


def workload(
    rng: Random,
    *,
    mean_gap_s: float = 0.0,
    iterations_median: float = 50.0,
    iterations_sigma: float = 0.5,
    most: str = "",
    machines: int = MACHINES_PROFILED,
) -> tuple[TraceJob, ...]:
    require_positive("mean_gap_s", mean_gap_s, allow_zero=True)
    if most not in ("", *MOST):
        raise Rejected(f"most is {most!r}; give {' or '.join(MOST)}, or nothing for all jobs")
    require_positive("machines", machines, allow_zero=True)
    require_positive("iterations_median", iterations_median)
    require_positive("iterations_sigma", iterations_sigma, allow_zero=True)
    kinds = [
        (application, dataset, number)
        for application, datasets in DATASETS.items()
        for dataset in datasets
        for number in range(HYPERPARAMETERS)
    ]
    rng.shuffle(kinds)
    arrivals = islice(poisson_arrivals(rng, mean_gap_s), len(kinds))
    jobs = []
    for at_s, (application, dataset, number) in zip(arrivals, kinds, strict=True):
        cpu_s = log_uniform(rng, STAGE_S_MIN, STAGE_S_MAX)
        network_s = log_uniform(rng, STAGE_S_MIN, STAGE_S_MAX)
        spread = rng.lognormvariate(0.0, iterations_sigma)
        iterations = max(1, round(iterations_median * spread))
        asked = machines or ceil(sum(SIZES_GB[dataset]) / MEMORY_GB)
        cpu_s *= MACHINES_PROFILED / asked
        jobs.append(
            TraceJob(
                id=f"{application}-{dataset}-{number}",
                submit_s=at_s,
                gpus=asked,
                duration_s=iterations * (cpu_s + network_s),
                model=application,
                iterations=iterations,
                iteration_s=cpu_s + network_s,
                stages_s={"cpu": cpu_s, "network": network_s},
                extra={
                    "dataset": dataset,
                    "hyperparameter": number,
                    "input_gb": SIZES_GB[dataset][0],
                    "model_gb": SIZES_GB[dataset][1],
                },
            )
        )
    return _most(jobs, most)


def _most(jobs: list[TraceJob], kind: str) -> tuple[TraceJob, ...]:
    """The jobs by submission; of a kind, the `JOBS_OF_A_KIND` that are most of it."""
    if not kind:
        return tuple(jobs)

    def part(job: TraceJob) -> float:
        return job.stages_s[kind] / sum(job.stages_s.values())

    border = sorted(map(part, jobs), reverse=True)[JOBS_OF_A_KIND - 1]
    return tuple(job for job in jobs if part(job) >= border)
