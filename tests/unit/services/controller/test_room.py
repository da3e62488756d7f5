"""Memory of aggregators: a job that can never fit is refused, one that fits later waits and says
why, and nobody is sent to an aggregator that is full."""

import msgspec
from tests.unit.services.controller.harness import Harness, Pool, last, placed

from slackwater.schemas.base import AggregatorId, Message, Ok, Refused
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import HostBuckets, PlaceJob, ReleaseJob
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.controller import room

MIB = 1024 * 1024
REGION = 4 * MIB + 5 * 4096
"""The region of a tensor of 1 MiB with two workers: two slots, two buffers, the header, the
record."""


def wide(id: str, elements: list[int], workers: int = 2, servers: int = 2) -> PlaceJob:
    tensors = tuple(TensorSpec(name=f"t{n}", shape=(size,)) for n, size in enumerate(elements))
    return PlaceJob(spec=JobSpec(id=id, servers=servers, workers=workers), tensors=tensors)


def refusal(answer: Message) -> str:
    assert isinstance(answer, Refused), answer
    assert answer.retry_after_s == 0.0, "asking again would not help"
    return answer.reason


def test_a_job_that_can_never_fit_is_refused_with_numbers_at_registration() -> None:
    """64 workers' slots for a network that two workers could train here: nothing is stored, nothing
    is hosted, and the reason has what is needed, what is free, of how much, and a remedy."""
    harness = Harness(Pool(3, memory_bytes=64 * MIB))
    reason = refusal(harness.ask(wide("s4", [262_144] * 3, workers=64, servers=64)))
    assert "job s4 needs 207.7 MB on its 3 aggregators" in reason
    assert "201.3 MB are free of 201.3 MB" in reason
    assert "fewer workers" in reason
    assert "memory_bytes_max" in reason
    assert harness.stored == {}
    assert not [m for m in harness.sent if isinstance(m, HostBuckets)]
    assert harness.ask(wide("s5", [262_144] * 3, servers=64)) == Ok()


def test_what_a_cluster_may_have_of_the_pool_counts() -> None:
    """A pool of three, of which the cluster may have two: it would wait for ever."""
    harness = Harness(Pool(3, memory_bytes=64 * MIB))
    order = wide("j", [262_144] * 5, workers=32, servers=3)
    assert "178.4 MB on its 2 aggregators" in refusal(
        harness.ask(msgspec.structs.replace(order, aggregators_max=2))
    )
    assert harness.ask(msgspec.structs.replace(order, aggregators_max=3)) == Ok()


def test_a_tensor_too_large_for_any_aggregator_is_named() -> None:
    harness = Harness(Pool(10, memory_bytes=16 * MIB))
    reason = refusal(harness.ask(wide("j", [262_144, 4 * 262_144 + 1], servers=10)))
    assert "for tensor t1 on one aggregator, and the largest may hold 16.8 MB" in reason


def test_states_of_the_optimiser_count() -> None:
    """Adam keeps two: six buffers instead of two."""
    harness = Harness(Pool(1, memory_bytes=2 * REGION))
    spec = JobSpec(id="j", workers=2, update=UpdateRule(name="adam"))
    tensors = tuple(TensorSpec(name=f"t{n}", shape=(262_144,)) for n in range(2))
    assert "needs 16.8 MB" in refusal(harness.ask(PlaceJob(spec=spec, tensors=tensors)))
    assert harness.ask(PlaceJob(spec=JobSpec(id="k", workers=2), tensors=tensors)) == Ok()


def test_sizes_are_those_that_aggregators_make() -> None:
    harness = Harness(Pool(2))
    harness.ask(placed("j", 2))
    assert room.region_sizes(harness.stored["j"]) == (REGION, REGION)


def test_unknown_memory_refuses_nobody() -> None:
    harness = Harness(Pool(2, memory_bytes=0))
    assert harness.ask(wide("j", [2**28], workers=64)) == Ok()


def test_a_job_that_fits_later_waits_with_that_reason_and_then_starts() -> None:
    """Two aggregators in all, both held by the first job: the second is told what is missing, and
    is hosted once the first is gone."""
    harness = Harness(Pool(2, room=2, memory_bytes=REGION + MIB), unprofiled_after_s=1.0)
    harness.place("one", [0.1, 0.1])
    assert harness.ask(placed("two", 2)) == Ok()
    harness.pass_time(5)
    assert harness.stored["two"].phase == "waiting"
    why = harness.waiting()["two"]
    assert "are needed on a0, 1.0 MB are free of 5.3 MB (memory_bytes_max)" in why
    hosts = [m for m in harness.sent if isinstance(m, HostBuckets) and m.plan.job == "two"]
    assert hosts == []
    harness.ask(ReleaseJob(job="one"))
    harness.pass_time(10)
    assert harness.stored["two"].phase != "waiting"
    assert last(harness.sent, HostBuckets).plan.job == "two"


def test_the_first_placement_deals_by_bytes_where_round_robin_does_not_fit() -> None:
    """1 and 3 MiB tensors in turns would put all large ones on one aggregator."""
    sizes = [3 * 262_144, 262_144] * 2
    harness = Harness(Pool(2, memory_bytes=17 * MIB))
    assert harness.ask(wide("j", sizes)) == Ok()
    homes = harness.homes("j")
    assert sorted(homes[::2]) == ["a0", "a1"]
    assert sorted(homes[1::2]) == ["a0", "a1"]


def test_an_assignment_leaves_out_an_aggregator_that_is_full() -> None:
    """CPU time would let the second job share with the first; memory does not. Where it goes
    instead, there is room."""
    share = Harness(Pool(4, memory_bytes=64 * MIB))
    share.place("one", [0.01, 0.01])
    share.place("two", [0.001, 0.001])
    assert set(share.homes("two")) & set(share.homes("one")), "it would share"
    harness = Harness(Pool(4, memory_bytes=REGION + MIB))
    harness.place("one", [0.01, 0.01])
    harness.place("two", [0.001, 0.001])
    harness.pass_time(3)
    assert not set(harness.homes("two")) & set(harness.homes("one"))
    for aggregator in harness.pool.all:
        assert len(harness.pool.held[aggregator]) <= 1


def one_machine(aggregators: int, nbytes: int) -> Harness:
    """Each of its aggregators may hold all of what they may hold together."""
    pool = Pool(aggregators, memory_bytes=nbytes)
    pool.node_memory_bytes = nbytes
    return Harness(pool)


def test_aggregators_of_one_node_do_not_promise_its_memory_twice() -> None:
    """Ten of them, each of which could hold it all: together they hold it once."""
    harness = one_machine(10, 3 * REGION)
    reason = refusal(harness.ask(wide("j", [262_144] * 4, servers=4)))
    assert "needs 16.9 MB on its 4 aggregators, 12.6 MB are free of 12.6 MB" in reason
    assert harness.ask(placed("one", 2)) == Ok()
    assert harness.stored["one"].phase != "waiting"
    assert harness.ask(placed("two", 2)) == Ok()
    assert harness.stored["two"].phase == "waiting"
    assert "are free of 12.6 MB" in harness.waiting()["two"]
    harness.ask(ReleaseJob(job="one"))
    harness.pass_time(5)
    assert harness.stored["two"].phase != "waiting"


def test_one_aggregator_of_a_node_may_hold_all_of_its_memory() -> None:
    """Sharing few aggregators is the point: what the others do not hold is not lost."""
    harness = one_machine(10, 5 * REGION)
    harness.place("one", [0.01, 0.01])
    harness.place("two", [0.001, 0.001])
    assert set(harness.homes("two")) & set(harness.homes("one"))


def test_what_another_cluster_holds_on_the_node_counts() -> None:
    harness = one_machine(4, 4 * REGION)
    harness.pool.all = harness.pool.all[1:]  # a0 is another cluster's, and says what it holds.
    theirs = harness.core.state.aggregators[AggregatorId("a0")]
    assert theirs.heartbeat is not None
    theirs.heartbeat = msgspec.structs.replace(theirs.heartbeat, held_bytes=3 * REGION)
    harness.ask(placed("j", 2))
    assert harness.stored["j"].phase == "waiting"
