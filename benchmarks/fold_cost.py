"""CPU time per parameter byte of one update, on this machine: what our table of costs rests on.

    python benchmarks/fold_cost.py

As loadgen measures it to choose tensors' sizes, by number of workers; then the line through 2 to
4, which is CPU_NS_PER_BYTE of loadgen/simulator/pool/profiles.py.
"""

from collections.abc import Sequence

import numpy as np

from slackwater.loadgen.replay.calibrate import fold_s_per_element

ELEMENT_BYTES = 4
WORKERS = (2, 3, 4, 6, 8)
FITTED = 3
"""The line is through the first ones: 99 of 100 distributed jobs of the trace have 2 to 4 workers.
With more, the gradients of a chunk fall out of the cache, and each costs more."""


def line(measured: Sequence[float]) -> tuple[float, float]:
    """(of the update, of each worker's gradient), least squares."""
    gradient, update = np.polyfit(WORKERS[:FITTED], measured[:FITTED], 1)
    return float(update), float(gradient)


def main() -> None:
    measured = [fold_s_per_element(workers) / ELEMENT_BYTES * 1e9 for workers in WORKERS]
    update, gradient = line(measured)
    print("workers  ns per byte  line")
    for workers, found in zip(WORKERS, measured, strict=True):
        print(f"{workers:>7}  {found:>11.3f}  {update + gradient * workers:.3f}")
    print(f"CPU_NS_PER_BYTE = ({update:.3f}, {gradient:.3f})")


if __name__ == "__main__":
    main()
