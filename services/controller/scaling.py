"""Hybrid scaling (AutoPS section 3.3.3): what a period has left over is given back at its end.

Giving back and emptying aggregators with every exit moves the jobs that stay; doing it only once a
period holds idle ones for up to a period. With `scaling_s` both wait for the period's end, what is
idle meanwhile serves the next job that needs a new aggregator, and more are allocated on demand
when a job needs at least `on_demand_min` of them. Every (de)allocation has the master's approval.

Demand is measured (usage.py): the mean number of aggregators in use over the latest period. Of it
`keep_demand` stays allocated at the period's end, idle or not, so that the next burst of jobs finds
it; what the next period does not need goes at its end.
"""

from math import floor

from slackwater.schemas.base import AggregatorId
from slackwater.services.controller.keys import ReturnAsked
from slackwater.services.controller.state import Job, State


def begin(state: State, now_s: float) -> None:
    """Say whether a period ended since the last look."""
    period_s = state.config.scaling_s
    if period_s and floor(now_s / period_s) > floor(state.scaled_s / period_s):
        state.scaled_s = now_s
        demand = state.usage.end(state.config.keep_demand, now_s)
        state.log("aggregators.scaled", demand=round(demand, 3), kept=state.usage.keep)
        state.releasing, state.recycle_due, state.job_ended = True, state.job_ended, False


def end(state: State) -> None:
    """The scaling is over once nothing more can be emptied and nothing unused is left."""
    if state.config.scaling_s and state.releasing and not state.recycle_due:
        state.releasing = bool(surplus(state))


def surplus(state: State) -> list[AggregatorId]:
    """The idle ones that go at the period's end: the others are kept for the demand measured."""
    going = given_back(state)
    staying = sum(entry.ours and id not in going for id, entry in state.aggregators.items())
    return idle(state)[: max(0, staying - state.usage.keep)]


def idle(state: State) -> list[AggregatorId]:
    """Ours and of no use to anybody; without a period they are given back soon."""
    return unused(state) if state.config.scaling_s else []


def unused(state: State, *, congested: bool = False) -> list[AggregatorId]:
    """Ours, of no use to anybody, and not given back yet: a job may have them at once. `congested`:
    those behind a congested link, too."""
    used, going = state.index.involved, given_back(state)
    return [
        id
        for id, entry in state.aggregators.items()
        if entry.ours
        and entry.alive
        and entry.request
        and not entry.temporary
        and entry.reserved_for is None
        and not (entry.leaving or (entry.avoided and not congested))
        and id not in used
        and id not in going
    ]


def given_back(state: State) -> set[AggregatorId]:
    """Find those that the master was asked to take back."""
    return {key.aggregator for key in state.asked if isinstance(key, ReturnAsked)}


def period_end_s(state: State, now_s: float) -> float:
    period_s = state.config.scaling_s
    return (floor(now_s / period_s) + 1) * period_s


def postponed(state: State, job: Job, new: int, now_s: float) -> bool:
    """Say whether the job's new aggregators wait for the end of the period: too few to ask for."""
    pending, config = job.pending, state.config
    if pending is None or not config.scaling_s or not 0 < new < config.on_demand_min:
        return False
    return floor(now_s / config.scaling_s) == floor(pending.since_s / config.scaling_s)
