"""Machines are added and returned as the policy asks: one order at a time, told again, bounded."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.services.master.test_gpu_dispatch import GpuHarness

from slackwater.common.base.effects import Effect, Persist, Recovered
from slackwater.common.base.errors import ConfigRejected
from slackwater.schemas.gpus import held
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo, ScalingRecord
from slackwater.services.master.autoscaling import (
    SCALING_BUCKET,
    TRANSITIONS,
    CallHook,
    HookEnded,
)
from slackwater.services.master.core import Master
from slackwater.services.master.gpu_machines import POOL

KNOBS: dict[str, object] = {
    "autoscale_hook": "hook", "autoscale_nodes_max": 4, "autoscale_period_s": 60.0,
    "autoscale_wait_s": 100.0, "node_silent_s": 5.0, "autoscale_node_hour_cost": 2.5,
}  # fmt: skip


class Machines(GpuHarness):
    """Nodes n1 and n2; every node of `up` is heard each second."""

    def __init__(self, **config: object) -> None:
        self.up: tuple[str, ...] = ("n1", "n2")
        self.calls: list[CallHook] = []
        super().__init__(**{**KNOBS, **config})

    def step(self, event: object) -> list[Effect]:
        effects = super().step(event)
        self.calls += [e for e in effects if isinstance(e, CallHook)]
        return effects

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.hear(*self.up)
            self.tick()

    def want(self, nodes: int | None) -> None:
        self.core.state.gpus.nodes_wanted = nodes

    @property
    def order(self) -> ScalingRecord:
        return self.core.scalings[0].record

    def answer_hook(self, failure: str = "") -> None:
        self.step(HookEnded(self.order.id, failure))


def states_of(effects: Sequence[Effect]) -> list[str]:
    return [
        e.record.state
        for e in effects
        if isinstance(e, Persist) and isinstance(e.record, ScalingRecord)
    ]


def test_machines_are_added_once_the_hook_took_the_order() -> None:
    harness = Machines()
    harness.seconds(10)
    assert harness.calls == []
    harness.want(3)
    harness.hear(*harness.up)
    effects = harness.tick()
    assert states_of(effects) == ["adding"], "it is stored in the step that calls the hook"
    (call,) = harness.calls
    assert (call.verb, call.machines, call.id) == ("add", ("1",), harness.order.id)
    harness.seconds(5)
    assert len(harness.calls) == 1
    harness.answer_hook()
    assert harness.order.state == "awaiting"
    harness.seconds(5)
    assert harness.order.state == "awaiting"
    harness.up = ("n1", "n2", "n3")
    harness.seconds(2)
    assert (harness.order.state, harness.order.reason) == ("steady", "")
    assert len(harness.calls) == 1


def test_orders_keep_to_their_bounds_and_their_rate() -> None:
    harness = Machines()
    harness.seconds(10)
    harness.want(100)
    harness.seconds(2)
    assert harness.calls[0].machines == ("2",), "four machines at most"
    harness.answer_hook("no quota")
    assert (harness.order.state, harness.order.reason) == ("steady", "no quota")
    harness.seconds(50)
    assert len(harness.calls) == 1, "not before autoscale_period_s"
    harness.seconds(15)
    assert len(harness.calls) == 2
    assert harness.calls[1].id != harness.calls[0].id


def test_machines_that_do_not_come_end_the_order() -> None:
    harness = Machines(autoscale_period_s=1000.0)
    harness.seconds(10)
    harness.want(3)
    harness.seconds(1)
    harness.answer_hook()
    harness.seconds(101)
    assert "1 machine did not come in time" in harness.order.reason
    info = harness.answer(GetPolicy())
    assert isinstance(info, PolicyInfo)
    assert info.machines.startswith("2 machines of 1 to 4, 3 wanted, 5 an hour")


def test_a_master_that_was_killed_tells_the_order_again_under_its_id() -> None:
    harness = Machines()
    harness.seconds(10)
    harness.want(3)
    harness.seconds(1)
    (first,) = harness.calls
    again = Master(harness.core.state.config)
    found = {SCALING_BUCKET: {POOL: harness.order}}
    effects = again.step(Recovered(2, found), harness.now_s + 1.0)
    (second,) = [e for e in effects if isinstance(e, CallHook)]
    assert second == first
    again.step(HookEnded("gpus-0-0", "another order's answer"), harness.now_s + 2.0)
    assert again.scalings[0].record.state == "adding"


def test_a_machine_is_drained_before_it_is_returned() -> None:
    """Its job pauses and goes on elsewhere; nothing new starts there meanwhile; the hook hears of
    the machine once no process is left; the order is over when the machine is silent."""
    harness = Machines()
    harness.seconds(10)
    harness.submit("a", 2)
    (node,) = (place for place, _ in harness.job("a").allocation)
    harness.confirm("start/a")
    other = "n1" if node == "n2" else "n2"
    harness.submit("b", 1, preemptible=False)
    assert [place for place, _ in harness.job("b").allocation] == [other]
    harness.want(1)
    harness.seconds(1)
    assert (harness.order.state, harness.order.nodes) == ("draining", (node,))
    assert harness.job("a").state == "stopping"
    assert harness.calls == []
    harness.seconds(3)
    harness.confirm(f"stop@{harness.job('a').attempt}{node}/a")
    for order in list(harness.core.state.jobs["a"].asked):  # type: ignore[index]  # Its own id.
        if order.verb == "stop":
            harness.confirm(f"{order}/a")
    harness.seconds(2)
    assert harness.job("a").state == "paused"
    assert held(harness.job("a").allocation) == 0
    (call,) = harness.calls
    assert (call.verb, call.machines) == ("return", (node,))
    harness.answer_hook()
    assert harness.order.state == "leaving"
    harness.up = (other,)
    harness.seconds(8)
    assert (harness.order.state, harness.order.reason) == ("steady", "")
    assert harness.core.state.nodes.leaving == frozenset()


def test_machines_with_jobs_that_may_not_be_paused_stay() -> None:
    harness = Machines()
    harness.seconds(10)
    for id in ("a", "b"):
        harness.submit(id, 2, preemptible=False)
    harness.want(1)
    harness.seconds(5)
    assert harness.order.state == "steady"


def test_an_idle_cluster_shrinks_to_its_least() -> None:
    harness = Machines()
    harness.seconds(59)
    assert harness.order.state == "steady"
    harness.seconds(5)
    assert harness.calls[0].machines == ("n1",)
    harness.answer_hook("still needed")
    assert harness.core.state.nodes.leaving == frozenset(), "it serves again"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("want"), st.integers(0, 9)),
            st.tuples(st.just("time"), st.integers(1, 150)),
            st.tuples(st.just("hook"), st.booleans()),
            st.tuples(st.just("up"), st.integers(1, 5)),
        ),
        max_size=25,
    )
)
def test_whatever_happens_one_order_is_at_work_and_bounds_hold(
    events: list[tuple[str, int]],
) -> None:
    harness = Machines()
    for what, value in events:
        if what == "want":
            harness.want(value)
        elif what == "time":
            harness.seconds(value)
        elif what == "hook" and harness.order.state in ("adding", "returning"):
            harness.answer_hook("" if value else "no")
        elif what == "up":
            harness.up = tuple(f"n{number}" for number in range(1, value + 1))
    ids = [call.id for call in harness.calls]
    assert len(set(ids)) == len(ids), "an order is told once while its master lives"
    assert harness.order.state in TRANSITIONS
    assert all(call.verb == "return" or int(call.machines[0]) <= 3 for call in harness.calls)
    assert harness.core.state.nodes.leaving <= set(harness.order.nodes)


def test_bounds_within_which_nothing_can_be_scaled_are_refused() -> None:
    with pytest.raises(ConfigRejected, match="autoscale_nodes_max 1"):
        Machines(autoscale_nodes_max=1)


def test_pollux_may_ask_for_machines_that_were_never_heard() -> None:
    config = msgspec.structs.replace(
        Machines().core.state.config, gpu_policy="pollux", gpu_policy_settings={"scale": "true"}
    )
    policy = Master(config).state.gpus.scheduler.policy
    assert getattr(policy, "scale_nodes_max", 0) == 4
