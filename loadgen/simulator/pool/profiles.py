"""Demands of a GPU trace's jobs on the aggregation pool: our table of costs, and its jobs.

No trace says which model a job trains, how many parameter servers it reserved or how much CPU they
used. So every distributed job draws its model by the seed from the four that the paper trains (or
all twelve that `loadgen replay` knows), with the seconds of computing of that table. The rest
follows: CPU time from the model's bytes and what this project's kernels take per byte (measured by
`python benchmarks/fold_cost.py`), D_j by playing the job alone on the servers that it asked for.
docs/reproduction/aggregation.md holds the table.

A job is distributed if it has two GPUs or more. It has one worker per four GPUs, at least two, and
as many servers as workers: the testbed's "2s-2w" with four GPUs a worker, and "4s-4w" for sixteen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from random import Random

from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.loadgen import models
from slackwater.loadgen.replay.workload import COMPUTE_S
from slackwater.loadgen.simulator.pool.slots import SlotJob, SlotTask, alone_s
from slackwater.schemas.placement import Profile
from slackwater.schemas.tensors import TensorSpec

CPU_NS_PER_BYTE = (0.13, 0.025)
"""CPU time of one update of SGD with momentum, per parameter byte: of the update itself, and of
each worker's gradient."""
SERVER_CORES = 0.32
"""One parameter server, and so one aggregator: with it a 2s-2w job of VGG19 uses a third of a
server and one of AlexNet just over one, as the papers' figures 8 and 10 and table 2 bound them."""
GPUS_PER_WORKER = 4
MODELS = tuple(sorted(COMPUTE_S))


@dataclass(frozen=True, slots=True)
class PoolJob:
    """One distributed job, when it runs and what it asks."""

    id: str
    model: str
    workers: int
    start_s: float
    end_s: float

    @property
    def servers(self) -> int:
        return self.workers


@dataclass(frozen=True, slots=True)
class ModelCost:
    """One row of the table, for a number of workers (and servers)."""

    tensors: tuple[TensorSpec, ...]
    compute_s: float
    profile: Profile

    @property
    def servers_used(self) -> float:
        """The job's duty, summed over servers: CPU time per iteration over what one server has."""
        return sum(self.profile.task_cpu_s) / SERVER_CORES / self.profile.iteration_s


def workers_of(gpus: int) -> int:
    return max(2, ceil(gpus / GPUS_PER_WORKER))


def cpu_s(nbytes: int, workers: int) -> float:
    update_ns, gradient_ns = CPU_NS_PER_BYTE
    return nbytes * (update_ns + gradient_ns * workers) * 1e-9


@cache
def positions(model: str) -> tuple[float, ...]:
    """Per bucket, which part of the forward pass comes before its first tensor is pulled."""
    before, at = 0.0, dict[int, float]()
    for layer in models.layers(model):
        at.update(dict.fromkeys(layer.tensors, before))
        before += layer.forward_share
    buckets = plan_buckets(models.tensors(model))
    return tuple(min(1.0, at[bucket.first]) for bucket in buckets)


@cache
def cost(model: str, workers: int) -> ModelCost:
    """Profiled alone on as many servers as workers, buckets dealt round robin."""
    tensors = models.tensors(model)
    costs_s = tuple(cpu_s(4 * b.elements, workers) for b in plan_buckets(tensors))
    where = positions(model)
    alone = SlotJob(
        model,
        COMPUTE_S[model],
        tuple(
            SlotTask(f"s{n % workers}", each, x)
            for n, (each, x) in enumerate(zip(costs_s, where, strict=True))
        ),
    )
    iteration_s = alone_s(alone, {f"s{n}": SERVER_CORES for n in range(workers)})
    profile = Profile(iteration_s=iteration_s, task_cpu_s=costs_s, positions=where)
    return ModelCost(tensors, COMPUTE_S[model], profile)


def draw_models(count: int, seed: int, among: Sequence[str] = MODELS) -> Sequence[str]:
    rng = Random(f"models of seed {seed}")
    return [rng.choice(among) for _ in range(count)]
