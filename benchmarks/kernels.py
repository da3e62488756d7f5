"""The fused aggregation kernel against numpy expression by expression, and against the floor.

One update of a 25 MB bucket, two workers: SGD with momentum and Adam. A row's peer is the same
update written as whole numpy expressions (rules.py, what a user would write), or the floor: the
bytes that the update must move at the rate at which np.add moves its own. All in this process, in
turn, the median of several rounds.

    python benchmarks/kernels.py [--megabytes 25] [--rounds 9]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from figures import Figure, favour, show, write_json

from slackwater.common.domains.slots import kernels, rules
from slackwater.common.domains.slots.folding import CHUNK_ELEMENTS
from slackwater.common.domains.slots.rules import RULES, Hyper
from slackwater.schemas.tensors import DType

WORKERS = 2
Update = Callable[[], object]


def updates(rule: str, dtype: DType, elements: int) -> tuple[Update, Update, int]:
    """(the kernels, numpy, the bytes that must move) for one update."""
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal(WORKERS * elements, dtype=np.float32)
    if dtype == "float32":
        raw: np.ndarray = drawn
    elif dtype == "float16":
        raw = drawn.astype(np.float16)
    else:
        raw = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    slots = raw.view(kernels.KERNEL_DTYPES[dtype])
    gradients = [raw[rank * elements : (rank + 1) * elements] for rank in range(WORKERS)]
    parameters = (np.ones(elements, np.float32), np.ones(elements, np.float32))
    states = [
        (np.ones(elements, np.float32), np.ones(elements, np.float32))
        for _ in range(RULES[rule].states)
    ]
    k = rules.scalars(Hyper(0.01, weight_decay=1e-4), 10, WORKERS)

    def fused() -> None:
        for lo in range(0, elements, CHUNK_ELEMENTS):
            span = (lo, min(lo + CHUNK_ELEMENTS, elements))
            kernels.fold_chunk(rule, slots, elements, WORKERS, span, parameters, states, k)

    def expressions() -> None:
        rules.step(rule, rules.mean(gradients, k), parameters[0], [old for old, _ in states], k)

    moved = raw.nbytes + 2 * (1 + len(states)) * parameters[0].nbytes
    return fused, expressions, moved


def adding(elements: int) -> tuple[Update, int]:
    left, right, total = (np.ones(elements, np.float32) for _ in range(3))
    return lambda: np.add(left, right, out=total), 3 * total.nbytes


def compare(rule: str, dtype: DType, elements: int, rounds: int) -> list[Figure]:
    fused, expressions, moved = updates(rule, dtype, elements)
    add, added = adding(elements)
    taken: dict[Update, list[float]] = {fused: [], expressions: [], add: []}
    for update in taken:
        update()
    for _ in range(rounds):
        for update, seconds in taken.items():
            begun_s = time.perf_counter()
            update()
            seconds.append(time.perf_counter() - begun_s)
    fused_s, numpy_s, add_s = (statistics.median(seconds) for seconds in taken.values())
    rate = moved / fused_s / 1e9
    name = f"{rule}, {dtype}, W={WORKERS}"
    return [
        Figure(name, rate, moved / numpy_s / 1e9, "GB/s", "numpy expressions", 3.0),
        Figure(name, rate, added / add_s / 1e9, "GB/s", "np.add's rate (floor)", 0.7),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=25.0, help="of parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    favour()
    elements = int(options.megabytes * 1e6) // 4
    figures = []
    for rule, dtype in (("momentum", "float32"), ("adam", "float32"), ("momentum", "bfloat16")):
        figures += compare(rule, dtype, elements, options.rounds)
    show("kernels", figures)
    if options.json is not None:
        command = f"python benchmarks/kernels.py --megabytes {options.megabytes:g}"
        write_json(options.json, command, figures)


if __name__ == "__main__":
    main()
