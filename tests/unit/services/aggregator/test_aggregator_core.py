"""Commands to an aggregator: idempotent by location epoch, bounded, never half done."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from slackwater.common.base import limits
from slackwater.common.base.effects import (
    Action,
    Draining,
    Effect,
    Publish,
    Recovered,
    Reply,
    Requested,
)
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Message, Ok, Refused
from slackwater.schemas.cluster import WorkersAt
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    Endpoint,
    HostBuckets,
    JobPlan,
    ListBuckets,
    MigrateInit,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.service import Drain
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.aggregator.bucket import Bucket, Move, SeededStates
from slackwater.services.aggregator.core import AggregatorCore, LockedBucket
from slackwater.services.aggregator.effects import (
    DropBuckets,
    KeepBucket,
    MakeRegions,
    MoveBucket,
    SetDeadlines,
)
from slackwater.services.aggregator.events import (
    BucketCopied,
    BucketSeeded,
    RegionsDropped,
    RegionsMade,
    WorkersArrived,
)

JOB = JobId("j1")
TENSORS = tuple(TensorSpec(name=f"t{n}", shape=(400_000,)) for n in range(3))
BUCKETS = plan_buckets(TENSORS)
MEMORY = 50_000_000


def plan(layout_epoch: int = 0, update: UpdateRule | None = None) -> JobPlan:
    return JobPlan(
        job=JOB,
        workers=2,
        gradient_dtype="float32",
        update=update or UpdateRule(),
        layout_epoch=layout_epoch,
        token="",
    )


def host(
    *indices: int, epoch: int = 0, layout_epoch: int = 0, job: JobPlan | None = None
) -> HostBuckets:
    return HostBuckets(
        cluster=ClusterId("c1"),
        plan=job or plan(layout_epoch),
        buckets=tuple(BUCKETS[i] for i in indices),
        at_epochs=(epoch,) * len(indices),
        tensors=TENSORS,
    )


def to(id: str) -> Endpoint:
    return Endpoint(aggregator=AggregatorId(id), addresses=(("shm", f"/{id}"),))


def migrate(*indices: int, epoch: int = 1, target: str = "a2", name: str = "m1") -> MigrateInit:
    return MigrateInit(
        cluster=ClusterId("c1"),
        migration=name,
        job=JOB,
        buckets=indices,
        epochs=(epoch,) * len(indices),
        to=to(target),
    )


A = TypeVar("A", bound=Action)


class Driver:
    """Sends commands, and carries out `make`, `keep`, `move` and `drop` as the data plane would."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.core = AggregatorCore("a1", memory)
        self.core.step(Recovered(7, {}), 0.0)
        self.now_s = 100.0
        self.done: list[Action] = []
        self.published: list[Any] = []
        self._token = 0

    def ask(self, message: Message) -> Message | None:
        """The answer, or None while it is not there yet."""
        self._token += 1
        return self.run(self.core.step(Requested(self._token, message), self.now_s), self._token)

    def run(self, effects: Any, token: int = -1) -> Message | None:
        answer: Message | None = None
        for effect in list(effects):
            answer = self._one(effect, token) or answer
        self.core.check_invariants()
        return answer

    def _one(self, effect: Effect, token: int) -> Message | None:
        match effect:
            case Reply(token=to_token, message=message):
                return message if to_token == token else None
            case Publish(message=message):
                self.published.append(message)
            case DropBuckets(keys=keys, token=given):
                self.done.append(effect)
                for key in keys:
                    self.core.remove(key)
                event = RegionsDropped(given)
                return self.run(self.core.step(event, self.now_s), token)
            case MoveBucket(key=key, move=move):
                self.done.append(effect)
                self.core.buckets[key].move = move
            case KeepBucket(key=key, location_epoch=location_epoch):
                self.done.append(effect)
                self.core.buckets[key].thaw(location_epoch)
            case Action():
                self.done.append(effect)
        return None

    def made(self, token: int, failure: str = "") -> Message | None:
        order = next(d for d in self.actions(MakeRegions) if d.token == token)
        message = order.message
        if not failure:
            for position in order.new:
                layout, epoch = message.buckets[position], message.at_epochs[position]
                nbytes = SlotRegion.nbytes_of(message.plan, layout, (TENSORS[layout.index],))
                handle = self.core.next_handle()
                self.core.add(Bucket(message.plan, layout, handle, nbytes, epoch, initialized=True))
        return self.run(self.core.step(RegionsMade(JOB, token, failure), self.now_s), token)

    def host(self, *indices: int, epoch: int = 0) -> None:
        assert self.ask(host(*indices, epoch=epoch)) is None
        assert isinstance(self.made(self._token), Ok)

    def held(self) -> dict[int, tuple[int, bool]]:
        answer = self.ask(ListBuckets())
        assert isinstance(answer, BucketsHeld)
        return {each.bucket: (each.location_epoch, each.moving) for each in answer.held}

    def actions(self, kind: type[A]) -> list[A]:
        return [each for each in self.done if isinstance(each, kind)]


def test_hosting_is_answered_when_the_regions_are_there_and_once_made_never_again() -> None:
    driver = Driver()
    assert driver.ask(host(0, 1)) is None
    assert isinstance(driver.made(1), Ok)
    assert isinstance(driver.ask(host(0, 1)), Ok)
    assert len(driver.actions(MakeRegions)) == 1
    assert driver.held() == {0: (0, False), 1: (0, False)}
    answer = driver.ask(ListBuckets())
    assert isinstance(answer, BucketsHeld)
    assert (answer.aggregator, answer.incarnation) == ("a1", 7)


def test_commands_wait_for_regions_that_are_being_made() -> None:
    driver = Driver()
    assert driver.ask(host(0)) is None
    assert driver.ask(host(0, 1)) is None
    assert driver.ask(DropJob(job="j1")) is None
    driver.made(1)
    assert len(driver.actions(MakeRegions)) == 2, "bucket 1 alone is missing"
    assert driver.actions(MakeRegions)[1].new == (1,)
    driver.made(2)
    assert driver.held() == {}, "the drop came last"


def test_a_command_storm_is_refused_before_it_is_remembered() -> None:
    driver = Driver()
    driver.ask(host(0))
    for _ in range(limits.COMMANDS_WAITING_MAX):
        assert driver.ask(host(0)) is None
    answer = driver.ask(host(0))
    assert isinstance(answer, Refused)
    assert answer.retry_after_s > 0


def test_memory_that_is_not_there_is_refused_with_what_is_asked_and_free() -> None:
    driver = Driver(memory=15_000_000)
    driver.host(0)
    answer = driver.ask(host(1, 2))
    assert isinstance(answer, Refused)
    free = 15_000_000 - driver.core.held_bytes
    assert f"{free} of 15000000 are free" in answer.reason
    assert driver.held() == {0: (0, False)}
    assert answer.retry_after_s > 0, "another job may end"


def test_memory_that_is_being_made_counts() -> None:
    driver = Driver(memory=10_000_000)
    assert driver.ask(host(0)) is None
    other = JobPlan(
        job=JobId("j2"),
        workers=2,
        gradient_dtype="float32",
        update=UpdateRule(),
        layout_epoch=0,
        token="",
    )
    assert isinstance(driver.ask(host(1, job=other)), Refused)


def test_a_failure_to_make_them_leaves_nothing_and_can_be_repeated() -> None:
    driver = Driver()
    driver.ask(host(0))
    answer = driver.made(1, failure="no memory")
    assert isinstance(answer, Refused)
    assert "no memory" in answer.reason
    assert driver.held() == {}
    assert driver.ask(host(0)) is None
    assert isinstance(driver.made(driver._token), Ok)


def test_a_layout_that_is_not_the_tensors_is_refused() -> None:
    driver = Driver()
    wrong = HostBuckets(
        cluster=ClusterId("c1"), plan=plan(), buckets=BUCKETS, at_epochs=(0,), tensors=TENSORS
    )
    for message in (
        wrong,
        HostBuckets(
            cluster=ClusterId("c1"),
            plan=plan(),
            buckets=BUCKETS,
            at_epochs=(0, 0, 0),
            tensors=TENSORS[:2],
        ),
    ):
        assert isinstance(driver.ask(message), Refused)
    assert driver.held() == {}


def test_hosting_at_a_higher_epoch_keeps_the_bytes_and_calls_a_migration_off() -> None:
    driver = Driver()
    driver.host(0)
    driver.ask(migrate(0, epoch=1))
    bucket = driver.core.buckets[JOB, 0]
    bucket.freeze()
    assert driver.held() == {0: (1, True)}
    assert isinstance(driver.ask(host(0, epoch=2)), Ok)
    assert driver.held() == {0: (2, False)}
    assert driver.core.buckets[JOB, 0] is bucket


def test_a_late_repetition_of_hosting_does_not_call_a_migration_off() -> None:
    driver = Driver()
    driver.host(0)
    driver.ask(migrate(0, epoch=1))
    assert isinstance(driver.ask(host(0, epoch=0)), Ok)
    assert driver.held() == {0: (0, True)}


def test_a_new_layout_replaces_the_old_one() -> None:
    driver = Driver()
    driver.host(0)
    assert driver.ask(host(0, layout_epoch=1)) is None
    assert isinstance(driver.made(2), Ok)
    assert driver.core.buckets[JOB, 0].plan.layout_epoch == 1


def test_a_drop_up_to_an_epoch_takes_that_one_too() -> None:
    driver = Driver()
    driver.host(0, epoch=3)
    assert isinstance(driver.ask(DropJob(job="j1", up_to_epoch=2)), Ok)
    assert driver.held() == {0: (3, False)}
    assert isinstance(driver.ask(DropJob(job="j1", up_to_epoch=3)), Ok)
    assert driver.held() == {}


def test_drops_spare_what_came_back_at_a_higher_epoch() -> None:
    driver = Driver()
    driver.host(0, 1, epoch=3)
    late = DropJob(job="j1", buckets=(0, 1, 2), up_to_epochs=(2, 3, 9))
    assert isinstance(driver.ask(late), Ok)
    assert driver.held() == {0: (3, False)}
    assert isinstance(driver.ask(DropJob(job="j1")), Ok)
    assert isinstance(driver.ask(DropJob(job="j1")), Ok)
    assert driver.held() == {}
    assert driver.core.held_bytes == 0


def test_migrate_init_is_stored_once_and_a_newer_one_replaces_it() -> None:
    driver = Driver()
    driver.host(0, 1)
    assert isinstance(driver.ask(migrate(0, 1, epoch=1)), Ok)
    assert isinstance(driver.ask(migrate(0, 1, epoch=1)), Ok)
    assert len(driver.actions(MoveBucket)) == 2, "the repetition changes nothing"
    assert driver.held() == {0: (0, True), 1: (0, True)}
    driver.ask(migrate(0, epoch=2, target="a3"))
    assert driver.core.buckets[JOB, 0].move == Move("m1", 2, to("a3"))
    driver.ask(migrate(0, epoch=1, target="a2"))
    assert driver.core.buckets[JOB, 0].move == Move("m1", 2, to("a3")), "late"


def test_a_locked_bucket_is_told_of_and_does_not_begin_anew_at_its_epoch() -> None:
    """The controller takes it for one that moves, and waits; where it gives up, it says so by a
    higher epoch. Its memory counts meanwhile."""
    driver = Driver()
    driver.host(1)
    there = BucketHeld(job=JOB, bucket=0, layout_epoch=0, location_epoch=3, version=7, moving=True)
    free = driver.core.no_room_for(0)
    assert not free
    driver.core.locked = {(JOB, 0): LockedBucket(there, 2**62)}
    assert driver.core.no_room_for(1)
    driver.core.locked = {(JOB, 0): LockedBucket(there, 0)}
    assert driver.held() == {0: (3, True), 1: (0, False)}
    answer = driver.ask(host(0, epoch=3))
    assert isinstance(answer, Refused)
    assert "locked" in answer.reason
    assert answer.retry_after_s > 0
    assert driver.core.awaits((JOB, 0))
    assert driver.ask(host(0, epoch=4)) is None
    assert not driver.core.awaits((JOB, 0)), "it is being made anew"
    assert isinstance(driver.made(driver._token), Ok)
    assert not driver.core.awaits((JOB, 0))
    assert driver.held() == {0: (4, False), 1: (0, False)}


def test_the_token_of_a_job_is_known_a_while_after_it_went() -> None:
    """Its workers come by to hear where; nobody else's word is taken for theirs."""
    driver = Driver()
    driver.host(0)
    plan = driver.core.plan_of(JOB, driver.now_s)
    assert plan is not None
    driver.core.remove((JOB, 0))
    assert driver.core.plan_of(JOB, driver.now_s) is None
    went = BucketCopied((JOB, 0), Move("m1", 1, to("a2")), 41, True, 1000, 0.5, (), plan)
    driver.core.step(went, 10.0)
    assert driver.core.plan_of(JOB, 10.0 + limits.DEPARTED_S - 1) is plan
    assert driver.core.plan_of(JOB, 10.0 + limits.DEPARTED_S + 1) is None
    assert driver.core.jobs == 0


def copied(epoch: int = 1) -> BucketCopied:
    return BucketCopied((JOB, 0), Move("m1", epoch, to("a2")), 41, True, 1000, 0.5)


def test_a_finished_migration_is_told_and_told_again() -> None:
    driver = Driver()
    driver.host(0)
    driver.ask(migrate(0))
    driver.core.remove((JOB, 0))
    driver.run(driver.core.step(copied(), driver.now_s))
    assert isinstance(driver.ask(migrate(0)), Ok)
    first, second = driver.published
    assert first == second
    assert isinstance(first, TensorCopyDone)
    assert (first.version, first.source, first.target, first.copy_s) == (41, "a1", "a2", 0.5)
    answer = driver.ask(migrate(0, epoch=2))
    assert isinstance(answer, Refused), "it is not here: the controller is behind"
    assert "does not hold buckets [0]" in answer.reason


def test_where_it_went_is_remembered_for_a_bounded_time() -> None:
    driver = Driver()
    driver.core.step(copied(), 10.0)
    assert driver.core.forwarding_of((JOB, 0), 10.0 + limits.DEPARTED_S - 1) == copied()
    assert driver.core.forwarding_of((JOB, 0), 10.0 + limits.DEPARTED_S + 1) is None


def test_a_late_order_to_host_does_not_make_what_has_left() -> None:
    driver = Driver()
    driver.host(0)
    driver.core.remove((JOB, 0))
    driver.run(driver.core.step(copied(epoch=1), driver.now_s))
    assert isinstance(driver.ask(host(0, epoch=0)), Ok)
    assert driver.held() == {}
    assert driver.ask(host(0, epoch=2)) is None, "a newer one does: it was lost there"


def test_an_order_to_move_to_ourselves_ends_the_migration_here() -> None:
    driver = Driver()
    driver.host(0)
    driver.ask(migrate(0, epoch=1))
    driver.ask(migrate(0, epoch=2, target="a1", name="m2"))
    assert driver.held() == {0: (2, False)}
    (done,) = driver.published
    assert (done.migration, done.location_epoch, done.target) == ("m2", 2, "a1")


def test_an_unknown_bucket_is_refused_and_the_known_ones_move() -> None:
    driver = Driver()
    driver.host(0)
    answer = driver.ask(migrate(0, 2))
    assert isinstance(answer, Refused)
    assert driver.held() == {0: (0, True)}


def test_lists_that_are_not_parallel_are_refused() -> None:
    driver = Driver()
    driver.host(0)
    wrong = MigrateInit(
        cluster=ClusterId("c1"), migration="m", job="j1", buckets=(0,), epochs=(), to=to("a2")
    )
    assert isinstance(driver.ask(wrong), Refused)
    assert isinstance(driver.ask(DropJob(job="j1", buckets=(0,), up_to_epochs=())), Refused)
    assert driver.held() == {0: (0, False)}


def test_facts_name_job_bucket_and_epoch() -> None:
    driver = Driver()
    assert driver.ask(host(1, job=plan(update=UpdateRule(name="momentum")))) is None
    assert isinstance(driver.made(driver._token), Ok)
    driver.run(driver.core.step(WorkersArrived((JOB, 1), 4), 0.0))
    driver.run(driver.core.step(BucketSeeded((JOB, 1), 0, SeededStates()), 0.0))
    arrived, lost = driver.published
    assert arrived == WorkerDone(job=JOB, bucket=1, location_epoch=4, target=AggregatorId("a1"))
    assert isinstance(lost, JobEvent)
    at = WorkersAt(job=JOB, bucket=1, location_epoch=4)
    assert driver.core.arrived(9.0) == (at,)  # In every heartbeat for a while.
    assert driver.core.arrived(10.0) == ()
    assert (lost.fact, lost.job) == ("optimizer-state-lost", "j1")
    assert "starts afresh" in lost.reason


def test_a_rule_without_state_loses_none() -> None:
    """Its bucket is filled from a worker's parameters, and is what it was."""
    driver = Driver()
    driver.host(1)
    driver.run(driver.core.step(BucketSeeded((JOB, 1), 0, SeededStates()), 0.0))
    assert not driver.published


def test_what_is_no_command_for_it_is_refused() -> None:
    driver = Driver()
    assert isinstance(driver.ask(Drain()), Refused)
    assert list(driver.core.step(Draining(), 0.0)) == []


@pytest.mark.parametrize("job", ["", "j1", "j9"])
def test_lists_can_be_narrowed_to_a_job(job: str) -> None:
    driver = Driver()
    driver.host(0)
    answer = driver.ask(ListBuckets(job=job))
    assert isinstance(answer, BucketsHeld)
    assert len(answer.held) == (0 if job == "j9" else 1)


def test_a_drop_with_epochs_for_other_buckets_is_refused_and_drops_nothing() -> None:
    driver = Driver()
    driver.host(0, 1)
    for buckets, epochs in (((0,), (1, 1)), ((), (1,)), (None, (1,))):
        refused = driver.ask(DropJob(job=JOB, buckets=buckets, up_to_epochs=epochs))
        assert isinstance(refused, Refused)
        assert "parallel" in refused.reason
    assert len(driver.core.buckets) == 2


def test_a_bucket_that_is_named_twice_is_refused_before_a_region_is_made() -> None:
    driver = Driver()
    refused = driver.ask(host(0, 0))
    assert isinstance(refused, Refused)
    assert "named twice" in refused.reason
    assert driver.done == []


def test_only_the_plans_of_the_last_jobs_that_left_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "DEPARTED_MAX", 2)
    driver = Driver()
    driver.host(0)
    plan = driver.core.plan_of(JOB, 0.0)
    assert plan is not None
    for id in "abc":
        moved = replace(copied(), key=(JobId(id), 0), plan=plan)
        driver.core.step(moved, 10.0)
    assert [driver.core.plan_of(JobId(id), 10.0) is plan for id in "abc"] == [False, True, True]


def test_what_was_saved_of_a_bucket_counts_as_its_memory_once() -> None:
    driver = Driver()
    driver.host(0)
    bucket, before = driver.core.buckets[JOB, 0], driver.core.held_bytes
    saved = np.zeros(100, np.float32)
    for _ in range(2):
        driver.core.remember(bucket, saved)
        assert driver.core.held_bytes == before + saved.nbytes
        driver.core.check_invariants()
    driver.core.remove((JOB, 0))
    assert driver.core.held_bytes == 0
    driver.core.remember(bucket, saved)
    assert driver.core.held_bytes == 0, "it is not here any more"


def test_deadlines_are_set_only_where_an_order_to_host_has_some() -> None:
    driver = Driver()
    driver.ask(host(0))
    assert driver.actions(SetDeadlines) == []
