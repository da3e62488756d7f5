"""Jobs that have aggregators for their profiling alone and do not iterate: others get on."""

from typing import Any

from tests.unit.services.controller.harness import Harness, Pool, last, placed

from slackwater.schemas.base import AggregatorId, Ok
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    ListBuckets,
    Located,
    LocateJob,
    PlaceJob,
)

HUNG_S = 30


def harness_of(aggregators: int, **config: Any) -> Harness:
    return Harness(Pool(aggregators), hung_after_s=HUNG_S, unprofiled_after_s=5.0, **config)


def lone(id: str) -> PlaceJob:
    return PlaceJob(spec=JobSpec(id=id, servers=1, workers=2), tensors=placed(id, 2).tensors)


def iterating(harness: Harness, job: str) -> None:
    """From now on every answer finds its buckets one version further."""
    version = 1

    def held(request: Any) -> BucketsHeld | None:
        nonlocal version
        if not isinstance(request.message, ListBuckets):
            return None
        version += 1
        at = AggregatorId(request.subject.split(".")[4])
        return BucketsHeld(
            aggregator=at,
            incarnation=harness.pool.incarnations[at],
            held=tuple(
                BucketHeld(job=j, bucket=b, layout_epoch=1, location_epoch=e,
                           version=version if j == job else 1)
                for (j, b), e in harness.pool.held[at].items()
            ),
        )  # fmt: skip

    harness.pool.lie = held


def test_with_one_aggregator_a_second_job_does_not_wait_for_ever_behind_one_that_hangs() -> None:
    harness = harness_of(1)
    assert harness.ask(lone("hung")) == Ok()
    assert harness.ask(lone("second")) == Ok()
    harness.pass_time(HUNG_S // 2 - 5)
    assert harness.stored["second"].phase == "waiting"
    harness.pass_time(30)
    assert isinstance(harness.ask(LocateJob(job="second")), Located)
    assert harness.homes("second") == harness.homes("hung") == ["a0", "a0"]
    assert harness.stored["second"].cause == "unprofiled"


def test_a_job_that_hangs_goes_to_shared_aggregators_and_says_so_and_its_own_are_given_back() -> (
    None
):
    harness = harness_of(6)
    harness.place("steady", [0.02, 0.02])
    assert harness.ask(placed("hung", 2)) == Ok()
    own = set(harness.homes("hung"))
    harness.pass_time(HUNG_S + 20)
    told = last([fact for fact in harness.facts if fact.fact == "unprofiled"], JobEvent)
    assert (told.job, told.detail["aggregators"]) == ("hung", ",".join(sorted(own)))
    harness.migrated("hung", worker_done=False)
    harness.pass_time(30)
    assert set(harness.homes("hung")) <= set(harness.homes("steady"))
    assert not own & set(harness.pool.records), "given back"
    why = harness.waiting()["hung"]
    assert why.startswith("trains on where it is: no iteration for ")
    assert why.endswith(" s (hung_after_s): it shares aggregators, unprofiled")


def test_a_job_that_hangs_alone_keeps_one_of_its_aggregators() -> None:
    harness = harness_of(4)
    assert harness.ask(placed("hung", 4, servers=3)) == Ok()
    assert len(set(harness.homes("hung"))) == 3
    harness.pass_time(HUNG_S + 20)
    harness.migrated("hung", worker_done=False)
    harness.pass_time(30)
    assert len(set(harness.homes("hung"))) == 1
    assert set(harness.homes("hung")) == set(harness.pool.records)


def test_where_a_bucket_of_a_job_that_hangs_cannot_leave_others_come_too() -> None:
    """Some of its ranks pushed, and the others never do."""
    harness = harness_of(2)
    assert harness.ask(placed("hung", 2)) == Ok()
    harness.pass_time(HUNG_S + 20)
    assert harness.stored["hung"].phase == "moving"
    assert harness.ask(placed("second", 2)) == Ok()
    harness.pass_time(90)
    assert isinstance(harness.ask(LocateJob(job="second")), Located)
    assert set(harness.homes("second")) == {"a0", "a1"}


def test_a_job_that_hung_is_profiled_and_assigned_once_it_iterates() -> None:
    harness = harness_of(6)
    harness.place("steady", [0.02, 0.02])
    assert harness.ask(placed("hung", 2)) == Ok()
    harness.pass_time(HUNG_S + 20)
    harness.migrated("hung", worker_done=False)
    harness.pass_time(10)
    harness.profile("hung", [0.02, 0.02])
    harness.migrated("hung")
    record = harness.stored["hung"]
    assert (record.phase, record.reason) == ("steady", "")
    assert record.profile is not None


def test_a_slow_job_keeps_what_it_is_profiled_on_as_long_as_it_iterates() -> None:
    harness = harness_of(4)
    assert harness.ask(placed("slow", 2)) == Ok()
    iterating(harness, "slow")
    harness.pass_time(4 * HUNG_S)
    assert harness.stored["slow"].temporary == ("a0", "a1")
    harness.pool.lie = lambda request: None
    harness.pass_time(HUNG_S + 20)
    assert harness.stored["slow"].temporary == ()
