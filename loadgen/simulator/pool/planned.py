"""How many aggregators a policy would give a cell's jobs, by their models' profiles alone. Pure.

What a live run measures is put in: the reference model keeps DUTY of a server busy, CPU time grows
with bytes and workers as our table of costs has it, and a bucket is needed where its first layer
is. The jobs arrive one after another, are profiled alone, and placed by the policy itself.
"""

from dataclasses import replace
from typing import Final

from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.embedded.cluster import CPU_SHARE
from slackwater.loadgen import models
from slackwater.loadgen.replay.calibrate import REFERENCE
from slackwater.loadgen.replay.cells import Cell
from slackwater.loadgen.replay.workload import COMPUTE_S
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.services.controller.policies import load_policy
from slackwater.services.controller.policies.view import (
    NEW,
    AggregatorView,
    ClusterView,
    JobView,
)

DUTY: Final = 0.31
LOSS_LIMIT: Final = 0.1
FIXED: Final = 0.13
PER_WORKER: Final = 0.025
"""Nanoseconds a byte (docs/reproduction/aggregation.md): only their ratio counts here."""
OVERHEAD: Final = 1.01
"""Iteration over computing."""


def planned(cell: Cell, bytes_scale: float = 0.04) -> int:
    """Aggregators in use once all of the cell's jobs are placed."""
    policy = load_policy(cell.policy)
    placed: list[JobView] = []
    for index, model in enumerate(cell.models):
        job = _profiled(cell, model, index, bytes_scale)
        used = sorted({place for other in placed for place in other.places if place})
        view = ClusterView(
            aggregators=tuple(AggregatorView(AggregatorId(name), CPU_SHARE) for name in used),
            jobs=tuple(placed),
            new_share=CPU_SHARE,
            new_max=cell.servers,
            loss_limit=LOSS_LIMIT,
        )
        plan, _ = policy.assign(view, job, None)
        homes = plan.places
        if not homes or plan.new >= cell.servers:
            homes = tuple(str(place) for place in job.current)  # It stays where it was profiled.
        places = tuple(AggregatorId(home.replace(NEW, f"{job.id}-")) for home in homes)
        placed.append(replace(job, places=places))
    return len({place for job in placed for place in job.places})


def _profiled(cell: Cell, model: str, index: int, bytes_scale: float) -> JobView:
    tensors = models.tensors(model, bytes_scale)
    buckets = plan_buckets(tensors)
    whole = models.parameters(models.tensors(REFERENCE, bytes_scale))
    two_workers = FIXED + 2 * PER_WORKER
    scale = (FIXED + cell.workers * PER_WORKER) / two_workers
    cpu_s = DUTY * CPU_SHARE * COMPUTE_S[REFERENCE] * cell.time_scale * scale / whole
    needed: dict[int, float] = {}
    before = 0.0
    for layer in models.layers(model):
        for tensor in layer.tensors:
            needed.setdefault(tensor, before)
        before += layer.forward_share
    return JobView(
        id=JobId(f"j{index}"),
        servers=cell.servers,
        iteration_s=COMPUTE_S[model] * cell.time_scale * OVERHEAD,
        task_cpu_s=tuple(bucket.elements * cpu_s for bucket in buckets),
        places=(None,) * len(buckets),
        current=tuple(
            AggregatorId(f"j{index}-own-{number % cell.servers}") for number in range(len(buckets))
        ),
        positions=tuple(
            min(1.0, min(needed[t] for t in range(each.first, each.first + each.count)))
            for each in buckets
        ),
    )
