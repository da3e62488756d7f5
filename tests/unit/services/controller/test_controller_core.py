"""The controller's core, event by event: records before orders, feedback, what a restart finds."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from tests.unit.services.controller.harness import Crashed, Harness, Pool, last, placed

from slackwater.common.base.effects import (
    Answered,
    Publish,
    Recovered,
    Request,
    Requested,
)
from slackwater.common.domains.slots.tokens import process_token
from slackwater.schemas.base import (
    CONFLICT,
    AggregatorId,
    ClusterId,
    JobId,
    Message,
    Ok,
    Refused,
)
from slackwater.schemas.cluster import (
    AdoptAggregators,
    AggregatorRecord,
    AllocateAggregators,
    ClusterReport,
    WorkersAt,
)
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import Consistency, JobSpec
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    HostBuckets,
    ListBuckets,
    Located,
    LocateJob,
    MigrateInit,
    PlaceJob,
    ReleaseJob,
    SlotPlan,
    TensorCopyDone,
)
from slackwater.schemas.telemetry import WindowMeasured
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.controller import hosting
from slackwater.services.controller.core import Controller
from slackwater.services.controller.state import Job

# A job's life -----------------------------------------------------------------------------------


def test_a_job_is_stored_before_anything_is_asked_for_it() -> None:
    harness = Harness(Pool(4))
    harness.hold = (AllocateAggregators,)
    effects = harness.step(Requested(1, placed("j", 3)))
    assert [type(e).__name__ for e in effects] == ["Persist", "Reply", "Persist", "Request"]
    assert harness.stored["j"].phase == "waiting"
    assert len(harness.stored["j"].plan.token) == 32


def test_a_lone_job_adopts_its_temporary_aggregators_and_all_go_back_at_its_end() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01, 0.005])
    assert harness.homes("j") == ["a0", "a1", "a0"]
    assert harness.said("j") == ["located", "measured", "assigned", "steady"]
    assert last(harness.sent, AdoptAggregators).aggregators == ("a1",)
    located = harness.ask(LocateJob(job="j"))
    assert isinstance(located, Located)
    assert [e.aggregator for e in located.endpoints] == ["a0", "a1"]
    secret = harness.stored["j"].plan.token
    for rank, attempt in ((0, 0), (1, 0), (0, 1), (1, 100)):
        told = harness.ask(LocateJob(job="j", rank=rank, attempt=attempt))
        assert isinstance(told, Located)
        assert told.plan.token == process_token(secret, rank, attempt) != secret
    assert harness.ask(ReleaseJob(job="j")) == Ok()
    assert (harness.stored, harness.pool.records) == ({}, {})
    assert harness.ask(ReleaseJob(job="j")) == Ok()
    gone = harness.ask(LocateJob(job="j"))
    assert isinstance(gone, Refused)
    assert gone.retry_after_s == 0.0


def test_a_profile_says_how_much_of_its_own_servers_a_job_uses() -> None:
    harness = Harness(Pool(8))
    harness.place("a", [0.02, 0.02])
    measured = last([f for f in harness.facts if f.fact == "measured"], JobEvent)
    shares = harness.core.state.aggregators[AggregatorId("a0")].cpu_share * 2
    assert float(measured.detail["utilisation"]) == pytest.approx(0.04 / shares, rel=1e-3)


def test_the_same_order_twice_is_one_job_and_other_tensors_are_named() -> None:
    harness = Harness(Pool(4))
    assert harness.ask(placed("j", 2)) == Ok()
    before = dict(harness.stored)
    assert harness.ask(placed("j", 2)) == Ok()
    assert harness.stored == before
    other = harness.ask(placed("j", 3))
    assert isinstance(other, Refused)
    assert "3 tensors, but 2" in other.reason


@pytest.mark.parametrize("noise", [False, True])
def test_aggregators_are_told_to_sum_squares_of_gradients(noise: bool) -> None:
    harness = Harness(Pool(4))
    order = placed("j", 1)
    harness.ask(msgspec.structs.replace(order, spec=JobSpec(id="j", workers=2, noise=noise)))
    assert harness.stored["j"].plan.noise is noise


@pytest.mark.parametrize(
    ("consistency", "divide_bytes", "starts"),
    [
        ("synchronous", 4_194_304, [0, 1_048_576, 2_097_152]),
        ("synchronous", 0, [0]),
        ("asynchronous", 4_194_304, [0]),  # Its updates are copied out whole.
    ],
)
def test_large_tensors_are_divided_where_the_configuration_says_so(
    consistency: Consistency, divide_bytes: int, starts: list[int]
) -> None:
    harness = Harness(Pool(4), divide_bytes=divide_bytes)
    spec = JobSpec(id="j", servers=2, workers=2, consistency=consistency)
    assert harness.ask(PlaceJob(spec=spec, tensors=(TensorSpec(name="w", shape=(3_000, 1_000)),)))
    record = harness.stored["j"]
    assert [bucket.start for bucket in record.buckets] == starts
    assert sum(bucket.elements for bucket in record.buckets) == 3_000_000
    assert len(record.places) == len(starts)


def test_a_record_that_could_not_be_stored_at_its_fullest_is_refused_at_once() -> None:
    harness = Harness(Pool(4))
    refused = harness.ask(placed("j", 6000))
    assert isinstance(refused, Refused)
    assert "6000 tensors" in refused.reason
    assert harness.stored == {}


def test_sharing_that_saves_nothing_leaves_the_job_where_it_was_profiled() -> None:
    """Its tasks fit nowhere and would need as many new aggregators as it has."""
    harness = Harness(Pool(6))
    harness.place("full", [0.09, 0.09])
    harness.place("j", [0.06, 0.06])
    assert harness.homes("j") == ["a2", "a3"]
    assert not [m for m in harness.sent if isinstance(m, MigrateInit)]


# Refusals ---------------------------------------------------------------------------------------


def test_a_job_waits_for_its_servers_then_takes_fewer_then_shares_unprofiled() -> None:
    harness = Harness(Pool(2), unprofiled_after_s=10.0)
    harness.place("first", [0.02, 0.01])
    assert harness.ask(placed("second", 2)) == Ok()
    assert harness.stored["second"].phase == "waiting"
    assert "0 are free" in harness.stored["second"].reason
    waiting = harness.ask(LocateJob(job="second"))
    assert isinstance(waiting, Refused)
    assert waiting.retry_after_s > 0.0
    why = "waits for aggregators: 0 are free"
    assert waiting.reason == f"job second: {why}"
    assert harness.waiting() == {"second": why}
    harness.pass_time(12)
    assert last(harness.sent, AllocateAggregators).at_least == 1
    assert set(harness.homes("second")) <= {"a0", "a1"}
    assert harness.stored["second"].cause == "unprofiled"
    assert isinstance(harness.ask(LocateJob(job="second")), Located)
    assert harness.waiting() == {}


def test_an_aggregator_that_refuses_to_host_a_job_is_named_until_it_does() -> None:
    pool = Pool(2)
    full = Refused(reason="a1: no memory", retry_after_s=1.0)
    pool.lie = lambda request: full if ".a1.host" in request.subject else None
    harness = Harness(pool)
    assert harness.ask(placed("j", 2)) == Ok()
    why = "its aggregators (a0, a1) are being prepared; a1 refused: a1: no memory"
    assert harness.waiting() == {"j": why}
    waiting = harness.ask(LocateJob(job="j"))
    assert isinstance(waiting, Refused)
    assert waiting.reason == f"job j: {why}"
    pool.lie = lambda request: None
    harness.pass_time(1)
    assert harness.waiting() == {}


def test_what_can_never_be_had_is_not_waited_for() -> None:
    pool = Pool(2)
    never = Refused(reason="a cluster may have 1 (aggregators_max)")

    def lie(request: Request) -> Message | None:
        message = request.message
        over = isinstance(message, AllocateAggregators) and (message.at_least or message.count) > 1
        return never if over else None

    pool.lie, pool.room = lie, 1
    harness = Harness(pool)
    assert harness.ask(placed("j", 2)) == Ok()
    assert harness.homes("j") == ["a0", "a0"]


# Feedback ---------------------------------------------------------------------------------------


def sharing(**config: Any) -> Harness:
    """Two jobs on a0 and a1; `new` came later."""
    harness = Harness(Pool(8), **config)
    harness.place("old", [0.02, 0.02])
    harness.pass_time(5)
    harness.place("new", [0.03, 0.01])
    assert set(harness.homes("new")) <= {"a0", "a1"}
    harness.pass_time(60)
    return harness


def test_the_newest_assignment_is_undone_whoever_loses() -> None:
    harness = sharing()
    where = set(harness.homes("new"))
    victim_at = set(harness.homes("old")) & where
    harness.window("old", 1.2)
    reverted = last([f for f in harness.facts if f.fact == "reverted"], JobEvent)
    assert (reverted.job, reverted.detail["loser"]) == ("new", "old")
    assert reverted.detail["loss"] == "0.1667"
    record = harness.stored["new"]
    assert record.phase == "moving"
    assert set(record.excluded) == victim_at
    assert not {t.aggregator for t in record.target} & victim_at
    harness.migrated("new")
    assert harness.stored["new"].phase == "steady"


def test_a_tenant_s_limit_is_what_its_job_is_watched_by_and_its_tasks_run_by() -> None:
    """7.4 % is within the cluster's limit, and beyond that of the tenant."""
    for limit, undone in ((0.0, False), (0.05, True)):
        harness = Harness(Pool(8))
        harness.ask(msgspec.structs.replace(placed("old", 2), loss_limit=limit))
        harness.profile("old", [0.02, 0.02])
        harness.restart()  # The limit is in the record.
        harness.pass_time(5)
        harness.place("new", [0.03, 0.01])
        harness.pass_time(60)
        (plan,) = {
            each.slack
            for message in harness.sent
            if isinstance(message, SlotPlan)
            for each in message.jobs
            if each.job == "old"
        }
        assert plan == pytest.approx(limit / (1.0 - limit))
        harness.window("old", 1.08)
        assert ("reverted" in harness.said("new")) == undone


def test_a_worker_done_that_the_bus_lost_is_told_again_by_the_next_heartbeat() -> None:
    harness = Harness(Pool(4))
    harness.place("first", [0.02, 0.01])
    assert harness.ask(placed("j", 2)) == Ok()
    harness.profile("j", [0.02, 0.01])
    moving = harness.stored["j"]
    assert moving.phase == "moving"
    harness.migrated("j", worker_done=False)
    assert harness.stored["j"].phase == "moving"  # It would wait for worker_done_s.
    moved = [b for b, place in enumerate(moving.places) if place != moving.target[b]]
    for bucket in moved:
        target = moving.target[bucket]
        at = WorkersAt(job=JobId("j"), bucket=bucket, location_epoch=target.location_epoch)
        late = WorkersAt(job=JobId("j"), bucket=bucket, location_epoch=99)
        beyond = WorkersAt(job=JobId("j"), bucket=len(moving.target), location_epoch=99)
        # Repeated, another move's, and another plan's.
        harness.beat(target.aggregator, arrived=(at, at, late, beyond))
    assert harness.stored["j"].phase == "steady"
    assert harness.stored["j"].places == moving.target
    harness.beat("a0", arrived=(at,))
    assert harness.stored["j"].places == moving.target


def test_windows_from_before_the_last_change_or_of_another_placement_say_nothing() -> None:
    harness = sharing()
    harness.window("old", 1.0)
    harness.window("old", 1.11)  # A loss of 9.9 %.
    harness.window("old", 4.0, iterations=20)  # It began 80 s ago: before `new` came.
    epoch = sum(place.location_epoch for place in harness.stored["old"].places)
    harness.see(
        WindowMeasured(
            job=JobId("old"), location_epoch=epoch - 1, last_iteration=9, iterations=20,
            iteration_s=1.5,
        )
    )  # fmt: skip
    harness.window("old", 1.2, spanned_s=80.0)  # With the iterations that stood still.
    assert "reverted" not in harness.said("new")
    harness.window("old", 1.2, spanned_s=30.0)
    assert "reverted" in harness.said("new")


def test_a_lone_job_is_never_reverted() -> None:
    harness = Harness(Pool(8))
    harness.place("j", [0.02, 0.02])
    harness.pass_time(60)
    before = harness.stored["j"]
    harness.window("j", 2.0)
    assert harness.stored["j"] == before


def test_a_refused_revert_stays_with_the_reason_and_is_forgiven_when_all_is_well() -> None:
    harness = sharing()
    harness.pool.room = 2
    harness.window("old", 1.2)
    record = harness.stored["new"]
    if record.phase == "steady":
        assert "refused" in record.reason
        asks = [m for m in harness.sent if isinstance(m, AllocateAggregators)]
        harness.pass_time(30)
        again = [m for m in harness.sent if isinstance(m, AllocateAggregators)]
        assert len(again) > len(asks)
        assert len({m.request for m in again[len(asks) - 1 :]}) == 1  # One request, repeated.
        harness.window("new", 1.0)
        assert not set(harness.stored["new"].excluded) & set(harness.homes("new"))


def test_a_controller_that_begins_anew_goes_on_with_a_revert_that_was_refused() -> None:
    harness = sharing()
    record = harness.stored["new"]
    assert record.phase == "steady"
    excluded = record.places[0].aggregator
    harness.stored["new"] = msgspec.structs.replace(record, excluded=(excluded,))
    harness.restart()
    harness.pass_time(2)
    harness.migrated("new")
    assert excluded not in harness.homes("new")
    assert harness.stored["new"].cause == "reverted"


def test_a_job_is_reverted_a_bounded_number_of_times() -> None:
    harness = sharing(reverts_max=2)
    for _ in range(6):
        harness.pass_time(60)
        harness.window("old", 1.5)
        harness.window("new", 1.5)
        for id in ("old", "new"):
            harness.migrated(id)
    assert harness.said("new").count("reverted") <= 2
    assert harness.said("old").count("reverted") <= 2
    assert all(record.phase == "steady" for record in harness.stored.values())
    assert not set(harness.homes("old")) & set(harness.homes("new"))


def test_at_a_job_s_exit_the_least_loaded_aggregator_is_recycled_until_it_fails() -> None:
    harness = Harness(Pool(10))
    harness.place("a", [0.05, 0.02])
    harness.place("big", [0.09, 0.09])
    harness.place("b", [0.02, 0.005])
    assert len(harness.pool.records) == 4
    harness.ask(ReleaseJob(job="big"))
    harness.pass_time(2)
    for _ in range(3):
        for id in list(harness.stored):
            if harness.stored[id].cause == "recycled":
                harness.migrated(id)
        harness.pass_time(2)
    assert {home for id in harness.stored for home in harness.homes(id)} == {"a0"}
    assert set(harness.pool.records) == {"a0"}


def test_nothing_is_recycled_while_a_job_is_on_its_way_from_its_temporary_aggregators() -> None:
    harness = Harness(Pool(12))
    harness.place("a", [0.05, 0.02])
    harness.place("big", [0.09, 0.09])
    assert harness.ask(placed("b", 2)) == Ok()
    harness.profile("b", [0.01, 0.005])
    assert harness.stored["b"].phase == "moving"
    harness.ask(ReleaseJob(job="big"))
    harness.pass_time(3)
    assert harness.stored["a"].phase == "steady"
    assert harness.stored["b"].migration == "b-m1"
    harness.migrated("b")
    harness.pass_time(3)
    assert harness.stored["a"].cause == "recycled" or harness.stored["b"].cause == "recycled"


def test_a_job_on_its_way_counts_where_it_goes_for_the_next_one_that_is_decided() -> None:
    """Regression: two jobs profiled within a second each took the same free slots of a0, and only
    the windows showed it."""
    harness = Harness(Pool(12))
    harness.place("old", [0.02, 0.02])
    for id in ("b", "c"):
        assert harness.ask(placed(id, 2)) == Ok()
    harness.profile("b", [0.035, 0.035])
    assert harness.stored["b"].phase == "moving"
    harness.profile("c", [0.035, 0.035])
    used_s = dict.fromkeys(("a0", "a1"), 0.02)
    for id in ("b", "c"):
        record = harness.stored[id]
        for place in record.target or record.places:
            if place.aggregator in used_s:
                used_s[place.aggregator] += 0.035
    assert max(used_s.values()) <= 0.1, "a tenth of a core, an iteration of a second"


# Restarts and losses ----------------------------------------------------------------------------


def test_jobs_that_wait_stand_in_line_as_they_were_submitted_after_a_restart() -> None:
    harness = Harness(Pool(2))
    harness.place("all", [0.09, 0.09])
    for id in ("z", "a"):
        harness.now_s += 1.0
        assert harness.ask(placed(id, 2)) == Ok()
        assert harness.stored[id].phase == "waiting"
    harness.stored = dict(sorted(harness.stored.items()))
    harness.restart()
    assert list(harness.core.state.line) == ["z", "a"]


def test_an_answer_that_is_older_than_an_arrival_loses_nothing() -> None:
    """A bucket is gone where it was, so its new aggregator is asked; it arrives, and then the
    answer comes that says it has not."""
    harness = Harness(Pool(8))
    harness.place("old", [0.02, 0.02])
    assert harness.ask(placed("new", 2)) == Ok()
    harness.profile("new", [0.02, 0.02])
    record = harness.stored["new"]
    assert record.phase == "moving"
    source, target = record.places[0].aggregator, record.target[0].aggregator
    harness.pool.held[source].pop((JobId("new"), 0))
    harness.hold = (ListBuckets,)
    harness.restart()
    while harness.core.state.jobs[JobId("new")].missing_s.get(0) is None:
        asked, harness.held_back = harness.held_back, []
        assert asked
        for request in asked:
            harness.step(Answered(request.key, harness.pool.answer(request)))
        harness.pass_time(1)
    late = [r for r in harness.held_back if r.subject.split(".")[4] == target]
    answers = [(request.key, harness.pool.answer(request)) for request in late]
    assert answers
    harness.hold = ()
    harness.pool.held[target][JobId("new"), 0] = record.target[0].location_epoch
    harness.see(
        TensorCopyDone(
            migration=record.migration, job=JobId("new"), bucket=0, version=1, nbytes=1,
            location_epoch=record.target[0].location_epoch, source=source, target=target,
            copy_s=0.1,
        )
    )  # fmt: skip
    for key, answer in answers:
        harness.step(Answered(key, answer))
    assert "rehosted" not in harness.said("new")
    assert harness.stored["new"].target == record.target


@pytest.mark.parametrize(
    ("consistency", "active", "phase", "saved"),
    [
        ("synchronous", 0, "steady", True),
        ("synchronous", 2, "steady", False),
        ("synchronous", 2, "hosting", True),
        ("asynchronous", 0, "steady", True),
        ("asynchronous", 2, "steady", True),
    ],
)
def test_a_checkpoint_stands_in_for_a_memory_where_it_says_all(
    consistency: Consistency, active: int, phase: Any, saved: bool
) -> None:
    harness = Harness(Pool(2))
    harness.place("j", [0.02, 0.01])
    record = harness.stored["j"]
    plan = msgspec.structs.replace(record.plan, consistency=consistency, active=active)
    spec = msgspec.structs.replace(record.spec, save_to="/saved")
    job = Job(msgspec.structs.replace(record, spec=spec, plan=plan, phase=phase))
    assert hosting._saved(job) == ("/saved" if saved else "")


def test_a_controller_that_was_killed_in_a_migration_finds_out_what_arrived() -> None:
    """Bucket 0 arrived and nobody heard of it, bucket 1 never left: it is ordered again."""
    harness = Harness(Pool(8))
    harness.place("old", [0.02, 0.02])
    assert harness.ask(placed("new", 2)) == Ok()
    harness.profile("new", [0.02, 0.02])
    record = harness.stored["new"]
    assert record.phase == "moving"
    harness.pool.held[record.places[0].aggregator].pop((JobId("new"), 0))
    harness.pool.held[record.target[0].aggregator][JobId("new"), 0] = 2
    harness.sent.clear()
    harness.restart()
    harness.pass_time(20)
    orders = [m for m in harness.sent if isinstance(m, MigrateInit)]
    assert orders
    assert (1,) in {order.buckets for order in orders}
    assert {order.migration for order in orders} == {record.migration}
    harness.pool.held[record.places[1].aggregator].pop((JobId("new"), 1))
    harness.pool.held[record.target[1].aggregator][JobId("new"), 1] = 2
    harness.pass_time(30)
    assert harness.stored["new"].phase == "steady"
    assert harness.stored["new"].places == record.target
    assert "rehosted" not in harness.said("new")


def test_an_aggregator_that_returns_with_its_regions_is_told_again_and_nothing_is_lost() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    before = harness.stored["j"]
    harness.sent.clear()
    harness.pool.incarnations[AggregatorId("a0")] += 1
    harness.beat("a0")
    hosts = [m for m in harness.sent if isinstance(m, HostBuckets)]
    assert [(m.buckets[0].index, m.at_epochs) for m in hosts] == [(0, (1,))]
    assert harness.stored["j"] == before


def test_an_aggregator_that_returns_empty_hosts_anew_at_a_higher_epoch() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    harness.pass_time(1)
    harness.pool.incarnations[AggregatorId("a0")] += 1
    harness.pool.held[AggregatorId("a0")].clear()
    harness.beat("a0")
    record = harness.stored["j"]
    assert [p.location_epoch for p in record.places] == [2, 1]
    assert "rehosted" in harness.said("j")
    assert harness.pool.held[AggregatorId("a0")] == {(JobId("j"), 0): 2}


def test_what_stays_away_is_hosted_elsewhere_and_given_back_as_it_is() -> None:
    harness = Harness(Pool(4), rehost_after_s=15.0)
    harness.place("j", [0.02, 0.01])
    harness.pool.dead.add(AggregatorId("a0"))
    harness.pass_time(10, "a0")
    assert harness.homes("j") == ["a0", "a1"]
    harness.pass_time(10, "a0")
    assert harness.homes("j") == ["a2", "a1"]
    assert "rehosted" in harness.said("j")
    assert harness.pool.held[AggregatorId("a2")] == {(JobId("j"), 0): 2}
    assert set(harness.pool.records) == {"a1", "a2"}


def test_an_allocation_that_serves_nobody_is_found_and_given_back() -> None:
    """Granted to an instance that was killed before it heard of it."""
    harness = Harness(Pool(4))
    harness.pool.records[AggregatorId("a3")] = AggregatorRecord(
        id=AggregatorId("a3"), cluster=ClusterId("c0"), request="x-a1"
    )
    harness.pass_time(40)
    assert harness.pool.records == {}


def test_what_a_late_command_brought_back_is_dropped_even_if_it_was_told_to_move() -> None:
    """A repeated HostBuckets came after the bucket had left; MIGRATE_INIT was repeated as well."""
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    zombies = (
        BucketHeld(
            job=JobId("j"), bucket=1, layout_epoch=1, location_epoch=0, version=0, moving=True
        ),
        BucketHeld(
            job=JobId("gone"), bucket=0, layout_epoch=1, location_epoch=9, version=0, moving=True
        ),
    )

    def lie(request: Request) -> Message | None:
        if not isinstance(request.message, ListBuckets) or ".a0." not in request.subject:
            return None
        held = harness.pool.held[AggregatorId("a0")]
        mine = tuple(
            BucketHeld(job=j, bucket=b, layout_epoch=1, location_epoch=e, version=1)
            for (j, b), e in held.items()
        )
        return BucketsHeld(aggregator=AggregatorId("a0"), incarnation=1, held=mine + zombies)

    harness.pool.lie = lie
    harness.pass_time(17)
    drops = [message for message in harness.sent if isinstance(message, DropJob)]
    assert DropJob(job="j", buckets=(1,), up_to_epochs=(0,)) in drops
    assert DropJob(job="gone", buckets=(0,), up_to_epochs=(9,)) in drops


def test_the_report_counts_free_slots_of_shared_aggregators_only() -> None:
    harness = Harness(Pool(8))
    harness.place("j", [0.02, 0.01])
    assert harness.ask(placed("k", 2)) == Ok()  # On temporary ones.
    effects = harness.tick()
    messages = [effect.message for effect in effects if isinstance(effect, Publish)]
    (report,) = [message for message in messages if isinstance(message, ClusterReport)]
    assert report.jobs == ("j",)
    assert report.free_cpu == pytest.approx(0.08 + 0.09)
    assert report.aggregators == ("a0", "a1", "a2", "a3")


def _live(harness: Harness, jobs: dict[str, list[float]]) -> None:
    """One second in the life of a cluster whose jobs want to run: everybody asks again for what
    was not answered."""
    for id, costs_s in jobs.items():
        harness.ask(placed(id, len(costs_s)))
        if harness.stored[id].phase == "profiling" and harness.stored[id].profile is None:
            harness.profile(id, costs_s)
        harness.migrated(id)
    harness.pass_time(1)


def _until(harness: Harness, live: Callable[[], None], done: Callable[[], bool]) -> None:
    for _ in range(120):
        try:
            live()
        except Crashed:
            harness.restart()
        if done():
            return
    raise AssertionError((harness.stored, harness.pool.records))


@pytest.mark.parametrize("crash_at", range(1, 26))
def test_a_crash_between_storing_and_saying_loses_nothing_wherever_it_comes(crash_at: int) -> None:
    """A life of two jobs stores some twenty times: place, host, profile, share, release."""
    harness = Harness(Pool(8))
    harness.crash_at = crash_at
    jobs = {"a": [0.02, 0.01], "b": [0.01, 0.01]}
    steady = ("steady", "steady")

    def settled() -> bool:
        return tuple(r.phase for r in harness.stored.values()) == steady

    _until(harness, lambda: _live(harness, jobs), settled)
    harness.pass_time(40)
    held = {
        key: (id, epoch) for id, each in harness.pool.held.items() for key, epoch in each.items()
    }
    assert held == {
        (JobId(id), bucket): (place.aggregator, place.location_epoch)
        for id, record in harness.stored.items()
        for bucket, place in enumerate(record.places)
    }
    assert sum(map(len, harness.pool.held.values())) == len(held)  # Nothing is held twice.
    assert set(harness.pool.records) == set(harness.homes("a")) | set(harness.homes("b"))
    assert not any("rehosted" in harness.said(id) for id in harness.stored)

    def leave() -> None:
        for id in jobs:
            harness.ask(ReleaseJob(job=id))
        harness.pass_time(1)

    _until(harness, leave, lambda: not harness.stored and not harness.pool.records)
    assert not any(harness.pool.held.values())


def told(harness: Harness, aggregator: str) -> tuple[float, dict[str, float]]:
    """(cycle, job -> how often its tasks are expected) as the aggregator confirmed them last."""
    confirmed = harness.core.state.aggregators[AggregatorId(aggregator)].turns
    assert confirmed is not None
    return confirmed[1].cycle_s, {each.job: each.every_s for each in confirmed[1].jobs}


def test_every_aggregator_is_told_its_cycle_and_again_whenever_it_changes() -> None:
    harness = Harness(Pool(8))
    harness.place("long", [0.01, 0.01])
    harness.tick()
    assert [told(harness, a) for a in harness.homes("long")] == [(1.0, {"long": 1.0})] * 2
    harness.place("short", [0.001, 0.001], iteration_s=0.31)
    harness.tick()
    (home,) = set(harness.homes("short"))
    assert told(harness, home) == (1.0, {"long": 1.0, "short": pytest.approx(1 / 3)})
    before = sum(isinstance(message, SlotPlan) for message in harness.sent)
    harness.pass_time(5)
    assert sum(isinstance(message, SlotPlan) for message in harness.sent) == before
    harness.ask(ReleaseJob(job="long"))
    harness.tick()
    assert told(harness, home) == (0.31, {"short": 0.31})
    numbers = [message.number for message in harness.sent if isinstance(message, SlotPlan)]
    assert numbers == sorted(set(numbers))


def test_a_plan_of_turns_is_told_to_a_new_incarnation_and_until_it_is_confirmed() -> None:
    harness = Harness(Pool(8), policy="edf")
    harness.place("j", [0.01, 0.01])
    harness.tick()
    (home, _) = harness.homes("j")
    harness.sent.clear()
    harness.pool.incarnations[AggregatorId(home)] = 2

    def lie(request: Request) -> Message | None:
        busy = Refused(reason="busy", retry_after_s=1.0)
        return busy if isinstance(request.message, SlotPlan) else None

    harness.pool.lie = lie
    harness.pass_time(3)
    assert sum(isinstance(message, SlotPlan) for message in harness.sent) == 3
    harness.pool.lie = lambda request: None
    harness.pass_time(3)
    plans = [message for message in harness.sent if isinstance(message, SlotPlan)]
    assert len(plans) == 4
    assert (plans[-1].cycle_s, plans[-1].slack) == (0.0, pytest.approx(1 / 9)), "by deadline"
    assert told(harness, home) == (0.0, {"j": 1.0})


def test_plans_of_turns_pass_over_a_job_whose_aggregators_are_all_away() -> None:
    """Found by the whole-system simulation: nobody stretches such a job, and nobody reckoned it."""
    harness = Harness(Pool(8))
    harness.place("v1", [0.02, 0.01])
    away = set(harness.homes("v1"))
    harness.pass_time(8, *away)
    assert not any(harness.core.state.alive(AggregatorId(id)) for id in away)
    harness.place("v2", [0.02, 0.01])
    assert harness.homes("v2")
    assert away.isdisjoint(harness.homes("v2"))


def test_a_job_whose_record_is_damaged_is_neither_placed_anew_nor_dropped() -> None:
    """The buckets on its aggregators are all that is left of it."""
    harness, job = Harness(Pool(4)), "j"
    harness.place(job, [0.02, 0.01, 0.005])
    message = placed(job, 3)
    homes = {a: dict(held) for a, held in harness.pool.held.items() if held}
    assert homes
    harness.epoch += 1
    harness.core = Controller(harness.config, Random(7))
    harness.step(Recovered(harness.epoch, {}, {"placements_c0": frozenset({job})}))
    harness.beat()
    for _ in range(100):
        harness.tick()
        harness.beat()
    assert {a: held for a, held in harness.pool.held.items() if held} == homes
    for asked in (message, LocateJob(job=job), ReleaseJob(job=job)):
        answer = harness.ask(asked)
        assert isinstance(answer, Refused)
        assert f"the record of job {job} is damaged; restore key {job}" in answer.reason
        assert answer.retry_after_s > 0


def test_a_job_that_is_placed_again_with_another_spec_is_refused() -> None:
    harness = Harness(Pool(4))
    order = placed("a", 2)
    assert harness.ask(order) == harness.ask(order) == Ok()
    other = msgspec.structs.replace(order.spec, workers=3)
    refused = harness.ask(msgspec.structs.replace(order, spec=other))
    assert isinstance(refused, Refused)
    assert refused.code == CONFLICT
    assert "placed with another spec" in refused.reason


@pytest.mark.parametrize("ranks", [0, 4])
def test_only_jobs_with_virtual_ranks_are_hosted_as_such(ranks: int) -> None:
    harness = Harness(Pool(4))
    order = placed("a", 2)
    spec = msgspec.structs.replace(order.spec, virtual_ranks=ranks)
    assert harness.ask(msgspec.structs.replace(order, spec=spec)) == Ok()
    plan = last(harness.sent, HostBuckets).plan
    assert (plan.virtual, plan.workers) == (ranks > 0, ranks or 2)


def test_a_job_and_its_aggregators_are_as_new_once_all_of_it_is_hosted() -> None:
    """Windows of before say nothing about them."""
    harness = Harness(Pool(4))
    harness.pass_time(30)
    assert harness.ask(placed("j", 2)) == Ok()
    state = harness.core.state
    job = state.jobs[JobId("j")]
    assert job.located
    assert job.settled_s == harness.now_s
    assert {state.aggregators[home].changed_s for home in job.homes()} == {harness.now_s}


def test_a_late_answer_to_what_dropped_a_former_job_does_not_end_the_one_of_its_name() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    harness.hold = (DropJob,)
    assert harness.ask(ReleaseJob(job="j")) == Ok()
    late, other = harness.held_back
    harness.pool.dead |= {AggregatorId("a0"), AggregatorId("a1")}
    harness.pass_time(60, "a0", "a1")
    assert harness.stored == {}
    harness.hold = ()
    harness.place("j", [0.02, 0.01])
    for request in (late, other):
        harness.step(Answered(request.key, Ok()))
    harness.pass_time(2, "a0", "a1")
    assert harness.stored["j"].phase == "steady"
