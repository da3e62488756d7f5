"""The program of an emulated job: it trains nothing, but it moves and waits as training does.

    python -m slackwater.loadgen.emulate --model vgg19 --bytes-scale 0.2 --compute-s 1.0 ...

Its tensors are the model's true list, scaled. A layer's forward pass takes its share of a third of
`compute_s`, its backward pass twice as long (Gu et al. 2021, figure 1b, is this picture): before a
layer's forward the parameters of the last iteration must be there, and as soon as its backward is
done its gradients are pushed, so that communication hides behind computation exactly as far as the
model's shape lets it. Waiting is sleeping to absolute instants: what pushing costs does not
lengthen an iteration unless it takes longer than the computation it hides behind, as on a GPU.

Gradients are slices of one seeded random pool at an offset that depends on (seed, tensor, worker,
iteration): a memory copy to make, and to be made again by whoever checks the result (verify.py).
"""

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from slackwater.agent import Agent
from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.common.domains.slots.rules import RULES
from slackwater.loadgen import models
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule

POOL_ELEMENTS: Final = 262_147
"""A prime near 2^18: the pool stays in the cache, and no two large tensors repeat in step."""
SLICE_ELEMENTS: Final = 65_536
"""The longest slice that can be had without a copy."""
GRADIENT_SCALE: Final = np.float32(0.01)
USAGE_EXIT: Final = 64
_RULES: Final = tuple(name for name, rule in RULES.items() if not rule.sums)
_DTYPES: Final = tuple(dtype for dtype in get_args(DType) if dtype != "int8")
"""Blocks of int8 are of a bucket, and a replay goes tensor by tensor."""
_SLEEP_S_MIN: Final = 2e-4
_INITIAL: Final = 2**20
"""The `worker` under which initial parameters are drawn."""

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Emulation:
    """The parameters that determine every byte of an emulated job."""

    model: str
    bytes_scale: float = 1.0
    seed: int = 0
    gradient_dtype: DType = "float32"

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return models.tensors(self.model, self.bytes_scale)


@lru_cache(maxsize=4)
def pool(seed: int, dtype: DType) -> NDArray[Any]:
    """POOL_ELEMENTS numbers, and the first SLICE_ELEMENTS of them again. bfloat16: its bits."""
    rng = np.random.Generator(np.random.PCG64(seed))
    once = rng.standard_normal(POOL_ELEMENTS, dtype=np.float32) * GRADIENT_SCALE
    ring = np.concatenate([once, once[:SLICE_ELEMENTS]])
    if dtype == "bfloat16":
        return (ring.view(np.uint32) >> 16).astype(np.uint16)
    return ring.astype(np.float16) if dtype == "float16" else ring


def offset(seed: int, tensor: int, worker: int, iteration: int) -> int:
    """Where in the pool a gradient begins: the four numbers, well mixed (splitmix64)."""
    mixed = seed & 0xFFFFFFFFFFFFFFFF
    for number in (tensor, worker, iteration):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (number + 1)) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed % POOL_ELEMENTS


def gradient_slice(
    emulation: Emulation, tensor: int, worker: int, iteration: int, first: int, count: int
) -> NDArray[Any]:
    """`count` (at most SLICE_ELEMENTS) elements of a gradient from `first` on; a view."""
    start = (offset(emulation.seed, tensor, worker, iteration) + first) % POOL_ELEMENTS
    return pool(emulation.seed, emulation.gradient_dtype)[start : start + count]


def gradient(
    emulation: Emulation,
    tensor: int,
    worker: int,
    iteration: int,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """The gradient that `worker` pushes in `iteration` (from 1) for the tensor of that index."""
    ring = pool(emulation.seed, emulation.gradient_dtype)
    if out is None:
        out = np.empty(prod(emulation.tensors[tensor].shape), ring.dtype)
    _fill(out.reshape(-1), ring, offset(emulation.seed, tensor, worker, iteration))
    return out


def initial(emulation: Emulation, tensor: int) -> FloatArray:
    """The parameters before the first iteration, the same for every worker."""
    shape = emulation.tensors[tensor].shape
    out = np.empty(shape, np.float32)
    _fill(
        out.reshape(-1),
        pool(emulation.seed, "float32"),
        offset(emulation.seed, tensor, _INITIAL, 0),
    )
    return out


def _fill(flat: NDArray[Any], ring: NDArray[Any], start: int) -> None:
    once = ring[:POOL_ELEMENTS]
    head = min(flat.size, POOL_ELEMENTS - start)
    flat[:head] = once[start : start + head]
    for first in range(head, flat.size, POOL_ELEMENTS):
        count = min(POOL_ELEMENTS, flat.size - first)
        flat[first : first + count] = once[:count]


def digest(parameters: Sequence[NDArray[Any]]) -> str:
    """sha256 over the bytes of all tensors in order."""
    hasher = hashlib.sha256()
    for tensor in parameters:
        hasher.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


class _Timeline:
    """The GPU that this program pretends to have: busy until `due_s`."""

    def __init__(self) -> None:
        self.due_s = time.monotonic()

    def compute(self, duration_s: float) -> None:
        self.due_s += duration_s
        left_s = self.due_s - time.monotonic()
        if left_s > _SLEEP_S_MIN:
            time.sleep(left_s)

    def stalled(self) -> None:
        """The computation could not go on before now."""
        self.due_s = max(self.due_s, time.monotonic())


def iterate(
    emulation: Emulation, agent: Agent, compute_s: float, produce: Callable[[int, Any], object]
) -> None:
    """One iteration of training. `produce(tensor, buffer)` fills the gradient's place."""
    layers = models.layers(emulation.model)
    names = [spec.name for spec in emulation.tensors]
    timeline = _Timeline()
    for layer in layers:
        needed = [names[index] for index in layer.tensors]
        ready = agent.ready(needed)
        agent.wait(needed)
        if not ready:
            timeline.stalled()
        timeline.compute(compute_s * layer.forward_share / 3.0)
    for layer in reversed(layers):
        timeline.compute(compute_s * layer.forward_share * 2.0 / 3.0)
        for index in reversed(layer.tensors):
            produce(index, agent.gradient_buffer(names[index]))
            agent.push(names[index])


def run(
    emulation: Emulation, agent: Agent, compute_s: float, iterations: int, hurry_after: int = 0
) -> dict[str, Any]:
    """Play `iterations` and return what the job reports. After `hurry_after` of them (0: never) it
    computes nothing any more: it pushes as fast as it is served, and not as it was profiled."""
    began_s = [time.monotonic()]
    for iteration in range(agent.iteration + 1, iterations + 1):

        def produce(index: int, buffer: Any, iteration: int = iteration) -> None:
            gradient(emulation, index, agent.rank, iteration, out=buffer)

        hurries = 0 < hurry_after < iteration
        iterate(emulation, agent, 0.0 if hurries else compute_s, produce)
        began_s.append(time.monotonic())
    agent.wait()
    durations_s = [later - earlier for earlier, later in pairwise(began_s)]
    return {
        "iterations": agent.iteration,
        "digest": digest([agent.pull(spec.name) for spec in emulation.tensors]),
        "iteration_s_median": statistics.median(durations_s) if durations_s else 0.0,
        "versions": agent.versions(),
    }


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slackwater.loadgen.emulate", description="The program of an emulated job."
    )
    parser.add_argument("--model", required=True, help=", ".join(models.names()))
    parser.add_argument("--bytes-scale", type=float, default=1.0, help="part of each tensor kept")
    parser.add_argument("--compute-s", type=float, required=True, help="forward plus backward")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hurry-after", type=int, default=0, help="compute nothing from then on")
    parser.add_argument("--gradient-dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--update", choices=_RULES, default="sgd")
    parser.add_argument("--learning-rate", type=float, default=UpdateRule().learning_rate)
    parser.add_argument("--servers", type=int, default=1, help="asked for, if not submitted")
    parser.add_argument("--deadline-s", type=float, default=120.0, help="of any one wait")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0: done. 64: the command line is at fault. 1: the job could not go on; one line says why."""
    options = _options(arguments)
    emulation = Emulation(options.model, options.bytes_scale, options.seed, options.gradient_dtype)
    try:
        if options.compute_s < 0.0 or options.iterations < 1:
            raise Rejected(
                f"compute_s is {options.compute_s}, iterations {options.iterations}; "
                "give at least 0 seconds and 1 iteration"
            )
        # Rank 0's are the job's; sixty-three copies of them would be memory for nothing.
        first = os.environ.get("SLACKWATER_RANK", "0") == "0"
        values: dict[str, Any] = {
            spec.name: initial(emulation, index) if first else spec.shape
            for index, spec in enumerate(emulation.tensors)
        }
    except Rejected as error:
        sys.stderr.write(f"emulate: {error}\n")
        return USAGE_EXIT
    try:
        with Agent(
            tensors=values,
            servers=options.servers,
            update=UpdateRule(name=options.update, learning_rate=options.learning_rate),
            gradient_dtype=options.gradient_dtype,
            deadline_s=options.deadline_s,
            model=options.model,
            iterations=options.iterations,
        ) as agent:
            del values  # The aggregators have them now.
            result = run(
                emulation, agent, options.compute_s, options.iterations, options.hurry_after
            )
            agent.close(result=result)
    except SlackwaterError as error:
        sys.stderr.write(f"emulate: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
