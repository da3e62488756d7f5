"""Choose the push that is applied next, and how far a worker may go on. Pure: the words of a
region.

A synchronous job's version v + 1 is the mean of all workers' pushes of iteration v + 1. In the
other two modes a push is an update of its own, applied as it comes (ps-lite's asynchronous
semantics; Lin et al. 2018, section 2), and a region keeps of each worker the newest iteration that
is applied. The version counts updates.

A worker that pushed iteration t goes on when that push is applied and, in a stale-synchronous job
with bound s, the slowest worker's push of t - s is too (the stale synchronous parallel model of Ho
et al. 2013): what it reads then contains every update of iterations up to t - s. Per bucket, and so
for all of the parameters: an iteration pushes every bucket.
"""

from collections.abc import Sequence
from typing import Final

from slackwater.schemas.placement import JobPlan

UNBOUNDED: Final = 2**53


def staleness_bound(plan: JobPlan) -> int | None:
    """How far a worker may be ahead of the slowest; None: updates are synchronous."""
    match plan.consistency:
        case "synchronous":
            return None
        case "asynchronous":
            return UNBOUNDED
        case "stale-synchronous":
            return plan.staleness


def acknowledged(applied: Sequence[int], rank: int, bound: int) -> int:
    """The iteration from which the worker may go on: applied, and not too far ahead."""
    return min(applied[rank], min(applied) + bound)


def next_rank(pushed: Sequence[int], applied: Sequence[int], bound: int, after: int) -> int | None:
    """Return the rank whose push is applied next: of those that are in, the first behind rank
    `after`, in turn, so that nobody waits for more than one push of each other rank. None: no push
    is in."""
    workers = len(pushed)
    for step in range(1, workers + 1):
        rank = (after + step) % workers
        if (
            pushed[rank] == applied[rank] + 1
            and acknowledged(applied, rank, bound) == applied[rank]
        ):
            return rank
    return None
