"""Approval of (de)allocations: bounded, granted once a request, events for whoever watches."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.effects import Effect, Persist, Publish, Request
from slackwater.common.base.limits import LOST_AFTER_S
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, NodeId, Ok, Refused
from slackwater.schemas.cluster import (
    AdoptAggregators,
    AggregatorHeartbeat,
    AggregatorRecord,
    AggregatorsAllocated,
    AllocateAggregators,
    AllocationEvent,
    DeallocateAggregators,
)
from slackwater.schemas.placement import BucketHeld, BucketsHeld, DropJob, ListBuckets
from slackwater.services.master.clusters import ClusterRoom, best_fit
from slackwater.services.master.pool import Pool

C0 = ClusterId("c0")


def heartbeat(id: str, incarnation: int = 1, buckets: int = 0) -> AggregatorHeartbeat:
    return AggregatorHeartbeat(
        service="aggregator", id=id, incarnation=incarnation, at_s=0.0, node=NodeId("n"),
        cpu_share=0.1, addresses=(), buckets=buckets, jobs=0, held_bytes=0, busy_s=0.0,
        bytes_in=0, bytes_out=0,
    )  # fmt: skip


def pool(count: int, aggregators_max: int = 16) -> Pool:
    made = Pool(aggregators_max)
    for index in range(count):
        made.heard(heartbeat(f"a{index}"), 0.0)
    return made


def test_a_refusal_counts_what_is_there_and_names_what_helps() -> None:
    ask = AllocateAggregators(request="r", cluster=C0, count=3)
    _, short = pool(2).allocate(ask, 1.0)
    assert isinstance(short, Refused)
    assert short.reason == (
        "3 aggregators asked for: 2 free in the pool, cluster c0 may have 16 more; that changes "
        "when a job ends or `slackwater run aggregator` adds one"
    )
    full = pool(4, aggregators_max=3)
    full.allocate(AllocateAggregators(request="first", cluster=C0, count=1), 1.0)
    _, narrow = full.allocate(ask, 1.0)
    assert isinstance(narrow, Refused)
    assert narrow.reason == (
        "3 aggregators asked for: 3 free in the pool, cluster c0 may have 2 more; that changes "
        "when a job ends or the master's aggregators_max is raised"
    )


def test_a_pool_too_small_to_profile_two_jobs_says_at_once_that_waiting_does_not_help() -> None:
    """With one aggregator in all, what the machine of two cores gets, a second job could be
    profiled alone only after the first has ended: it shares at once. While the first is being
    profiled it waits, for that is soon over; so it does where there is room for two."""

    def refused(count: int, needed: int) -> float:
        made = pool(count)
        first = AllocateAggregators(request="r1", cluster=C0, count=count, temporary_for="first")
        given = given_to(made, first)
        second = AllocateAggregators(request="r2", cluster=C0, count=needed, temporary_for="second")
        _, early = made.allocate(second, 1.0)
        assert isinstance(early, Refused)
        assert early.retry_after_s > 0
        made.adopt(AdoptAggregators(cluster=C0, aggregators=given), 2.0)
        _, late = made.allocate(second, 3.0)
        assert isinstance(late, Refused)
        return late.retry_after_s

    assert refused(1, 1) == refused(2, 2) == refused(3, 2) == 0.0
    assert refused(4, 2) > 0.0
    assert refused(2, 1) > 0.0


def facts(effects: list[Effect]) -> list[str]:
    messages = [effect.message for effect in effects if isinstance(effect, Publish)]
    return [f"{m.aggregator} {m.fact}" for m in messages if isinstance(m, AllocationEvent)]


def ask(
    request: str, count: int, at_least: int = 0, cluster: ClusterId = C0
) -> AllocateAggregators:
    return AllocateAggregators(request=request, cluster=cluster, count=count, at_least=at_least)


def given_to(pool: Pool, request: AllocateAggregators) -> tuple[AggregatorId, ...]:
    _, answer = pool.allocate(request, 0.0)
    assert isinstance(answer, AggregatorsAllocated), answer
    return answer.aggregators


def test_a_request_is_granted_once_even_by_the_next_master() -> None:
    first = pool(4)
    effects, answer = first.allocate(ask("r1", 2), 0.0)
    assert facts(effects) == ["a0 allocated", "a1 allocated"]
    assert first.allocate(ask("r1", 2), 1.0) == ([], answer)
    stored = {e.key: e.record for e in effects if isinstance(e, Persist)}
    second = Pool(16)
    second.recover({k: r for k, r in stored.items() if isinstance(r, AggregatorRecord)}, 2)
    assert second.allocate(ask("r1", 2), 2.0) == ([], answer)


def test_a_late_deallocation_does_not_end_a_newer_allocation() -> None:
    made = pool(1)
    given_to(made, ask("r1", 1))
    ended = DeallocateAggregators(cluster=C0, aggregators=(AggregatorId("a0"),), requests=("r1",))
    assert facts(made.deallocate(ended, 0.0)[0]) == ["a0 released"]
    given_to(made, ask("r2", 1))
    assert made.deallocate(ended, 0.0) == ([], Ok())
    assert made.in_use == 1


def test_a_cluster_has_a_maximum_and_a_refusal_says_whether_asking_again_helps() -> None:
    made = pool(4, aggregators_max=2)
    _, never = made.allocate(ask("r1", 3), 0.0)
    assert isinstance(never, Refused)
    assert never.retry_after_s == 0.0
    assert "aggregators_max" in never.reason
    assert len(given_to(made, ask("r2", 3, at_least=1))) == 2
    _, later = made.allocate(ask("r3", 1), 0.0)
    assert isinstance(later, Refused)
    assert later.retry_after_s > 0.0
    assert len(given_to(made, ask("r4", 2, cluster=ClusterId("c1")))) == 2


def test_lost_aggregators_are_not_given_and_their_owner_hears_of_loss_and_return() -> None:
    made = pool(2)
    given_to(made, ask("r1", 1))
    assert facts(made.tick(LOST_AFTER_S + 1)) == ["a0 lost"]
    _, refused = made.allocate(ask("r2", 1), 7.0)
    assert isinstance(refused, Refused)
    assert facts(made.heard(heartbeat("a0", incarnation=2), 8.0)) == ["a0 returned"]
    assert facts(made.heard(heartbeat("a0", incarnation=1), 9.0)) == []  # A late one.
    assert facts(made.heard(heartbeat("a0", incarnation=3), 9.0)) == ["a0 returned"]


def test_a_free_aggregator_with_leftovers_is_emptied_before_it_is_given() -> None:
    made = pool(2)
    effects = made.heard(heartbeat("a0", buckets=2), 0.0)
    assert [e.message for e in effects if isinstance(e, Request)] == [ListBuckets()]
    assert made.heard(heartbeat("a0", buckets=2), 0.0) == []  # It was asked already.
    left = BucketHeld(job=JobId("j"), bucket=3, layout_epoch=1, location_epoch=7, version=9)
    answer = BucketsHeld(aggregator=AggregatorId("a0"), incarnation=1, held=(left,))
    drops = made.held(AggregatorId("a0"), answer)
    assert [e.message for e in drops if isinstance(e, Request)] == [
        DropJob(job="j", buckets=(3,), up_to_epochs=(7,))
    ]
    assert given_to(made, ask("r1", 2, at_least=1)) == ("a1",)
    made.heard(heartbeat("a0", buckets=0), 1.0)
    assert given_to(made, ask("r2", 1)) == ("a0",)


def test_an_adopted_aggregator_is_temporary_no_longer() -> None:
    made = pool(1)
    request = AllocateAggregators(request="r", cluster=C0, count=1, temporary_for="j")
    given_to(made, request)
    assert made.listing().aggregators[0].record.temporary_for == JobId("j")
    adopt = AdoptAggregators(cluster=C0, aggregators=(AggregatorId("a0"),))
    assert facts(made.adopt(adopt, 0.0)[0]) == ["a0 adopted"]
    assert made.adopt(adopt, 0.0) == ([], Ok())
    assert made.listing().aggregators[0].record.temporary_for is None


def test_best_fit_is_sufficient_but_least_and_the_most_where_none_suffices() -> None:
    rooms = [ClusterRoom(ClusterId(c), f) for c, f in (("c2", 4.0), ("c1", 2.0), ("c0", 1.0))]
    assert best_fit(rooms, 1.5) == "c1"
    assert best_fit(rooms, 4.0) == "c2"
    assert best_fit(rooms, 9.0) == "c2"
    assert best_fit([ClusterRoom(ClusterId(c), 1.0) for c in ("c9", "c3")], 1.0) == "c3"
    assert best_fit([], 1.0) is None


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "deallocate", "repeat"]),
            st.integers(1, 3),
            st.sampled_from(["c0", "c1"]),
        ),
        max_size=30,
    )
)
def test_no_aggregator_is_ever_in_two_clusters_or_over_a_maximum(
    moves: list[tuple[str, int, str]],
) -> None:
    made = pool(5, aggregators_max=3)
    held: dict[str, dict[str, str]] = {"c0": {}, "c1": {}}
    past: list[DeallocateAggregators] = []
    for number, (what, count, cluster) in enumerate(moves):
        if what == "allocate":
            _, answer = made.allocate(ask(f"r{number}", count, 1, ClusterId(cluster)), 0.0)
            if isinstance(answer, AggregatorsAllocated):
                held[cluster] |= dict.fromkeys(answer.aggregators, f"r{number}")
        elif what == "deallocate" and held[cluster]:
            id = sorted(held[cluster])[0]
            request = held[cluster].pop(id)
            past.append(
                DeallocateAggregators(
                    cluster=ClusterId(cluster),
                    aggregators=(AggregatorId(id),),
                    requests=(request,),
                )
            )
            made.deallocate(past[-1], 0.0)
        elif past:
            made.deallocate(past[count % len(past)], 0.0)
        records = {i.record.id: i.record.cluster for i in made.listing().aggregators}
        expected = {id: cluster for cluster, ids in held.items() for id in ids}
        assert {id: c for id, c in records.items() if c is not None} == expected
        assert all(len(ids) <= 3 for ids in held.values())


def test_members_are_counted_by_state() -> None:
    made = pool(4)
    assert made.counts() == {"free": 4, "used": 0, "dead": 0}
    made.allocate(AllocateAggregators(request="r", cluster=C0, count=1), 1.0)
    for index in range(3):
        made.heard(heartbeat(f"a{index}"), LOST_AFTER_S)
    made.tick(LOST_AFTER_S + 1.0)
    assert made.counts() == {"free": 2, "used": 1, "dead": 1}
