"""Emptying an aggregator before its machine goes: order, deadline, what is left, restarts."""

from typing import Any

import pytest
from tests.unit.services.controller.harness import Harness, Pool, placed

from slackwater.schemas.base import AggregatorId, JobId, Ok, Refused
from slackwater.schemas.cluster import (
    AggregatorHeartbeat,
    AllocateAggregators,
    DeallocateAggregators,
    DrainAggregator,
    DrainProgress,
    RestoreAggregator,
)
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrateInit, PlaceJob, ReleaseJob
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.controller import drains
from slackwater.services.controller.policies.view import ClusterView, JobView, Plan


class Draining(Harness):
    def drain(self, id: str, within_s: float = 60.0, request: str = "r1") -> DrainProgress:
        order = DrainAggregator(request=request, aggregator=id, within_s=within_s)
        answer = self.ask(order)
        assert isinstance(answer, DrainProgress), answer
        return answer

    def said_of(self, id: str) -> list[str]:
        return [fact.fact for fact in self.told if fact.aggregator == id]

    def begin(self, id: str, costs_s: list[float], rule: str = "sgd", size: int = 262_144) -> None:
        tensors = tuple(TensorSpec(name=f"t{n}", shape=(size,)) for n in range(len(costs_s)))
        update = UpdateRule(name=rule)  # type: ignore[arg-type]  # one of the literals
        spec = JobSpec(id=id, servers=2, workers=2, update=update)
        assert self.ask(PlaceJob(spec=spec, tensors=tensors)) == Ok()
        self.profile(id, costs_s)
        self.migrated(id)


def two(room: int = 2) -> Draining:
    harness = Draining(Pool(4, room=room))
    harness.begin("j", [0.02, 0.01])
    assert harness.homes("j") == ["a0", "a1"]
    return harness


def test_an_aggregator_is_emptied_kept_from_everybody_and_given_back_once_it_is_gone() -> None:
    harness = two(room=4)
    progress = harness.drain("a0")
    (left,) = progress.left
    assert (left.job, left.buckets) == ("j", 1)
    assert left.reason == "more aggregators are being asked for"
    assert [each.reason for each in harness.drain("a0").left] == [""], "it is on its way"
    assert progress.left_bytes >= 4 * 262_144 * 4
    harness.migrated("j")
    assert harness.homes("j") == ["a2", "a1"]
    assert harness.stored["j"].cause == "drained"
    assert harness.said("j")[-1] == "steady"
    assert harness.said_of("a0") == ["draining", "drained"]
    harness.pass_time(60)
    assert "a0" in harness.pool.records, "the pool would lend it to somebody"
    harness.begin("k", [0.01, 0.01])
    assert "a0" not in harness.homes("k")
    harness.pool.dead.add(AggregatorId("a0"))
    harness.pass_time(40, "a0")
    assert "a0" not in harness.pool.records
    assert harness.drains == {}


def test_an_aggregator_that_nobody_uses_is_taken_before_it_is_given_back() -> None:
    harness = two(room=3)
    harness.drain("a0")
    harness.migrated("j")
    assert harness.homes("j") == ["a2", "a1"]
    assert harness.ask(RestoreAggregator(aggregator="a0")) == Ok()
    harness.sent.clear()
    harness.drain("a1", request="r2")
    harness.migrated("j")
    assert harness.homes("j") == ["a2", "a0"]
    assert not [each for each in harness.sent if isinstance(each, AllocateAggregators)]


def test_what_is_ordered_while_a_job_is_on_its_way_is_decided_once_it_has_arrived() -> None:
    harness = two(room=4)
    harness.drain("a0")
    on_its_way = harness.stored["j"]
    assert on_its_way.phase == "moving"
    harness.drain("a1", request="r2")
    harness.pass_time(5)
    assert harness.stored["j"].target == on_its_way.target
    assert harness.stored["j"].migration == on_its_way.migration
    harness.migrated("j")
    harness.pass_time(2)
    harness.migrated("j")
    assert set(harness.homes("j")) == {"a2", "a3"}


def test_without_a_spare_aggregator_the_others_take_what_is_there() -> None:
    harness = two()
    harness.drain("a0")
    harness.migrated("j")
    assert harness.homes("j") == ["a1", "a1"]


def test_the_same_order_twice_is_one_and_tells_how_far_it_is() -> None:
    harness = two()
    first = harness.drain("a0")
    moves = [message for message in harness.sent if isinstance(message, MigrateInit)]
    harness.now_s += 5.0
    again = harness.drain("a0")
    assert again.drain == first.drain
    assert [m for m in harness.sent if isinstance(m, MigrateInit)] == moves
    harness.migrated("j")
    harness.tick()
    assert harness.drain("a0").drain.state == "drained"
    assert harness.drain("a0").left == ()


def test_those_that_would_lose_optimiser_state_leave_first_and_the_smallest_of_them() -> None:
    harness = Draining(Pool(12))
    harness.hold = (MigrateInit,)
    for id, rule, size in (
        ("plain", "sgd", 262_144),
        ("large", "adam", 1_048_576),
        ("small", "adam", 262_144),
    ):
        harness.begin(id, [0.001, 0.001], rule, size)
    (home,) = {a for id in ("plain", "large", "small") for a in harness.homes(id)} & {
        harness.homes("plain")[0]
    }
    order = [job.id for job in drains.jobs_on(harness.core.state, AggregatorId(home))]
    assert order == [id for id in ("small", "large", "plain") if id in order]
    assert len(order) >= 2


def test_only_a_few_jobs_are_on_their_way_at_a_time() -> None:
    """The next one goes as soon as one has gone, without a look at the clock."""
    harness = Draining(Pool(20))
    for number in range(7):
        harness.begin(f"j{number}", [0.001, 0.001])
    home = harness.homes("j6")[0]
    there = [f"j{n}" for n in range(7) if home in harness.homes(f"j{n}")]
    assert len(there) > drains.JOBS_AT_ONCE
    harness.drain(home)
    moving = [id for id in there if harness.stored[id].target]
    assert len(moving) == drains.JOBS_AT_ONCE
    harness.migrated(moving[0])
    assert len([id for id in there if harness.stored[id].target]) == drains.JOBS_AT_ONCE


def test_what_has_not_left_by_the_deadline_is_said_with_what_then_happens() -> None:
    """The old aggregator does not move: its workers are stopped, say."""
    harness = two()
    harness.drain("a0", within_s=20.0)
    harness.pass_time(25)
    assert harness.said_of("a0") == ["draining", "late"]
    late = harness.told[-1]
    assert late.detail["jobs"] == "j"
    assert late.detail["buckets"] == "1"
    assert "from what its workers" in late.detail["then"]
    harness.migrated("j")
    harness.tick()
    assert harness.said_of("a0") == ["draining", "late", "drained"]


def test_what_is_left_on_a_machine_that_goes_too_early_begins_anew_elsewhere() -> None:
    harness = two(room=4)
    harness.drain("a0", within_s=20.0)
    harness.pool.dead.add(AggregatorId("a0"))
    harness.pass_time(40, "a0")
    assert harness.said_of("a0") == ["draining", "vanished"]
    assert harness.told[-1].detail["jobs"] == "j"
    assert "a0" not in harness.homes("j"), "it begins anew there, which its aggregator tells"
    assert harness.stored["j"].phase in ("hosting", "steady", "profiling")


def test_a_restarted_controller_goes_on_with_the_order() -> None:
    harness = two(room=4)
    harness.hold = (MigrateInit,)
    before = harness.drain("a0")
    harness.hold = ()
    harness.restart()
    again = harness.drain("a0")
    assert again.drain.deadline_s == before.drain.deadline_s
    harness.pass_time(20)
    harness.migrated("j")
    harness.tick()
    assert harness.said_of("a0") == ["draining", "drained"]
    assert "a0" not in harness.homes("j")


def test_an_order_that_is_taken_back_leaves_the_aggregator_to_everybody() -> None:
    harness = Draining(Pool(2, room=2))
    harness.begin("j", [0.09, 0.09])
    harness.drain("a0")
    harness.migrated("j")
    assert harness.ask(RestoreAggregator(aggregator="a0")) == Ok()
    assert harness.ask(RestoreAggregator(aggregator="a0")) == Ok(changed=False)
    harness.pass_time(40)
    assert harness.drains == {}
    assert harness.said_of("a0")[-1] == "restored"
    assert "a0" not in harness.pool.records, "nobody needs it: it goes back to the pool"


def test_a_job_that_is_being_profiled_there_leaves_when_half_of_the_time_is_over() -> None:
    harness = Draining(Pool(4))
    assert harness.ask(placed("j", 2)) == Ok()
    assert harness.stored["j"].phase == "profiling"
    progress = harness.drain("a0", within_s=60.0)
    assert [each.reason for each in progress.left] == ["is profiling"]
    harness.pass_time(25)
    assert not harness.stored["j"].target
    harness.pass_time(8)
    harness.migrated("j")
    assert "a0" not in harness.homes("j")
    harness.profile(JobId("j"), [0.01, 0.01])
    assert harness.stored["j"].profile is not None


def test_one_that_is_being_given_back_is_not_promised_to_be_kept_empty() -> None:
    harness = two()
    harness.hold = (DeallocateAggregators,)
    assert harness.ask(ReleaseJob(job=JobId("j"))) == Ok()
    harness.pass_time(5)
    answer = harness.ask(DrainAggregator(request="r1", aggregator="a0", within_s=10.0))
    assert isinstance(answer, Refused)
    assert "is empty and about to serve no cluster" in answer.reason
    assert harness.drains == {}


def test_an_aggregator_of_another_cluster_is_refused_with_the_reason() -> None:
    harness = two()
    answer = harness.ask(DrainAggregator(request="r1", aggregator="a3", within_s=10.0))
    assert isinstance(answer, Refused)
    assert answer.reason == "aggregator a3 does not serve cluster c0: nothing of it is there"


def test_what_neither_end_of_a_move_has_begins_anew() -> None:
    """The old aggregator lost it on the way, and the new one never had it."""
    harness = two(room=4)
    harness.hold = (MigrateInit,)
    harness.drain("a0")
    assert [place.aggregator for place in harness.stored["j"].target] == ["a2", "a1"]
    del harness.pool.held[AggregatorId("a0")][JobId("j"), 0]
    harness.pass_time(40)
    assert harness.homes("j") == ["a2", "a1"]
    assert "rehosted" in harness.said("j")
    assert harness.pool.held[AggregatorId("a2")][JobId("j"), 0] > 1


def test_a_policy_that_has_no_place_for_what_leaves_is_asked_for_one_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks for no other aggregator either, so that no refusal leads there."""
    harness = two()
    policy = harness.core.state.policy_named("cyclic")
    assign, forced = policy.assign, list[bool]()

    def only_by_force(view: ClusterView, job: JobView, memory: Any) -> tuple[Plan, Any]:
        forced.append(view.forced)
        if not view.forced:
            return Plan(reason="no aggregator has the time"), memory
        return assign(view, job, memory)

    monkeypatch.setattr(policy, "assign", only_by_force)
    harness.drain("a0")
    harness.migrated("j")
    assert forced[:2] == [False, True]
    assert harness.homes("j") == ["a1", "a1"]


def test_an_order_says_for_how_long_its_bytes_travel_at_the_rate_that_the_aggregator_has() -> None:
    harness = two(room=4)
    harness.hold = (MigrateInit,)
    assert harness.drain("a0").needed_s == 0.0, "it has not said its rate"
    harness.see(
        AggregatorHeartbeat(
            service="aggregator", id=AggregatorId("a0"), incarnation=1, at_s=harness.now_s,
            node="n", cpu_share=0.1, addresses=(("shm", "a0"),), buckets=1, jobs=1, held_bytes=0,
            busy_s=0.0, bytes_in=0, bytes_out=0, migration_bytes_s=1_000_000,
        )
    )  # fmt: skip
    progress = harness.drain("a0")
    assert progress.needed_s == progress.left_bytes / 1_000_000 > 4.0
