"""GPUs: what a node has, what a job asks for, and who holds how many where."""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import GPUS_MAX, NODE_GPUS_MAX, Count, NodeId, Record, Seconds, Text

Gpus = Annotated[int, msgspec.Meta(ge=0, le=GPUS_MAX)]
"""A number of GPUs."""
GPU_ID_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_./:-]{0,95}\Z"
GpuId = Annotated[str, msgspec.Meta(pattern=GPU_ID_PATTERN)]
"""A GPU by its uuid, or by its node and number, as in n1/0. No two of a cluster are equal."""
GPU_TYPE_CHARS_MAX: Final = 64
GpuType = Annotated[str, msgspec.Meta(min_length=1, max_length=GPU_TYPE_CHARS_MAX)]
"""A kind of GPU, for example V100 or "Tesla V100-SXM2-32GB"."""
FAKE: Final = "fake"
"""The type of GPUs that do not exist: tests and demonstrations schedule them like others."""
GPU_TYPES_MAX: Final = 64
SPEED_MAX: Final = 1e6
Speed = Annotated[float, msgspec.Meta(gt=0.0, le=SPEED_MAX)]
"""How fast a job runs on a GPU type; 1 is the reference."""
NODES_HELD_MAX: Final = 1024
NodeAllocation = Annotated[
    tuple[tuple[NodeId, Annotated[int, msgspec.Meta(ge=1, le=GPUS_MAX)]], ...],
    msgspec.Meta(max_length=NODES_HELD_MAX),
]
"""((node, how many), ...): GPUs, or slots of processes for a job without GPUs. Each node stands
once, in ascending order; empty: the job holds nothing."""
NodeGpuIds = Annotated[tuple[GpuId, ...], msgspec.Meta(max_length=NODE_GPUS_MAX)]


class Gpu(Record, kw_only=True, frozen=True):
    """A GPU of a node, as its worker service tells it."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=NODE_GPUS_MAX)]
    """The GPU's place in the node, from 0."""
    id: GpuId
    type: GpuType
    memory_bytes: Count = 0
    """0: it does not say."""
    fault: Text = ""
    """Why no job is given it; empty: it is healthy."""
    idle_s: Seconds = 0.0
    """For how long it has computed nothing; 0: it computes, or its driver does not say."""


Within = Literal["", "node", "rack"]
"""One machine, or one rack of machines, on which all GPUs of a job must lie; empty: any."""


def held(allocation: NodeAllocation) -> int:
    """Sum up the GPUs, or slots, of an allocation."""
    return sum(number for _, number in allocation)


def described(allocation: NodeAllocation) -> str:
    """Write an allocation for people: `n1:4,n2:2`."""
    return ",".join(f"{node}:{number}" for node, number in allocation)


def check_gpus(gpus: int, least: int, most: int, workers: int, gpu_types: bool) -> None:
    """Raise ValueError where what a job says about GPUs cannot be true together."""
    if not gpus:
        given = "gpu_types" if gpu_types else "gpus_min" if least else "gpus_max"
        raise ValueError(
            f"{given}: given with gpus 0; give `gpus`, the number of GPUs that the job asks for, "
            f"or leave {given} out"
        )
    if least > gpus:
        raise ValueError(f"gpus_min: {least}, more than gpus {gpus}; give at most {gpus}")
    if most < gpus:
        raise ValueError(f"gpus_max: {most}, fewer than gpus {gpus}; give at least {gpus}")
    if gpus % workers:
        raise ValueError(
            f"workers: {workers} processes cannot share {gpus} GPUs (gpus) equally; give a divisor "
            f"of {gpus}"
        )
