"""Plans of aggregators' slots: the cycle, or the deadlines, of the jobs on each.

An assignment changes the cycle of its aggregator, and with it the iterations of the jobs there,
which may have tasks on others, too (AutoPS section 3.3.1). So all plans are reckoned anew once a
tick in which a record or the aggregators changed, and told where an aggregator, in its present
incarnation, has not confirmed the same.
"""

import msgspec

from slackwater.schemas.base import AggregatorId, Message, Ok
from slackwater.schemas.placement import JobSlotPlan, SlotPlan
from slackwater.services.controller.keys import SlotPlanAsked
from slackwater.services.controller.policies.demand import slack_s
from slackwater.services.controller.snapshot import cluster_view
from slackwater.services.controller.state import Asked, Job, State


def send_plans(state: State, now_s: float) -> None:
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
        if entry.turns != (entry.incarnation, plan) and SlotPlanAsked(id) not in state.asked:
            state.turns_told += 1
            entry.turns_asked = plan
            message = msgspec.structs.replace(plan, number=state.turns_told)
            state.ask_aggregator(SlotPlanAsked(id), "turns", id, message, now_s)


def confirm_plan(state: State, aggregator: AggregatorId, asked: Asked, answer: Message) -> None:
    """Note a confirmed plan. One that was refused or lost is told again by the next tick."""
    entry = state.aggregators[aggregator]
    if isinstance(answer, Ok) and entry.turns_asked is not None:
        entry.turns = (asked.incarnation, entry.turns_asked)


def plans(state: State) -> dict[AggregatorId, SlotPlan]:
    """Return the plan, without a number, of every shared aggregator whose jobs' policy orders
    tasks."""
    found: dict[AggregatorId, SlotPlan] = {}
    for name in state.index.policies():
        planned = state.policy_named(name).plans(cluster_view(state, None, policy=name))
        for id, turns in planned.items():
            found[id] = SlotPlan(
                cluster=state.cluster,
                number=0,
                cycle_s=turns.cycle_s,
                slack=_slack(state.config.loss_limit),
                jobs=tuple(_turns(state.jobs[job], every_s)
                           for job, every_s in turns.every_s.items()),
            )  # fmt: skip
    return found


def _turns(job: Job, every_s: float) -> JobSlotPlan:
    spec = job.record.spec
    if spec.consistency != "synchronous":
        every_s /= spec.workers
    return JobSlotPlan(job=job.id, every_s=every_s, slack=_slack(job.record.loss_limit))


def _slack(loss_limit: float) -> float:
    """The part of an iteration by which it may last longer."""
    return min(1.0, slack_s(1.0, loss_limit))
