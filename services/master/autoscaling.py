"""Machines are bought and returned as the GPUs' policy asks (Qiao, thesis, section 3.5.4).

Pure. A policy says how many machines it would like (`Plan.desired_nodes`); the operator's hook
makes it so. One order at a time, durable before the hook hears of it, and told again under the same
id after a restart of the master: a hook takes a repeated id for one that it has carried out.

    state       left when                                          to
    steady      fewer machines are wanted, or more                 draining, adding
    adding      the hook took the order; or refused it             awaiting; steady
    awaiting    so many machines are heard; or time is over        steady
    draining    no process is left there; or time is over          returning; steady
    returning   the hook took the order; or refused it             leaving; steady
    leaving     the machines are silent; or time is over           steady

Machines that are to be returned take no new job. Those with the fewest GPUs in use go first, and
none with a job that may not be paused or that has slots; their jobs pause, to go on elsewhere.
Between two orders at least `autoscale_period_s` pass. Without any GPU job for as long, the least
number of machines is wanted. Bounds count machines with GPUs that are heard and are not returned.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import msgspec

from slackwater.common.base.effects import Action, Log, Persist
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.transitions import Story
from slackwater.common.base.words import number_of
from slackwater.schemas.base import NodeId, Record
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.schemas.scheduling import ScalingRecord, ScalingState
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.jobs import Job
from slackwater.services.master.lifecycle import advance, leave
from slackwater.services.master.state import State

SCALING_BUCKET: Final = "scaling"
POOL: Final = "gpus"
MACHINES_AT_ONCE_MAX: Final = 64
"""Machines of one order."""

TRANSITIONS: Final[dict[ScalingState, frozenset[ScalingState]]] = {
    "steady": frozenset({"adding", "draining"}),
    "adding": frozenset({"awaiting", "steady"}),
    "awaiting": frozenset({"steady"}),
    "draining": frozenset({"returning", "steady"}),
    "returning": frozenset({"leaving", "steady"}),
    "leaving": frozenset({"steady"}),
}
assert set(TRANSITIONS) == set(get_args(ScalingState))


@dataclass(frozen=True, slots=True)
class CallHook(Action):
    """Tell the operator's hook an order. `HookEnded` follows within `within_s`."""

    hook: str
    id: str
    verb: Literal["add", "return"]
    machines: tuple[str, ...]
    """One text: how many to add. Else the names of those to return."""
    within_s: float


@dataclass(frozen=True, slots=True)
class HookEnded:
    id: str
    failure: str
    """Why the hook did not take the order; empty: it did."""


@dataclass(slots=True)
class Scaling:
    """The order at work."""

    record: ScalingRecord = field(default_factory=ScalingRecord)
    idle_since_s: float | None = None
    """Since when there is no GPU job; None: there is one."""
    story: Story = field(default_factory=Story)


def check(config: MasterConfig) -> None:
    """Raise ConfigRejected for bounds within which nothing can be scaled."""
    least, most = config.autoscale_nodes_min, config.autoscale_nodes_max
    if config.autoscale_hook and least >= most:
        raise ConfigRejected(
            f"autoscale_nodes_min is {least} and autoscale_nodes_max {most}: give more for the "
            "second, or no autoscale_hook"
        )


def recover(state: State, scaling: Scaling, record: Record | None, now_s: float) -> None:
    """Go on with the order that a former master stored: its hook hears of it again."""
    if not state.config.autoscale_hook or not isinstance(record, ScalingRecord):
        return
    scaling.record = record
    scaling.story.begin(record.state, "it was found")
    if record.state in ("draining", "returning", "leaving"):
        state.nodes.leaving = frozenset(record.nodes)
    if record.state in ("adding", "returning"):
        _call(state, record)


def tick(state: State, scaling: Scaling, now_s: float) -> None:
    """Look at the order at work, or for the next one."""
    config, record = state.config, scaling.record
    if not config.autoscale_hook:
        return
    _note_idle(state, scaling, now_s)
    over = now_s >= record.since_s + config.autoscale_wait_s
    match record.state:
        case "steady":
            _begin(state, scaling, now_s)
        case "awaiting":
            if len(_machines(state, now_s)) >= record.goal:
                _move(state, scaling, "steady", "the machines are heard", now_s)
            elif over:
                lacking = record.goal - len(_machines(state, now_s))
                why = f"{number_of(lacking, 'machine')} did not come in time"
                _move(state, scaling, "steady", why, now_s, reason=why)
        case "draining":
            if not any(_busy(state, node) for node in record.nodes):
                _move(state, scaling, "returning", "nothing is left there", now_s)
                _call(state, scaling.record)
            elif over:
                why = "jobs did not leave in time"
                _move(state, scaling, "steady", why, now_s, reason=why)
            else:
                _vacate(state, state.nodes.leaving, now_s)
        case "leaving":
            if all(state.nodes.silent(node, now_s) for node in record.nodes):
                _move(state, scaling, "steady", "the machines are gone", now_s)
            elif over:
                why = "machines that were returned are still heard, and serve again"
                _move(state, scaling, "steady", why, now_s, reason=why)
        case _:
            pass  # The hook will answer within its deadline.


def ended(state: State, scaling: Scaling, event: HookEnded, now_s: float) -> None:
    """Take the hook's answer. One to an order that is over says nothing."""
    record = scaling.record
    if event.id != record.id or record.state not in ("adding", "returning"):
        return
    if event.failure:
        _move(state, scaling, "steady", event.failure, now_s, reason=event.failure)
    elif record.state == "adding":
        _move(state, scaling, "awaiting", "the hook took the order", now_s)
    else:
        _move(state, scaling, "leaving", "the hook took the order", now_s)


def described(state: State, scaling: Scaling, have: int) -> str:
    """Say for people what is wanted and what is being done; empty: nothing is scaled."""
    config, asked = state.config, state.gpus.nodes_wanted
    if not config.autoscale_hook:
        return ""
    record = scaling.record
    bounds = f"{config.autoscale_nodes_min} to {config.autoscale_nodes_max}"
    wanted = "" if asked is None else f", {asked} wanted"
    cost = have * config.autoscale_node_hour_cost
    price = f", {cost:g} an hour" if config.autoscale_node_hour_cost else ""
    doing = "" if record.state == "steady" else f"; {record.state} (order {record.id})"
    failed = f"; the last order failed: {record.reason}" if record.reason else ""
    return f"{number_of(have, 'machine')} of {bounds}{wanted}{price}{doing}{failed}"


def machines(state: State, now_s: float) -> int:
    """Count the machines with GPUs that serve now."""
    return len(_machines(state, now_s))


# One order ----------------------------------------------------------------------------------------


def _begin(state: State, scaling: Scaling, now_s: float) -> None:
    config, record = state.config, scaling.record
    settled = now_s >= state.begun_s + config.node_silent_s
    if record.ordered_s and now_s < record.ordered_s + config.autoscale_period_s:
        return
    have = _machines(state, now_s)
    target = _target(state, scaling, len(have), now_s)
    if target > len(have) and settled:  # A master that has just begun has not heard all.
        count = min(target - len(have), MACHINES_AT_ONCE_MAX)
        goal = len(have) + count
        _order(state, scaling, "adding", now_s, count=count, goal=goal, nodes=())
        _call(state, scaling.record)
    elif target < len(have):
        nodes = _returnable(state, have)[: min(len(have) - target, MACHINES_AT_ONCE_MAX)]
        if nodes:
            goal = len(have) - len(nodes)
            _order(state, scaling, "draining", now_s, count=len(nodes), goal=goal, nodes=nodes)
            _vacate(state, frozenset(nodes), now_s)


def _target(state: State, scaling: Scaling, have: int, now_s: float) -> int:
    config, asked = state.config, state.gpus.nodes_wanted
    wanted = have if asked is None else asked
    idle_s = scaling.idle_since_s
    if idle_s is not None and now_s >= idle_s + config.autoscale_period_s:
        wanted = config.autoscale_nodes_min
    return min(max(wanted, config.autoscale_nodes_min), config.autoscale_nodes_max)


def _order(
    state: State, scaling: Scaling, new: ScalingState, now_s: float, **changes: object
) -> None:
    number = scaling.record.number + 1
    _move(
        state, scaling, new, f"order {number}", now_s,
        number=number, id=f"{POOL}-{number}-{int(now_s)}", ordered_s=now_s, **changes,
    )  # fmt: skip


def _move(
    state: State, scaling: Scaling, new: ScalingState, why: str, now_s: float, **changes: Any
) -> None:
    """Store the next state of the order. Raises InvalidTransition."""
    record = scaling.record
    scaling.story.move("the order", record.state, new, why, TRANSITIONS)
    scaling.record = msgspec.structs.replace(
        record, state=new, since_s=now_s, epoch=state.epoch, **({"reason": ""} | changes)
    )
    state.out.append(Persist(SCALING_BUCKET, POOL, scaling.record))
    if new == "steady":
        state.nodes.leaving = frozenset()
    state.gpus.due = state.slots.due = True
    fields = {
        "id": scaling.record.id, "state": new, "why": why, "machines": scaling.record.count,
        "nodes": list(scaling.record.nodes),
    }  # fmt: skip
    state.out.append(Log("machines.scaled", fields, "warning" if scaling.record.reason else "info"))


def _call(state: State, record: ScalingRecord) -> None:
    config, adds = state.config, record.state == "adding"
    told = (str(record.count),) if adds else record.nodes
    verb: Literal["add", "return"] = "add" if adds else "return"
    hook, within_s = config.autoscale_hook, config.autoscale_hook_s
    state.out.append(CallHook(hook, record.id, verb, told, within_s))


# Machines -----------------------------------------------------------------------------------------


def _machines(state: State, now_s: float) -> list[NodeId]:
    return [
        beat.node
        for beat, alive in state.nodes.heartbeats(now_s)
        if alive and beat.gpus and beat.node not in state.nodes.leaving
    ]


def _holders(state: State, node: NodeId) -> list[Job]:
    return [
        job
        for job in state.unsettled.values()
        if any(place == node for place, _ in (*job.record.allocation, *job.record.planned))
    ]


def _busy(state: State, node: NodeId) -> bool:
    return bool(_holders(state, node) or state.nodes.runs(node))


def _returnable(state: State, have: list[NodeId]) -> tuple[NodeId, ...]:
    """List machines whose jobs may all be paused, least used first."""
    found = []
    for node in have:
        jobs = _holders(state, node)
        if all(job.record.spec.gpus and job.record.spec.preemptible for job in jobs):
            held = sum(count for j in jobs for place, count in j.record.allocation if place == node)
            found.append((held, node))
    return tuple(node for _, node in sorted(found))


def _vacate(state: State, nodes: frozenset[NodeId], now_s: float) -> None:
    """Give these machines no job any more, and pause those that they have, or are about to."""
    state.nodes.leaving = nodes
    for job in {job.id: job for node in sorted(nodes) for job in _holders(state, node)}.values():
        record = job.record
        stops = record.state == "stopping" and not any(at in nodes for at, _ in record.planned)
        if record.state in HOLDING_STATES and not stops and not record.resizing:
            preemptions = record.preemptions + 1
            reason = "its machine is returned; it goes on elsewhere"
            leave(state, job, (), now_s, preemptions=preemptions, reason=reason)
            advance(state, job)


def _note_idle(state: State, scaling: Scaling, now_s: float) -> None:
    snapshot = state.gpus.snapshot
    if snapshot.jobs or snapshot.hidden:
        scaling.idle_since_s = None
    elif scaling.idle_since_s is None:
        scaling.idle_since_s = now_s
        state.gpus.nodes_wanted = None  # It was wanted for jobs that are gone.
