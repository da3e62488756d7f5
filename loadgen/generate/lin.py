"""The jobs of Lin et al. (2018), section V-B and table III: asynchronous SGD on 100 nodes.

Inter-arrival times are exponential, the network is drawn uniformly from the table, the number of
epochs from a Gaussian with the table's mean and variance 2. Mini-batches hold 1,024 examples, nodes
compute 1,229 GFLOPS (NVIDIA K520) and links carry 1 Gbit/s. System load is lambda E[S(1)] / W, with
S(1) the service time on one node including its transfers, W the nodes.

A job's `gpus` is 1 and its duration S(1): how many nodes it gets is the policy's decision.
`stages_s` holds the service times of one step at the model's stations: `worker`, `uplink`,
`downlink`; the update at the server is unpublished and 0, so it has no stage.
`extra`: `epochs`, `model_mb`.

`models` separates networks by `+`, or by a comma where no command line has to be read.
"""

import re
from dataclasses import dataclass
from itertools import islice
from random import Random

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.generate.draws import poisson_arrivals, require_count, require_positive
from slackwater.loadgen.traces.record import TraceJob

BATCH = 1024
NODE_TFLOPS = 1.229
LINK_MB_PER_S = 125.0
EPOCHS_VARIANCE = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of table III."""

    examples: int
    model_mb: float
    batch_tflop: float
    epochs: float

    @property
    def worker_s(self) -> float:
        return self.batch_tflop / NODE_TFLOPS

    @property
    def link_s(self) -> float:
        """One transfer of the model, up or down."""
        return self.model_mb / LINK_MB_PER_S

    @property
    def step_s(self) -> float:
        """One SGD step on one node: 1 / X(1)."""
        return self.worker_s + 2 * self.link_s

    def steps(self, epochs: float) -> int:
        return max(1, round(epochs * self.examples / BATCH))


TABLE_III: dict[str, Row] = {
    "nin": Row(50_000, 30.0, 6.7, 200.0),
    "googlenet": Row(1_200_000, 54.0, 9.7, 200.0),
    "alexnet": Row(1_200_000, 249.0, 7.0, 90.0),
    "vgg19": Row(1_200_000, 575.0, 120.0, 74.0),
}


def mean_service_s(models: tuple[str, ...] = tuple(TABLE_III)) -> float:
    """E[S(1)] of a job whose network is drawn uniformly from `models`."""
    rows = [TABLE_III[model] for model in models]
    return sum(row.steps(row.epochs) * row.step_s for row in rows) / len(rows)


def workload(
    rng: Random,
    *,
    load: float = 0.5,
    jobs: int = 1000,
    nodes: int = 100,
    models: str = "nin+googlenet+alexnet+vgg19",
) -> tuple[TraceJob, ...]:
    """With one seed, another load gives the same jobs at proportionally moved arrivals."""
    require_positive("load", load)
    require_count("jobs", jobs)
    require_count("nodes", nodes)
    chosen = tuple(name.strip().lower() for name in re.split("[+,]", models))
    for name in chosen:
        if name not in TABLE_III:
            raise Rejected(f"models has {name!r}; table III has {', '.join(TABLE_III)}")
    mean_gap_s = mean_service_s(chosen) / (load * nodes)
    arrivals = islice(poisson_arrivals(rng, mean_gap_s), jobs)
    return tuple(_job(rng, number, at_s, chosen) for number, at_s in enumerate(arrivals))


def _job(rng: Random, number: int, at_s: float, models: tuple[str, ...]) -> TraceJob:
    name = rng.choice(models)
    row = TABLE_III[name]
    epochs = max(rng.gauss(row.epochs, EPOCHS_VARIANCE**0.5), 1.0)
    steps = row.steps(epochs)
    return TraceJob(
        id=f"{name}-{number}",
        submit_s=at_s,
        gpus=1,
        duration_s=steps * row.step_s,
        model=name,
        iterations=steps,
        batch_size=BATCH,
        iteration_s=row.step_s,
        stages_s={"worker": row.worker_s, "uplink": row.link_s, "downlink": row.link_s},
        extra={"epochs": epochs, "model_mb": row.model_mb},
    )
