"""Progress by statistical epochs, its ETA with an interval, and the history of a job's tuning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.master.test_goodput_reports import REPORT, changed, tell, trained

from slackwater.cli.jobs import Job, _ratio
from slackwater.cli.tuning import table
from slackwater.console import figures
from slackwater.schemas.base import JobId
from slackwater.schemas.job_requests import GetJob, JobInfo, JobList, ListJobs
from slackwater.schemas.progress import JobProgress, TuningPoint
from slackwater.services.master.learning import Learning


def point(at_s: float, epochs: float | None = None, batch: int = 128) -> TuningPoint:
    return TuningPoint(at_s=at_s, gpus=1, batch=batch, progress_epochs=epochs)


def shown(learning: Learning, runs: bool = True) -> JobProgress:
    found = learning.shown(None, runs)
    assert found is not None
    return found


def test_a_steady_job_has_an_eta_by_its_epochs() -> None:
    """An epoch each ten seconds, and eight of ten are left."""
    learning = Learning()
    for report in range(5):
        learning.reported(point(5.0 * report, 0.5 * report), 0, 10.0)
    found = shown(learning)
    assert (found.epochs, found.epochs_target) == (2.0, 10.0)
    assert found.eta_s == pytest.approx(80.0)
    assert found.eta_s_min == pytest.approx(80.0)
    assert found.eta_s_max == pytest.approx(80.0)
    assert figures.done(found) == "2.00/10 epochs"
    assert figures.left(found) == "1m20s left (1m20s to 1m20s)"
    assert shown(learning, runs=False).eta_s is None


def test_a_rate_that_varies_widens_the_interval() -> None:
    learning = Learning()
    for report in range(9):
        learning.reported(point(10.0 * report, report + 0.3 * (report % 2)), 0, 20.0)
    found = shown(learning)
    assert found.eta_s_min is not None
    assert found.eta_s_max is not None
    assert found.eta_s is not None
    assert 0.7 * found.eta_s < found.eta_s_min < found.eta_s < found.eta_s_max < 2.5 * found.eta_s


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0, 5)), min_size=1, max_size=60))
def test_the_eta_lies_within_its_interval(steps: list[tuple[float, float]]) -> None:
    learning, at_s, epochs = Learning(), 1.0, 0.0
    for took_s, gained in steps:
        at_s, epochs = at_s + took_s, epochs + gained
        learning.reported(point(at_s, epochs), 0, 1000.0)
        found = shown(learning)
        if found.eta_s is not None:
            assert found.eta_s_min is None or found.eta_s_min <= found.eta_s * (1 + 1e-9)
            assert found.eta_s_max is None or found.eta_s <= found.eta_s_max * (1 + 1e-9)


def test_the_time_without_gpus_is_not_its_speed() -> None:
    """Between two attempts an hour passes; and an attempt that lost epochs begins a new rate."""
    learning = Learning()
    for report in range(3):
        learning.reported(point(10.0 * report, float(report)), 0, 10.0)
    learning.reported(point(3600.0, 2.0), 1, 10.0)
    assert shown(learning).eta_s is None
    learning.reported(point(3610.0, 3.0), 1, 10.0)
    assert shown(learning).eta_s == pytest.approx(70.0)
    learning.reported(point(3620.0, 2.5), 1, 10.0)
    assert shown(learning).eta_s is None


def test_people_are_shown_epochs_and_what_the_job_was_tuned_to() -> None:
    """The master's answers for `slackwater job --history`, and for `jobs` and `top`."""
    harness = trained()
    for report in range(4):
        harness.now_s += 30.0
        tell(
            harness,
            changed(
                per_gpu=64 * (report + 1), accumulation=1, rate_scale=1.5, noise_scale=256.0,
                progress_epochs=0.25 * report, target_epochs=8.0,
            ),
        )  # fmt: skip
    info = harness.answer(GetJob(job=JobId("a")))
    listed = harness.answer(ListJobs())
    assert isinstance(info, JobInfo)
    assert isinstance(listed, JobList)
    for progress in (info.progress, listed.progress[JobId("a")]):
        assert progress is not None
        assert (progress.epochs, progress.epochs_target) == (0.75, 8.0)
        assert progress.eta_s == pytest.approx(30.0 * 7.25 / 0.25)
        assert _ratio(Job(info.job, progress), 0.0) == pytest.approx(-0.75 / 8)
    assert [each.batch for each in info.history] == [128, 256, 384, 512]
    assert info.history[1].efficiency == pytest.approx((256 + 128) / (256 + 256))
    assert table(info.history, None)[-1].split() == [
        figures.at(info.history[-1].at_s), "1", "512", "2", "1.5x", "50%", "0.75",
    ]  # fmt: skip


def test_a_job_that_counts_no_epochs_keeps_its_iterations() -> None:
    harness = trained()
    tell(harness, REPORT)
    info = harness.answer(GetJob(job=JobId("a")))
    assert isinstance(info, JobInfo)
    assert info.progress is None
    (only,) = info.history
    assert (only.batch, only.efficiency) == (0, None)
