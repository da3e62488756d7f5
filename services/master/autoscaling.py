"""Orders to the operator's hook, by which machines with GPUs (Qiao, thesis, section 3.5.4) and
aggregators of the pool come and go.

Pure. Each kind (gpu_machines.py, spare_aggregators.py) says how many it would like; the hook makes
it so. One order of a kind at a time, durable before the hook hears of it, and told again under the
same id after a restart of the master: a hook takes a repeated id for one that it has carried out.

    state       left when                                          to
    steady      fewer are wanted, or more                          draining, adding
    adding      the hook took the order; or refused it             awaiting; steady
    awaiting    so many are heard; or time is over                 steady
    draining    nothing is left there; or time is over             returning; steady
    returning   the hook took the order; or refused it             leaving; steady
    leaving     they are silent; or time is over                   steady

Those that are to be returned take nothing new. Between two orders at least `autoscale_period_s`
pass. Bounds count those that are heard and are not returned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, get_args

import msgspec

from slackwater.common.base.effects import Action, Log, Persist
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.transitions import Story
from slackwater.common.base.words import number_of
from slackwater.schemas.base import NodeId, Record
from slackwater.schemas.scheduling import ScalingRecord, ScalingState
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.state import State

SCALING_BUCKET: Final = "scaling"
AT_ONCE_MAX: Final = 64
"""Machines, or aggregators, of one order."""

TRANSITIONS: Final[dict[ScalingState, frozenset[ScalingState]]] = {
    "steady": frozenset({"adding", "draining"}),
    "adding": frozenset({"awaiting", "steady"}),
    "awaiting": frozenset({"steady"}),
    "draining": frozenset({"returning", "steady"}),
    "returning": frozenset({"leaving", "steady"}),
    "leaving": frozenset({"steady"}),
}
assert set(TRANSITIONS) == set(get_args(ScalingState))
Verb = Literal["add", "return", "add-aggregators", "return-aggregators"]


class Scaled(Protocol):
    """One kind of what comes and goes. Names are those of machines, or of aggregators."""

    pool: str
    """The record's key, and the beginning of its orders' ids."""
    noun: str
    adds: Verb
    returns: Verb

    def bounds(self, config: MasterConfig) -> tuple[int, int]:
        """Return the least and the most; equal: it is not scaled."""
        ...

    def have(self, state: State, now_s: float) -> list[NodeId]:
        """List those that serve now and are not being returned."""
        ...

    def wanted(self, state: State, have: int, now_s: float) -> int: ...

    def returnable(self, state: State, have: list[NodeId]) -> tuple[NodeId, ...]:
        """List those that may be returned, first those that had best be."""
        ...

    def hold(self, state: State, names: frozenset[NodeId]) -> None:
        """Give nothing new to these, and to all others again."""
        ...

    def vacate(self, state: State, names: frozenset[NodeId], now_s: float) -> None:
        """Have what these serve leave, where it does not by itself."""
        ...

    def busy(self, state: State, name: NodeId) -> bool: ...

    def silent(self, state: State, name: NodeId, now_s: float) -> bool: ...

    def told(self, state: State, have: int) -> str:
        """Say what is wanted and what it costs; empty: nothing to say."""
        ...


@dataclass(frozen=True, slots=True)
class CallHook(Action):
    """Tell the operator's hook an order. `HookEnded` follows within `within_s`."""

    hook: str
    id: str
    verb: Verb
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
    """The order of one kind that is at work."""

    scaled: Scaled
    record: ScalingRecord = field(default_factory=ScalingRecord)
    story: Story = field(default_factory=Story)


def check(config: MasterConfig, kinds: Sequence[Scaling]) -> None:
    """Raise ConfigRejected for bounds within which nothing can be scaled."""
    if not config.autoscale_hook:
        return
    bounds = {each.scaled.noun: each.scaled.bounds(config) for each in kinds}
    for noun, (least, most) in bounds.items():
        if least > most:
            raise ConfigRejected(
                f"autoscale_{noun}s_min is {least} and autoscale_{noun}s_max {most}: give at least "
                "as many for the second"
            )
    if all(least == most for least, most in bounds.values()):
        least, most = bounds["node"]
        raise ConfigRejected(
            f"autoscale_nodes_min is {least} and autoscale_nodes_max {most}: give more for the "
            "second, or autoscale_aggregators_max, or no autoscale_hook"
        )


def recover(state: State, kinds: Sequence[Scaling], records: Mapping[str, Record]) -> None:
    """Go on with the orders that a former master stored: their hook hears of them again."""
    for scaling in kinds:
        record = records.get(scaling.scaled.pool)
        if not state.config.autoscale_hook or not isinstance(record, ScalingRecord):
            continue
        scaling.record = record
        scaling.story.begin(record.state, "it was found")
        if record.state in ("draining", "returning", "leaving"):
            scaling.scaled.hold(state, frozenset(record.nodes))
        if record.state in ("adding", "returning"):
            _call(state, scaling)


def tick(state: State, kinds: Sequence[Scaling], now_s: float) -> None:
    """Look at the orders at work, or for the next ones."""
    for scaling in kinds:
        least, most = scaling.scaled.bounds(state.config)
        if state.config.autoscale_hook and least < most:
            _look(state, scaling, now_s)


def _look(state: State, scaling: Scaling, now_s: float) -> None:
    record, scaled = scaling.record, scaling.scaled
    over = now_s >= record.since_s + state.config.autoscale_wait_s
    have = scaled.have(state, now_s)
    wanted = scaled.wanted(state, len(have), now_s)
    match record.state:
        case "steady":
            _begin(state, scaling, have, wanted, now_s)
        case "awaiting":
            if len(have) >= record.goal:
                _move(state, scaling, "steady", f"the {scaled.noun}s are heard", now_s)
            elif over:
                lacking = number_of(record.goal - len(have), _noun(scaled))
                why = f"{lacking} did not come in time"
                _move(state, scaling, "steady", why, now_s, reason=why)
        case "draining":
            if not any(scaled.busy(state, name) for name in record.nodes):
                _move(state, scaling, "returning", "nothing is left there", now_s)
                _call(state, scaling)
            elif over:
                why = "jobs did not leave in time"
                _move(state, scaling, "steady", why, now_s, reason=why)
            else:
                scaled.vacate(state, frozenset(record.nodes), now_s)
        case "leaving":
            if all(scaled.silent(state, name, now_s) for name in record.nodes):
                _move(state, scaling, "steady", f"the {scaled.noun}s are gone", now_s)
            elif over:
                why = f"{_noun(scaled)}s that were returned are still heard, and serve again"
                _move(state, scaling, "steady", why, now_s, reason=why)
        case _:
            pass  # The hook will answer within its deadline.


def ended(state: State, kinds: Sequence[Scaling], event: HookEnded, now_s: float) -> None:
    """Take the hook's answer. One to an order that is over says nothing."""
    for scaling in kinds:
        record = scaling.record
        if event.id != record.id or record.state not in ("adding", "returning"):
            continue
        if event.failure:
            _move(state, scaling, "steady", event.failure, now_s, reason=event.failure)
        elif record.state == "adding":
            _move(state, scaling, "awaiting", "the hook took the order", now_s)
        else:
            _move(state, scaling, "leaving", "the hook took the order", now_s)


def described(state: State, kinds: Sequence[Scaling], now_s: float) -> str:
    """Say for people what is wanted and what is being done; empty: nothing is scaled."""
    found = []
    for scaling in kinds:
        scaled, record = scaling.scaled, scaling.record
        least, most = scaled.bounds(state.config)
        if not state.config.autoscale_hook or least == most:
            continue
        have = len(scaled.have(state, now_s))
        doing = "" if record.state == "steady" else f"; {record.state} (order {record.id})"
        failed = f"; the last order failed: {record.reason}" if record.reason else ""
        counted = f"{number_of(have, _noun(scaled))} of {least} to {most}"
        found.append(f"{counted}{scaled.told(state, have)}{doing}{failed}")
    return "; ".join(found)


# One order ----------------------------------------------------------------------------------------


def _begin(state: State, scaling: Scaling, have: list[NodeId], wanted: int, now_s: float) -> None:
    config, record, scaled = state.config, scaling.record, scaling.scaled
    settled = now_s >= state.begun_s + config.node_silent_s
    if record.ordered_s and now_s < record.ordered_s + config.autoscale_period_s:
        return
    least, most = scaled.bounds(config)
    target = min(max(wanted, least), most)
    if target > len(have) and settled:  # A master that has just begun has not heard all.
        count = min(target - len(have), AT_ONCE_MAX)
        goal = len(have) + count
        _order(state, scaling, "adding", now_s, count=count, goal=goal, nodes=())
        _call(state, scaling)
    elif target < len(have):
        names = scaled.returnable(state, have)[: min(len(have) - target, AT_ONCE_MAX)]
        if names:
            goal = len(have) - len(names)
            _order(state, scaling, "draining", now_s, count=len(names), goal=goal, nodes=names)
            scaled.hold(state, frozenset(names))
            scaled.vacate(state, frozenset(names), now_s)


def _order(
    state: State, scaling: Scaling, new: ScalingState, now_s: float, **changes: object
) -> None:
    number = scaling.record.number + 1
    _move(
        state, scaling, new, f"order {number}", now_s, number=number,
        id=f"{scaling.scaled.pool}-{number}-{int(now_s)}", ordered_s=now_s, **changes,
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
    state.out.append(Persist(SCALING_BUCKET, scaling.scaled.pool, scaling.record))
    if new == "steady":
        scaling.scaled.hold(state, frozenset())
    state.gpus.due = state.slots.due = True
    fields = {
        "id": scaling.record.id, "state": new, "why": why, "machines": scaling.record.count,
        "nodes": list(scaling.record.nodes),
    }  # fmt: skip
    state.out.append(Log("machines.scaled", fields, "warning" if scaling.record.reason else "info"))


def _call(state: State, scaling: Scaling) -> None:
    config, record, scaled = state.config, scaling.record, scaling.scaled
    adds = record.state == "adding"
    told = (str(record.count),) if adds else record.nodes
    verb = scaled.adds if adds else scaled.returns
    hook, within_s = config.autoscale_hook, config.autoscale_hook_s
    state.out.append(CallHook(hook, record.id, verb, told, within_s))


def _noun(scaled: Scaled) -> str:
    return "machine" if scaled.noun == "node" else scaled.noun
