"""Aggregators on machines that are busy with other work take less; noise decides nothing."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.controller.harness import Harness, Pool

from slackwater.schemas.base import AggregatorId, NodeId
from slackwater.schemas.cluster import AggregatorHeartbeat
from slackwater.services.controller.host_load import STEP, Hosts, fair_part
from slackwater.services.controller.snapshot import cluster_view, free_parts

HOST_S = 60.0
CORES = 8


def said(
    id: str, at_s: float, busy: float, own: float, share: float = 2.0, node: str = "n"
) -> AggregatorHeartbeat:
    return AggregatorHeartbeat(
        service="aggregator", id=id, incarnation=1, at_s=at_s, node=NodeId(node), cpu_share=share,
        addresses=(), buckets=0, jobs=0, held_bytes=0, busy_s=0.0, bytes_in=0, bytes_out=0,
        host_cores=CORES, host_cpu=busy, own_cpu=own,
    )  # fmt: skip


def usable_after(
    others: list[float], own: float = 0.0, aggregators: int = 4, share: float = 2.0
) -> list[float]:
    """List the cores that an aggregator of the machine may use after each second beside other
    work."""
    hosts, found = Hosts(HOST_S), []
    for second, other in enumerate(others):
        for number in range(aggregators):
            busy = min(CORES, other + aggregators * own)
            beat = said(f"a{number}", second, busy, own, share)
            hosts.heard(beat, second + 0.01 * number)
        found.append(hosts.usable(beat))
    return found


def test_on_a_busy_machine_an_aggregator_has_its_fair_part() -> None:
    """Four of two cores each on eight, beside work for eight: everybody gets half."""
    assert fair_part(8.0, 8.0, 8.0) == 0.5
    assert usable_after([8.0] * 60)[-1] == 0.5
    assert usable_after([8.0] * 60, aggregators=1)[-1] == pytest.approx(0.8)
    assert usable_after([4.0] * 60, aggregators=1)[-1] == 1.0, "there is room for both"


def test_what_our_own_aggregators_use_is_not_other_work() -> None:
    """All eight cores are in use, by the aggregators themselves."""
    assert usable_after([0.0] * 60, own=2.0)[-1] == 1.0


def test_a_part_of_a_core_is_had_on_a_busy_machine_too() -> None:
    assert usable_after([8.0] * 60, share=0.1)[-1] == 1.0


def test_it_takes_back_what_the_other_work_leaves() -> None:
    found = usable_after([8.0] * 90 + [0.0] * 90)
    assert found[80] == 0.5
    assert found[-1] == 1.0


@given(st.lists(st.floats(0.0, 8.0), min_size=30, max_size=30))
def test_bursts_of_less_than_half_of_the_time_decide_nothing(heights: list[float]) -> None:
    """Bursts of any height come every third second, and later for half a minute less two seconds
    at once. Every second second would be a little over half of some windows of 61 samples."""
    quiet = [0.0 if second % 3 else height for second, height in enumerate(heights * 4)]
    once = [0.0] * 60 + heights[:28] + [0.0] * 60
    assert set(usable_after([0.0, 0.0, *quiet])) == {1.0}
    assert set(usable_after(once)) == {1.0}


@given(st.lists(st.floats(3.9, 4.6), min_size=200, max_size=200))
def test_what_sways_a_little_is_followed_at_most_once(others: list[float]) -> None:
    """From 8 / (3.9 + 8) to 8 / (4.6 + 8) is less than a step."""
    found = usable_after(others)
    assert fair_part(8, 3.9, 8) - fair_part(8, 4.6, 8) < STEP
    assert sum(old != new for old, new in pairwise(found)) == 1


@given(st.lists(st.floats(0.0, 8.0), min_size=60, max_size=240), st.floats(0.0, 2.0))
def test_it_is_a_part_and_never_less_than_the_fair_one(others: list[float], own: float) -> None:
    least = fair_part(CORES, max(others), 8.0)
    for usable in usable_after(others, own):
        assert least - 1e-9 <= usable <= 1.0


def test_a_busy_machines_aggregator_is_the_last_to_be_filled() -> None:
    """Two clusters' jobs on a shared aggregator each; one's machine gets other work."""
    harness = Harness(Pool(8), policy="edf")
    harness.place("one", [0.2, 0.2])
    harness.place("two", [0.45, 0.45])
    state = harness.core.state
    ids = sorted(id for id, entry in state.aggregators.items() if entry.ours)
    before = free_parts(state)
    for second in range(70):
        harness.now_s += 1.0
        for number, id in enumerate(harness.pool.all):
            known = state.aggregators[id].heartbeat
            assert known is not None
            harness.see(
                msgspec.structs.replace(
                    known, cpu_share=1.0, node=NodeId(f"n{number}"), host_cores=1, own_cpu=0.1,
                    host_cpu=1.0 if id == ids[0] else 0.1, at_s=float(second),
                )
            )  # fmt: skip
    usable = {each.id: each.usable for each in cluster_view(state, None).aggregators}
    assert usable[ids[0]] == pytest.approx(1.0 / 1.9)
    assert {usable[id] for id in ids[1:] if id in usable} <= {1.0}
    after = free_parts(state)
    assert AggregatorId(ids[0]) in before
    assert min(after, key=lambda id: after[id]) == ids[0]
