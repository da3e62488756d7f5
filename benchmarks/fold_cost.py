"""CPU time per parameter byte of one update, on this machine: what the published table rests on.

    python benchmarks/fold_cost.py

The kernels of the live aggregators, SGD with momentum, warm, by number of workers; thread CPU time,
the lower quartile as the aggregators' profile takes it; then the line through 2 to 4, which is
CPU_NS_PER_BYTE of loadgen/simulator/pool/profiles.py.
"""

import time
from collections.abc import Sequence

import numpy as np

from slackwater.common.slots import kernels
from slackwater.common.slots.rules import Hyper, scalars
from slackwater.schemas.jobs import UpdateRule

ELEMENTS = 8 * 2**20
REPEATS = 12
WORKERS = (2, 3, 4, 6, 8)
FITTED = 3
"""The line is through the first ones: 99 of 100 distributed jobs of the trace have 2 to 4 workers.
With more, the gradients of a chunk fall out of the cache, and each costs more."""


def ns_per_byte(workers: int) -> float:
    rule = UpdateRule(name="momentum")
    slots = np.full(workers * ELEMENTS, 1e-3, dtype=np.float32)
    parameters = (np.ones(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32))
    momentum = (np.ones(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32))
    k = scalars(Hyper.of(rule), 1, workers)
    taken_s = []
    for _ in range(REPEATS + 1):
        begun_s = time.thread_time()
        kernels.fold_chunk(
            rule.name, slots, ELEMENTS, workers, (0, ELEMENTS), parameters, [momentum], k
        )
        taken_s.append(time.thread_time() - begun_s)
    return sorted(taken_s[1:])[REPEATS // 4] / (4 * ELEMENTS) * 1e9


def line(measured: Sequence[float]) -> tuple[float, float]:
    """(of the update, of each worker's gradient), least squares."""
    gradient, update = np.polyfit(WORKERS[:FITTED], measured[:FITTED], 1)
    return float(update), float(gradient)


def main() -> None:
    measured = [ns_per_byte(workers) for workers in WORKERS]
    update, gradient = line(measured)
    print("workers  ns per byte  line")
    for workers, found in zip(WORKERS, measured, strict=True):
        print(f"{workers:>7}  {found:>11.3f}  {update + gradient * workers:.3f}")
    print(f"CPU_NS_PER_BYTE = ({update:.3f}, {gradient:.3f})")


if __name__ == "__main__":
    main()
