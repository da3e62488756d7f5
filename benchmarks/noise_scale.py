"""The gradient noise scale: what its sums cost in the fold, and how true it is.

The fold of aggregators with both sums of squares against the same fold without, CPU time of one
thread, in turns. Then a perceptron on scikit-learn's digits, batch 64, three seeds, trained by that
fold with the gradients of 4 replicas, of 2, and of one that accumulates two halves: the estimate
over the truth, which is of every example's gradient, in the second half of the run. Last, jobs of
two ranks with 40 MB of parameters on a live cluster, in turns: the aggregator's processor time.

    python benchmarks/noise_scale.py [--part cost|truth|live] [--megabytes 32] [--rounds 9]

Halves are told by the worker, which does not have Adam's moments: theirs are not weighted.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from figures import Figure, Row, favour, show, write_json

from slackwater.agent import Agent
from slackwater.common.domains.models.gradient_noise import GradientSquares, NoiseScale
from slackwater.common.domains.slots import kernels, rules
from slackwater.common.domains.slots.folding import commit, fold
from slackwater.common.domains.slots.gradient_squares import FLOOR_PART, FoldSquares
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import RULES, Hyper
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import DType, TensorSpec, UpdateRule

WORKERS = (2, 4, 8)
BATCH, HIDDEN, INPUTS, CLASSES = 64, 48, 65, 10
ELEMENTS = INPUTS * HIDDEN + HIDDEN * CLASSES
ITERATIONS, EVERY, SEEDS = 400, 10, 3
RUNS = (("sgd", 0.05), ("sgd", 0.3), ("adam", 0.001))
LIVE_ELEMENTS, LIVE_ITERATIONS = 10_000_000, 40
WAYS = {"4 replicas": 4, "2 replicas": 2, "1, two halves": 2}


def cost(rule: str, dtype: DType, workers: int, elements: int, rounds: int) -> Figure:
    """CPU ms of a fold with sums against one without, next to each other in time."""
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal(workers * elements, dtype=np.float32)
    raw: np.ndarray = drawn
    if dtype == "float16":
        raw = drawn.astype(np.float16)
    elif dtype == "bfloat16":
        raw = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    slots = raw.view(kernels.KERNEL_DTYPES[dtype])
    pairs = [(np.ones(elements, np.float32), np.ones(elements, np.float32)) for _ in range(3)]
    states = pairs[1 : 1 + RULES[rule].states]
    k = rules.scalars(Hyper(0.01, weight_decay=1e-4), 10, workers)
    folded = kernels.Fold(rule, slots, elements, workers, pairs[0], states)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):
        for summed, ms in taken.items():
            begun_s = time.thread_time()
            folded(0, elements, k, FoldSquares(FLOOR_PART) if summed else None)
            ms.append((time.thread_time() - begun_s) * 1e3)
    plain, ours = taken[False][1:], taken[True][1:]  # The first one compiles.
    ratios = tuple(mine / theirs for mine, theirs in zip(ours, plain, strict=True))
    return Figure(
        f"{rule}, {dtype}, W={workers}", statistics.median(ours), statistics.median(plain), "ms",
        "without sums", 1.05, lower_is_better=True, ratios=ratios,
    )  # fmt: skip


# The truth ----------------------------------------------------------------------------------------


def data() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = np.c_[digits.data / 16.0, np.ones(len(digits.data))]
    return inputs, np.eye(CLASSES)[digits.target]


def each_gradient(w: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return one row an example."""
    a, b = w[: INPUTS * HIDDEN].reshape(INPUTS, HIDDEN), w[INPUTS * HIDDEN :].reshape(HIDDEN, -1)
    hidden = np.tanh(inputs @ a)
    logits = hidden @ b
    e = np.exp(logits - logits.max(1, keepdims=True))
    at = e / e.sum(1, keepdims=True) - targets
    inner = (at @ b.T) * (1 - hidden**2)
    first = np.einsum("ni,nj->nij", inputs, inner).reshape(len(inputs), -1)
    return np.c_[first, np.einsum("ni,nj->nij", hidden, at).reshape(len(inputs), -1)]


def true_scale(w: np.ndarray, weight: Any, inputs: np.ndarray, targets: np.ndarray) -> float:
    """Return phi by every example's gradient, each element's square times `weight`."""
    total, squares, count = np.zeros(ELEMENTS), 0.0, len(inputs)
    for at in range(0, count, 300):
        every = each_gradient(w, inputs[at : at + 300], targets[at : at + 300])
        total += every.sum(0)
        squares += float((every**2 * weight).sum())
    sqr = float(((total / count) ** 2 * weight).sum())
    return (squares / count - sqr) / sqr


def bucket(rule: str, rate: float, workers: int, start: np.ndarray) -> SlotRegion:
    """Make a bucket as an aggregator has it."""
    tensors = (TensorSpec(name="w", shape=(ELEMENTS,)),)
    update = UpdateRule(name=rule, learning_rate=rate)  # type: ignore[arg-type]
    plan = JobPlan(
        job=JobId("digits"), workers=workers, gradient_dtype="float32", update=update,
        layout_epoch=0, token="", noise=True,
    )  # fmt: skip
    layout = plan_buckets(tensors)[0]
    memory = bytearray(SlotRegion.nbytes_of(plan, layout, tensors))
    made = SlotRegion.format(memory, plan, layout, tensors, 0)
    made.parameters(0)[:] = start
    made.initialize(0)
    for rank in range(workers):
        made.set_hyper(rank, Hyper.of(update))
    return made


def weight_of(made: SlotRegion) -> Any:
    """Return the exact weights of the next version's squares."""
    second = RULES[made.plan.update.name].second
    if second is None or made.version == 0:
        return 1.0
    v = made.state(made.version, second).astype(np.float64)
    return 1.0 / (v + FLOOR_PART * v.mean())


def steps(made: SlotRegion, parts: int, rng: Any, known: Any) -> Iterator[tuple[Any, ...]]:
    """Train. Yield (iteration, parameters before it, weights, lengths that were told)."""
    inputs, targets = known
    halves = made.geometry.workers == 1
    for iteration in range(1, ITERATIONS + 1):
        w = made.parameters(made.version).astype(np.float64)
        weight = 1.0 if halves else weight_of(made)
        drawn = rng.integers(0, len(inputs), BATCH)  # With replacement, as of data without end.
        examples = each_gradient(w, inputs[drawn], targets[drawn])
        means = examples.reshape(parts, BATCH // parts, -1).mean(1)
        for rank in range(made.geometry.workers):
            made.gradient(rank)[:] = means.mean(0) if halves else means[rank]
        assert fold(made)
        commit(made)
        told = None
        if halves:
            each, mean = float((means**2).sum(1).mean()), float((means.mean(0) ** 2).sum())
            told = GradientSquares(each, mean, parts)
        elif (found := made.squares.at(iteration)) is not None and found.workers:
            told = GradientSquares(found.each / parts, found.mean, parts)
        yield iteration, w, weight, told


def truth(rule: str, rate: float, way: str, known: Any) -> tuple[list[float], int, int]:
    """Return estimates over truths in the second half; how many had the truth in their interval,
    and how many were not known."""
    parts, ratios, within, unknown = WAYS[way], [], 0, 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        start = rng.normal(0, 0.12, ELEMENTS)
        made = bucket(rule, rate, 1 if way.startswith("1,") else parts, start)
        scale = NoiseScale()
        for iteration, w, weight, told in steps(made, parts, rng, known):
            scale.add(told, BATCH / parts)
            if iteration > ITERATIONS / 2 and iteration % EVERY == 0:
                estimate = scale.estimate
                if estimate is None:
                    unknown += 1
                    continue
                phi = true_scale(w, weight, *known)
                ratios.append(estimate.phi / phi)
                within += estimate.low <= phi <= estimate.high
    return ratios, within, unknown


def truths(say: Callable[[str], None]) -> list[Row]:
    known, rows = data(), []
    for rule, rate in RUNS:
        for way in WAYS:
            ratios, within, unknown = truth(rule, rate, way, known)
            low, middle, high = np.percentile(ratios, [10, 50, 90])
            name = f"{rule} {rate:g}, {way}"
            say(
                f"{name}: median {middle:.2f}, p10 {low:.2f}, p90 {high:.2f} of the truth, which "
                f"{within / len(ratios):.0%} of the 90 % intervals contain; not known "
                f"{unknown} of {unknown + len(ratios)} times"
            )
            rows.append(Figure(name, float(middle), 1.0, "of the truth", "the truth"))
    return rows


# Live --------------------------------------------------------------------------------------------


def train(url: str, job: str, rank: int, rule: str, noise: bool) -> None:
    gradient = np.random.default_rng(rank).standard_normal(LIVE_ELEMENTS, np.float32)
    update = UpdateRule(name=rule, learning_rate=1e-4)  # type: ignore[arg-type]
    tensors = {"w": gradient.shape}
    with Agent(
        job=job, rank=rank, workers=2, tensors=tensors, update=update, url=url, noise=noise
    ) as agent:
        for _ in range(LIVE_ITERATIONS):
            agent.step({"w": gradient})
        told = agent.gradient_squares(LIVE_ITERATIONS)
    assert (told is not None) == noise, told


def aggregators_cpu_s() -> float:
    children = psutil.Process().children(recursive=True)
    times = [each.cpu_times() for each in children if "aggregator" in " ".join(each.cmdline())]
    return float(sum(each.user + each.system for each in times))


async def live(rounds: int) -> list[Row]:
    rows: list[Row] = []
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as cluster:
        for rule in ("momentum", "adam"):
            taken: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(rounds):
                for noise, ms in taken.items():
                    job, begun_s = f"{rule}-{turn}-{noise}".lower(), aggregators_cpu_s()
                    await asyncio.gather(*(
                        asyncio.to_thread(train, cluster.url, job, rank, rule, noise)
                        for rank in range(2)
                    ))  # fmt: skip
                    ms.append((aggregators_cpu_s() - begun_s) / LIVE_ITERATIONS * 1e3)
            plain, ours = (statistics.median(taken[noise]) for noise in (False, True))
            name = f"live, {rule}, 40 MB, W=2"
            rows.append(Figure(name, ours, plain, "ms", "without sums", 1.05, lower_is_better=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("cost", "truth", "live"), help="one; by default all")
    parser.add_argument("--megabytes", type=float, default=32.0, help="of parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    if options.part in (None, "cost"):
        favour()
        elements = int(options.megabytes * 1e6) // 4
        dtypes: tuple[DType, ...] = ("float32", "float16", "bfloat16")
        rows += [
            cost(rule, dtype, workers, elements, options.rounds)
            for rule in RULES
            for dtype in dtypes
            for workers in WORKERS
        ]
    if options.part in (None, "truth"):
        rows += truths(print)
    if options.part in (None, "live"):
        rows += asyncio.run(live(options.rounds))
    show("noise scale", rows)
    if options.json is not None:
        part = f" --part {options.part}" if options.part else ""
        command = f"python benchmarks/noise_scale.py{part} --megabytes {options.megabytes:g}"
        write_json(options.json, command, rows)


if __name__ == "__main__":
    main()
