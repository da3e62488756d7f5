"""Reports in which a controller tells the master where jobs are, for people, a bounded number in
each."""

import pytest
from tests.unit.services.controller.harness import Harness, Pool, placed

from slackwater.schemas.base import JobId, Ok
from slackwater.schemas.cluster import DrainAggregator, DrainProgress
from slackwater.services.controller import membership


def test_a_job_is_reported_with_its_aggregators_its_moves_and_its_loss() -> None:
    harness = Harness(Pool(8))
    harness.place("j", [0.02, 0.01])
    assert harness.ask(placed("k", 2)) == Ok()  # Being profiled, on temporary ones.
    harness.window("j", 1.25)
    report = harness.report()
    job, fresh = report.placed[JobId("j")], report.placed[JobId("k")]
    assert sorted(report.aggregators[at] for at in job.at) == sorted(set(harness.homes("j")))
    assert (job.phase, job.moves) == ("steady", harness.stored["j"].moves)
    assert job.loss == pytest.approx(0.2)
    assert (fresh.phase, fresh.loss) == ("profiling", None)
    assert [report.aggregators[at] for at in fresh.at] == harness.homes("k")


def test_more_jobs_than_fit_are_told_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "PLACED_JOBS_MAX", 2)
    harness = Harness(Pool(16))
    for id in ("j", "k", "l"):
        assert harness.ask(placed(id, 1)) == Ok()
    told = [tuple(harness.report().placed) for _ in range(3)]
    assert told == [("j", "k"), ("l", "j"), ("k", "l")]


def test_an_aggregator_that_is_emptied_is_reported_as_such() -> None:
    harness = Harness(Pool(4))
    harness.place("j", [0.02, 0.01])
    assert harness.report().drains == {}
    order = DrainAggregator(request="r", aggregator="a0", within_s=60.0)
    assert isinstance(harness.ask(order), DrainProgress)
    assert harness.report().drains == {"a0": "draining"}
