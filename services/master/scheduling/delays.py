"""Re-allocation delays, as measured of each job.

Policies weigh the delay against what moving the job would win (qiao2021-thesis, chapter 3: the
delay of REALLOC_FACTOR).
"""

from typing import Final

NEW_WEIGHT: Final = 0.5
"""Weight of the last measurement: a job's state grows, a node's page cache warms, within a few."""


def reallocation_s(before_s: float, stopping_s: float, starting_s: float) -> float:
    """Return the smoothed seconds in which a job that changes its GPUs does not train.

    `before_s`: the value so far, 0 where nothing was measured. `stopping_s`: from the order to stop
    until no process of it was left. `starting_s`: from when its GPUs were free until its ranks
    ran, or began their first iteration where they tell that. Waiting for GPUs that others hold is
    in neither of them. The result lies between `before_s` and the new sum.
    """
    measured_s = max(0.0, stopping_s) + max(0.0, starting_s)
    if before_s <= 0.0:
        return measured_s
    return before_s + NEW_WEIGHT * (measured_s - before_s)
