"""Congested links (Gu et al. 2021, appendix D): found by transfer times, left for others with room.

A job is left alone as long as its speed stays above the limit, whatever its links do (the paper's
VGG19 with two background flows keeps 93 % and is not moved). Below it, a window's transfers decide:
an aggregator is congested if a byte takes `congested_at` times what it took when the job was
profiled, in either direction, and so many times what it takes to the job's least slowed other
aggregator. Where all are slow alike it is the workers' machine or network, and moving helps nobody.
A job that has more workers than when it was profiled says nothing: its bytes take longer by its own
doing. One slow iteration decides nothing: the speed is a window's mean, in which a pause does not
count, the times are sums over all its transfers.

What the job has on congested aggregators goes to others with room, with new ones where the master
has any; else to the job's remaining ones, if by the model that is faster than the congestion and no
other job pays for it. A congested aggregator takes nothing new and is not given back before
`congestion_s` has passed since it was last seen congested: whoever got it would be slow there.

What is known of links is not durable: it follows from the next window.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from slackwater.schemas.base import AggregatorId
from slackwater.schemas.placement import Profile
from slackwater.schemas.telemetry import LinkTimes, WindowMeasured
from slackwater.services.controller import assignment
from slackwater.services.controller.state import Job, State

JUDGED_BYTES: Final = 64 * 1024
"""Bytes of a window, in one direction, below which it says nothing about a link."""


# Congested links ----------------------------------------------------------------------------------


def slowdowns(profile: Profile, links: Iterable[LinkTimes]) -> dict[AggregatorId, float]:
    """How many times longer a byte takes than when the job was profiled, by aggregator: the worse
    of both directions. Nothing of an aggregator, or a profile, without measured transfers."""
    found: dict[AggregatorId, float] = {}
    for link in links:
        ways = (
            (profile.push_s_per_byte, link.pushing_s, link.pushed_bytes),
            (profile.pull_s_per_byte, link.pulling_s, link.pulled_bytes),
        )
        factors = [
            taken_s / nbytes / usual
            for usual, taken_s, nbytes in ways
            if usual > 0.0 and nbytes >= JUDGED_BYTES
        ]
        if factors:
            found[link.aggregator] = max(factors)
    return found


def congested(factors: Mapping[AggregatorId, float], at: float) -> dict[AggregatorId, float]:
    """Return the aggregators that are `at` times slower than usual, and than the least slowed of
    the others."""
    stand_out: dict[AggregatorId, float] = {}
    for id, factor in factors.items():
        least = min((other for name, other in factors.items() if name != id), default=1.0)
        if factor >= at * max(1.0, least):
            stand_out[id] = factor
    return stand_out


# Moves away from them -----------------------------------------------------------------------------


def mitigate(state: State, job: Job, window: WindowMeasured, loss: float, now_s: float) -> bool:
    """The job lost more than the limit. True: its links explain it, and its aggregations leave, or
    are about to; then no assignment is undone."""
    if job.pending is not None and job.pending.cause == "interfered":
        return True
    found = _found(state, job, window)
    if not found:
        return False
    if job.escapes >= state.config.reverts_max:
        state.log("interference.exhausted", "warning", job=job.id, loss=round(loss, 4))
        return False
    for id, factor in sorted(found.items()):
        _mark(state, job, id, factor, now_s)
    job.escapes += 1
    state.count("interferences")
    state.tell(
        job,
        "interfered",
        now_s,
        loss=f"{loss:.4f}",
        aggregators=",".join(sorted(found)),
        slowdown=f"{max(found.values()):.3g}",
        iteration_s=f"{window.iteration_s:.6g}",
    )
    assignment.request_assignment(state, job, "interfered", now_s, endured_s=window.iteration_s)
    return True


def look(state: State, job: Job, window: WindowMeasured, now_s: float) -> None:
    """Any window keeps alive what is known of a link; it makes nothing known by itself."""
    for id, factor in _found(state, job, window).items():
        if state.aggregators[id].congested_s is not None:
            state.aggregators[id].congested_s = now_s
            state.log("link.still-congested", "debug", aggregator=id, slowdown=round(factor, 3))


def relieved(state: State, job: Job) -> None:
    """The job's speed is above the limit: where it is, it may stay."""
    job.escapes = 0
    if job.pending is not None and job.pending.cause == "interfered":
        job.pending = None
        if job.record.reason:
            state.change(job, reason="")


def tick(state: State, now_s: float) -> None:
    """Forget congestion that was not seen for so long: the next window would say it again."""
    for id, entry in state.aggregators.items():
        since_s = entry.congested_s
        if since_s is not None and (
            not entry.alive or now_s - since_s >= state.config.congestion_s
        ):
            entry.congested_s = None
            state.tell_aggregator(id, "cleared", now_s)


def _found(state: State, job: Job, window: WindowMeasured) -> dict[AggregatorId, float]:
    profile, at = job.record.profile, state.config.congested_at
    if profile is None or at == 0.0 or 0 < profile.workers < window.workers:
        return {}
    here = [link for link in window.links if link.aggregator in job.homes()]
    return congested(slowdowns(profile, here), at)


def _mark(state: State, job: Job, id: AggregatorId, factor: float, now_s: float) -> None:
    entry = state.aggregators[id]
    if entry.congested_s is None:
        state.tell_aggregator(id, "congested", now_s, job=job.id, slowdown=f"{factor:.3g}")
    entry.congested_s = now_s
