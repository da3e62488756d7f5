"""A node's GPUs as they are configured, and their names for the processes that are given them.
Pure."""

from collections.abc import Collection

from slackwater.schemas.base import NodeId
from slackwater.schemas.gpus import FAKE, Gpu, GpuId, GpuType


def configured(node: NodeId, gpus: int, gpu_type: GpuType) -> tuple[Gpu, ...]:
    """List so many GPUs of one type."""
    return tuple(Gpu(index=index, id=f"{node}/{index}", type=gpu_type) for index in range(gpus))


def visible(told: Collection[Gpu], given: Collection[GpuId]) -> str:
    """Name the GPUs that a process is given, as CUDA_VISIBLE_DEVICES has to: by their numbers. The
    names of fake ones mean nothing to CUDA, so that no process takes a GPU that it was not given.
    """
    numbers = {gpu.id: gpu.id if gpu.type == FAKE else str(gpu.index) for gpu in told}
    return ",".join(numbers.get(id, id) for id in given)
