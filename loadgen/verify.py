"""Whether a finished emulated job is right to the last bit.

The job's gradients are drawn again (emulate.py) and folded by the same kernels in this one process,
without slots, aggregators, migrations or restarts: what comes out is what synchronous training
means. The order of the fold is by worker rank and independent of how a tensor is cut, so that a
difference in one bit of one parameter is a lost, doubled or torn update.

The replay runs chunk by chunk through all iterations, so that everything stays in the cache: it is
bound by arithmetic, not by memory.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.folding import replay as replay_updates
from slackwater.common.domains.slots.kernels import warm
from slackwater.common.domains.slots.rules import Floats
from slackwater.loadgen.emulate import (
    SLICE_ELEMENTS,
    Emulation,
    digest,
    gradient_slice,
    initial,
)
from slackwater.schemas.tensors import UpdateRule


@dataclass(frozen=True, slots=True)
class _Chunk:
    tensor: int
    first: int
    values: Floats
    """Initial parameters in, final ones out."""


def replay(
    emulation: Emulation, workers: int, iterations: int, update: UpdateRule, threads: int = 2
) -> list[Floats]:
    """The parameters of every tensor after `iterations`, flat."""
    warm(update.name, emulation.gradient_dtype, workers)
    tensors = [initial(emulation, index).reshape(-1) for index in range(len(emulation.tensors))]
    with ThreadPoolExecutor(threads) as pool:
        for done in [
            pool.submit(_replay_chunk, emulation, workers, iterations, update, chunk)
            for chunk in _chunks(tensors)
        ]:
            done.result()
    return tensors


def replay_digest(
    emulation: Emulation, workers: int, iterations: int, update: UpdateRule, threads: int = 2
) -> str:
    """Return the digest that the job must have reported."""
    return digest(replay(emulation, workers, iterations, update, threads))


def _chunks(tensors: list[Floats]) -> Iterator[_Chunk]:
    for index, tensor in enumerate(tensors):
        for first in range(0, tensor.size, SLICE_ELEMENTS):
            yield _Chunk(index, first, tensor[first : first + SLICE_ELEMENTS])


def _replay_chunk(
    emulation: Emulation, workers: int, iterations: int, update: UpdateRule, chunk: _Chunk
) -> None:
    size = chunk.values.size
    gradients = (
        [
            gradient_slice(emulation, chunk.tensor, worker, iteration, chunk.first, size)
            for worker in range(workers)
        ]
        for iteration in range(1, iterations + 1)
    )
    try:
        chunk.values[:] = replay_updates(update, emulation.gradient_dtype, chunk.values, gradients)
    except ValueError as error:
        name = emulation.tensors[chunk.tensor].name
        raise Rejected(f"{emulation.model}, tensor {name}: {error}; lower its rate") from error
