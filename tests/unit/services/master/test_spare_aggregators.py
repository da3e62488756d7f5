"""Aggregators are started while requests lack any, and stopped once some were free for a while."""

from typing import Any

import pytest
from tests.unit.services.master.test_master_core import Harness, heartbeat

from slackwater.common.base.effects import Effect
from slackwater.common.base.errors import ConfigRejected
from slackwater.schemas.base import ClusterId, Message, Ok, Refused
from slackwater.schemas.cluster import (
    AggregatorsAllocated,
    AllocateAggregators,
    DeallocateAggregators,
)
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo, ScalingRecord
from slackwater.services.master.autoscaling import CallHook, HookEnded
from slackwater.services.master.core import Master

C1 = ClusterId("c1")


class Pooled(Harness):
    """The aggregators of `up` are heard each second."""

    def __init__(self, *up: str, **config: Any) -> None:
        self.up, self.buckets = list(up), dict[str, int]()
        self.calls: list[CallHook] = []
        knobs = {
            "autoscale_hook": "hook", "autoscale_aggregators_max": 6, "autoscale_period_s": 60.0,
            "autoscale_wait_s": 100.0, "node_silent_s": 5.0, "aggregators_max": 5,
        }  # fmt: skip
        super().__init__(**{**knobs, **config})

    def step(self, event: Any) -> list[Effect]:
        effects = super().step(event)
        self.calls += [each for each in effects if isinstance(each, CallHook)]
        return effects

    def seconds(self, count: int) -> None:
        for _ in range(count):
            for id in self.up:
                self.see(heartbeat(id, self.now_s, buckets=self.buckets.get(id, 0)))
            self.tick()

    @property
    def order(self) -> ScalingRecord:
        return self.core.scalings[1].record

    def allocate(self, request: str, count: int) -> Message:
        return self.answer(AllocateAggregators(request=request, cluster=C1, count=count))


def test_a_request_that_lacks_aggregators_has_them_started() -> None:
    harness = Pooled("a1")
    harness.seconds(10)
    assert harness.calls == []
    refused = harness.allocate("r1", 3)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s, "waiting helps: the hook starts some"
    harness.seconds(1)
    (call,) = harness.calls
    assert (call.verb, call.machines) == ("add-aggregators", ("2",))
    assert call.id == harness.order.id
    assert call.id.startswith("aggregators-1-")
    harness.step(HookEnded(call.id, ""))
    harness.up += ["a2", "a3"]
    harness.seconds(2)
    assert harness.order.state == "steady"
    assert isinstance(harness.allocate("r1", 3), AggregatorsAllocated)
    harness.seconds(90)
    assert len(harness.calls) == 1, "all are in use"


def test_what_was_free_all_through_the_period_is_stopped_and_given_to_nobody_meanwhile() -> None:
    harness = Pooled("a1", "a2", "a3", autoscale_aggregators_min=1)
    harness.seconds(10)
    assert isinstance(harness.allocate("r1", 1), AggregatorsAllocated)
    harness.seconds(61)
    (call,) = harness.calls
    assert (call.verb, call.machines) == ("return-aggregators", ("a3", "a2"))
    assert harness.order.state == "returning"
    assert isinstance(harness.allocate("r2", 1), Refused), "they are about to be stopped"
    harness.step(HookEnded(call.id, ""))
    harness.up = ["a1"]
    harness.seconds(10)
    assert (harness.order.state, harness.order.reason) == ("steady", "")


def test_a_short_lull_stops_nothing() -> None:
    """One of two is free for most of the period, and not all through it."""
    harness = Pooled("a1", "a2")
    harness.seconds(10)
    assert isinstance(harness.allocate("r1", 2), AggregatorsAllocated)
    for turn in range(4):
        harness.seconds(40)
        harness.answer(DeallocateAggregators(cluster=C1, aggregators=("a2",)))
        harness.seconds(15)
        assert isinstance(harness.allocate(f"again-{turn}", 1), AggregatorsAllocated)
    assert harness.calls == []


def test_it_keeps_to_its_bounds_and_to_what_a_cluster_may_have() -> None:
    harness = Pooled("a1", autoscale_aggregators_max=2)
    harness.seconds(10)
    harness.allocate("r1", 4)
    harness.seconds(2)
    assert harness.calls[0].machines == ("1",)
    harness.step(HookEnded(harness.calls[0].id, "no room"))
    assert harness.order.reason == "no room"
    info = harness.answer(GetPolicy())
    assert isinstance(info, PolicyInfo)
    assert info.machines == "1 aggregator of 0 to 2, 1 free; the last order failed: no room"
    beyond = Pooled("a1", "a2", aggregators_max=2)
    beyond.seconds(10)
    assert isinstance(beyond.allocate("r1", 2), AggregatorsAllocated)
    assert isinstance(beyond.allocate("r2", 1), Refused)
    beyond.seconds(5)
    assert beyond.calls == [], "the cluster has what it may have"


def test_a_lack_of_long_ago_starts_nothing() -> None:
    harness = Pooled("a1")
    harness.seconds(2)
    harness.allocate("r1", 2)
    harness.now_s += 20.0  # The one that asked is gone.
    harness.seconds(10)
    assert harness.calls == []


def test_a_master_that_was_killed_tells_the_order_again_and_still_holds_them_back() -> None:
    harness = Pooled("a1", "a2")
    harness.seconds(75)
    (first,) = harness.calls
    assert first.verb == "return-aggregators"
    harness.calls.clear()
    harness.restart()
    assert harness.calls == [first]
    assert isinstance(harness.core, Master)
    harness.seconds(1)
    assert isinstance(harness.allocate("r1", 1), Refused)
    assert harness.answer(DeallocateAggregators(cluster=C1, aggregators=())) == Ok()


def test_without_a_hook_nothing_is_started() -> None:
    harness = Pooled("a1", autoscale_hook="")
    harness.seconds(10)
    assert isinstance(harness.allocate("r1", 2), Refused)
    harness.seconds(5)
    assert harness.calls == []


def test_bounds_within_which_nothing_can_be_scaled_are_refused() -> None:
    with pytest.raises(ConfigRejected, match="or autoscale_aggregators_max, or no autoscale_hook"):
        Pooled(autoscale_aggregators_max=0)
    with pytest.raises(ConfigRejected, match=r"autoscale_aggregators_min is 3 and .*max 2"):
        Pooled(autoscale_aggregators_min=3, autoscale_aggregators_max=2)
