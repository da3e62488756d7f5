"""What an aggregator is told of its slot: the cycle, or the deadlines, of the jobs on it.

An assignment changes the cycle of its aggregator, and with it the iterations of the jobs there,
which may have tasks on others, too (AutoPS section 3.3.1). So all plans are reckoned anew once a
tick in which a record or the aggregators changed, and told where an aggregator, in its present
incarnation, has not confirmed the same.
"""

import msgspec

from slackwater.schemas.base import AggregatorId, Message, Ok
from slackwater.schemas.placement import JobTurns, PlanTurns
from slackwater.services.controller.policies.demand import slack_s
from slackwater.services.controller.policies.scheme import Packing
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.controller.state import Asked, State


def tell(state: State, now_s: float) -> None:
    """Once a tick."""
    present = {
        id: entry.incarnation
        for id, entry in state.aggregators.items()
        if entry.ours and entry.alive
    }
    if state.turns_stale or present != state.turns_present:
        state.turns, state.turns_present, state.turns_stale = plans(state), present, False
    for id, plan in state.turns.items():
        entry = state.aggregators[id]
        if entry.turns != (entry.incarnation, plan) and f"turns/{id}" not in state.asked:
            state.turns_told += 1
            entry.turns_asked = plan
            message = msgspec.structs.replace(plan, number=state.turns_told)
            state.ask_aggregator(f"turns/{id}", "turns", id, message, now_s)


def told(state: State, aggregator: AggregatorId, asked: Asked, answer: Message) -> None:
    """What was refused or lost is told again by the next tick."""
    entry = state.aggregators[aggregator]
    if isinstance(answer, Ok) and entry.turns_asked is not None:
        entry.turns = (asked.incarnation, entry.turns_asked)


def plans(state: State) -> dict[AggregatorId, PlanTurns]:
    """Of every shared aggregator whose jobs' policy orders tasks, without a number."""
    found: dict[AggregatorId, PlanTurns] = {}
    for name in sorted({state.policy_name(job) for job in state.living()}):
        order = state.policy_named(name).order
        if order == "arrival":
            continue
        view = cluster_view(state, None, policy=name)
        packing = Packing(view)
        stretched_s = packing.durations_s()
        paces: dict[AggregatorId, list[JobTurns]] = {}
        for job in view.jobs:
            if job.iteration_s <= 0.0:
                continue  # Not profiled: it runs as it comes.
            every_s = job.iteration_s
            if order == "cyclic":  # Of a job whose aggregators are all away, nothing is stretched.
                every_s = stretched_s.get(job.id, every_s)
            spec = state.jobs[job.id].record.spec
            if spec.consistency != "synchronous":
                every_s /= spec.workers
            for place in job.cpu_by_place_s():
                turns = JobTurns(job=job.id, every_s=every_s, slack=_slack(job.loss_limit))
                paces.setdefault(place, []).append(turns)
        for aggregator in view.aggregators:
            if aggregator.id in paces:
                found[aggregator.id] = PlanTurns(
                    cluster=state.cluster,
                    number=0,
                    cycle_s=packing.free_s(aggregator.id)[1] if order == "cyclic" else 0.0,
                    slack=_slack(state.config.loss_limit),
                    jobs=tuple(paces[aggregator.id]),
                )
    return found


def _slack(loss_limit: float) -> float:
    """The part of an iteration by which it may last longer."""
    return min(1.0, slack_s(1.0, loss_limit))
