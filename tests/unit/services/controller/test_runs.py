"""A job that is run again: nothing that is left of its former run is taken for this one's."""

import msgspec
from tests.unit.services.controller.harness import Harness, Pool, last, placed

from slackwater.schemas.base import AggregatorId, JobId, Ok, Refused
from slackwater.schemas.placement import (
    DropJob,
    HostBuckets,
    Located,
    LocateJob,
    PlaceJob,
    ReleaseJob,
)
from slackwater.services.controller.state import RUN_EPOCHS, numbered


def again(id: str, run: int = 1) -> PlaceJob:
    return msgspec.structs.replace(placed(id, 2), run=run)


def test_a_run_has_a_token_epochs_and_requests_of_its_own() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    first = harness.ask(LocateJob(job="j"))
    assert harness.ask(ReleaseJob(job="j")) == Ok()
    assert harness.ask(again("j")) == Ok()
    second = harness.ask(LocateJob(job="j"))
    assert isinstance(first, Located)
    assert isinstance(second, Located)
    assert second.plan.token != first.plan.token
    assert second.plan.layout_epoch == first.plan.layout_epoch + 1
    assert all(place.location_epoch > RUN_EPOCHS for place in second.places)
    assert all(record.request == "j-r1a1" for record in harness.pool.records.values())


def test_a_late_release_of_the_former_run_leaves_this_one_alone() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    harness.ask(ReleaseJob(job="j"))
    assert harness.ask(again("j")) == Ok()
    assert harness.ask(ReleaseJob(job="j")) == Ok()
    assert harness.stored["j"].phase != "released"
    assert harness.ask(ReleaseJob(job="j", run=1)) == Ok()
    assert "j" not in harness.stored


def test_a_late_drop_of_the_former_run_spares_the_regions_of_this_one() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    harness.ask(ReleaseJob(job="j"))
    drop = last(harness.sent, DropJob)
    harness.ask(again("j"))
    hosted = last(harness.sent, HostBuckets)
    assert drop.up_to_epoch is not None
    assert drop.up_to_epoch < min(hosted.at_epochs)


def test_a_placement_that_was_never_released_ends_when_the_next_run_comes() -> None:
    """Its order was repeated by the bus after its release."""
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    refused = harness.ask(again("j"))
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0
    assert harness.ask(again("j")) == Ok()
    assert harness.stored["j"].run == 1


def test_an_order_of_a_former_run_is_refused_for_good() -> None:
    harness = Harness(Pool(4))
    assert harness.ask(again("j", run=3)) == Ok()
    refused = harness.ask(again("j", run=2))
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == 0.0
    assert harness.stored["j"].run == 3


def test_what_an_aggregator_kept_of_a_former_run_is_dropped_and_not_trained_on() -> None:
    """It was away while the run was released, and comes back with buckets that had moved often."""
    harness = Harness(Pool(4))
    harness.ask(again("j"))
    home = AggregatorId(harness.homes("j")[0])
    stale = {(JobId("j"), 0): 7, (JobId("j"), 1): 9}
    held = harness.pool.held[home]
    other = next(a for a in harness.pool.records if a != home)
    harness.pool.held[other] |= {(JobId("j"), 0): 7}
    harness.pool.incarnations[other] += 1
    harness.beat()
    harness.pass_time(20)
    drops = [m for m in harness.sent if isinstance(m, DropJob) and m.buckets is not None]
    assert DropJob(job="j", buckets=(0,), up_to_epochs=(7,)) in drops
    assert stale.items().isdisjoint(held.items())


def test_ids_of_requests_fit_whatever_the_run() -> None:
    for id in ("j", "x" * 63):
        made = {numbered(JobId(id), kind, 10**8, run) for kind in "am" for run in (0, 1, 4000)}
        assert len(made) == 6
        assert all(len(each) <= 63 for each in made)
