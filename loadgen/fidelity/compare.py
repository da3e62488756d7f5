"""Compare a live run with a simulated one of the same trace, and say which bounds it keeps.

Pure. The bounds: mean completion time and makespan within 3 %; 90 % of the jobs within 5 % and one
tick; preemptions and re-allocations within 5 %, or one; the order of first starts at Kendall's tau
of .95; nothing that the auditor finds; no job lost. A control, simulated as if restarts cost
nothing, has to break one of the bounds on times: else the trace does not tell a true simulator from
another.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import msgspec

from slackwater.loadgen.simulator.gpu.outcome import Outcome, Result

MEAN_WITHIN: Final = 0.03
JOB_WITHIN: Final = 0.05
TICK_S: Final = 1.0
"""Seconds between two looks of the master at what nothing tells it."""
JOBS_SHARE: Final = 0.90
PREEMPTIONS_WITHIN: Final = 0.05
TAU: Final = 0.95
ETA_WITHIN: Final = 0.20


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a few numbers."""

    mean_jct_s: float
    makespan_s: float
    preemptions: int
    reallocations: int = 0
    """How often a job was given GPUs after its first ones."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A live run beside a simulated one."""

    live: Figures
    simulated: Figures
    jobs_near: float
    """The part of the jobs whose completion times are within 5 % and one tick."""
    tau: float
    """Kendall's, of the order of first starts."""

    @property
    def mean_error(self) -> float:
        return _relative(self.live.mean_jct_s, self.simulated.mean_jct_s)

    @property
    def makespan_error(self) -> float:
        return _relative(self.live.makespan_s, self.simulated.makespan_s)

    def misses(self) -> list[str]:
        """Say which bounds are broken, one sentence each."""
        found = self.misses_of_times()
        for name in ("preemptions", "reallocations"):
            one, other = getattr(self.live, name), getattr(self.simulated, name)
            if abs(one - other) > max(1, PREEMPTIONS_WITHIN * other):
                found.append(f"{one} {name} live, {other} simulated")
        return found + self.misses_of_order()

    def misses_of_order(self) -> list[str]:
        if self.tau >= TAU:
            return []
        return [f"the orders of first starts agree at tau {self.tau:.3f}, below {TAU}"]

    def misses_of_times(self) -> list[str]:
        found = []
        for name, error in (("mean JCT", self.mean_error), ("makespan", self.makespan_error)):
            if abs(error) > MEAN_WITHIN:
                found.append(f"{name} is {error:+.1%} off, beyond {MEAN_WITHIN:.0%}")
        if self.jobs_near < JOBS_SHARE:
            found.append(
                f"{self.jobs_near:.0%} of the jobs are within {JOB_WITHIN:.0%} and a tick, fewer "
                f"than {JOBS_SHARE:.0%}"
            )
        return found


def compare(live: Result, simulated: Result) -> Compared:
    """Both of the same jobs; those that the live run lost are left out."""
    theirs = {each.job.spec.id: each for each in simulated.outcomes}
    pairs = [(each, theirs[each.job.spec.id]) for each in live.outcomes]
    near = sum(_near(_jct_s(one), _jct_s(other)) for one, other in pairs)
    return Compared(
        live=figures([one for one, _ in pairs]),
        simulated=figures([other for _, other in pairs]),
        jobs_near=near / max(1, len(pairs)),
        tau=kendall_tau([(one.start_s, other.start_s) for one, other in pairs]),
    )


def figures(outcomes: Sequence[Outcome]) -> Figures:
    if not outcomes:
        return Figures(mean_jct_s=0.0, makespan_s=0.0, preemptions=0)
    first_s = min(each.job.submit_s for each in outcomes)
    return Figures(
        mean_jct_s=sum(map(_jct_s, outcomes)) / len(outcomes),
        makespan_s=max(each.end_s for each in outcomes) - first_s,
        preemptions=sum(each.preemptions for each in outcomes),
        reallocations=sum(each.restarts for each in outcomes),
    )


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Agreement of two orders, from -1 to 1. What is equal in either has no order, and is left
    out: jobs that one decision starts."""
    score = count = 0
    for (a, b), (c, d) in combinations(pairs, 2):
        product = (a - c) * (b - d)
        score += (product > 0) - (product < 0)
        count += product != 0
    return score / count if count else 1.0


def _jct_s(outcome: Outcome) -> float:
    return outcome.end_s - outcome.job.submit_s


def _near(live_s: float, simulated_s: float) -> bool:
    return abs(live_s - simulated_s) <= JOB_WITHIN * simulated_s + TICK_S


def _relative(live: float, simulated: float) -> float:
    return live / simulated - 1.0 if simulated else 0.0
