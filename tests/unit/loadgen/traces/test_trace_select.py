"""Choosing part of a trace and its pace."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces import Trace, TraceJob, read, seconds_after_origin, select


def _trace(jobs: list[tuple[float, int]], format: str = "itp", origin_s: float = 0.0) -> Trace:
    return Trace(
        jobs=tuple(
            TraceJob(id=str(n), submit_s=at_s, gpus=gpus, duration_s=10.0, stages_s={"cpu": 2.0})
            for n, (at_s, gpus) in enumerate(jobs)
        ),
        format=format,
        sha256="",
        path="t.csv",
        origin_s=origin_s,
    )


@pytest.mark.traces
def test_the_replay_of_the_itp_cluster(traces_dir: Path) -> None:
    """cluster02 with at least two GPUs, twelve jobs: a plain filter over the file's rows."""
    path = traces_dir / "elasticflow-itp" / "cluster02.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    wide = [row for row in rows if int(row[3]) >= 2][:12]
    jobs = select(read(path).jobs, min_gpus=2, jobs=12, time_scale=0.5)
    assert [job.id for job in jobs] == [row[0] for row in wide]
    assert [job.gpus for job in jobs] == [int(row[3]) for row in wide]
    assert [job.submit_s for job in jobs] == [(int(row[1]) - int(wide[0][1])) * 0.5 for row in wide]
    assert [job.duration_s for job in jobs] == [int(row[2]) * 0.5 for row in wide]


@pytest.mark.traces
def test_one_week_of_philly(traces_dir: Path) -> None:
    """2017-10-09..15 has 12,751 jobs; t = 0 is that Monday's midnight."""
    trace = read(traces_dir / "philly" / "philly_gpu_jobs_2017-09_10.csv")
    start_s = seconds_after_origin("2017-10-09", trace)
    end_s = seconds_after_origin("2017-10-16", trace)
    assert end_s - start_s == 7 * 86_400
    jobs = select(trace.jobs, start_s=start_s, end_s=end_s)
    assert len(jobs) == 12_751
    assert 0 <= jobs[0].submit_s < 600
    assert jobs[-1].submit_s < 7 * 86_400


@given(
    jobs=st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 64)), min_size=1, max_size=30),
    gpus=st.tuples(st.integers(0, 64), st.integers(0, 64)).map(sorted),
    times=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)).map(sorted),
    count=st.integers(1, 10),
)
def test_a_selection_is_a_filter(
    jobs: list[tuple[float, int]], gpus: list[int], times: list[float], count: int
) -> None:
    trace = _trace(sorted(jobs))
    expected = [
        job
        for job in trace.jobs
        if gpus[0] <= job.gpus <= gpus[1] and times[0] <= job.submit_s < times[1]
    ][:count]
    part = partial(
        select,
        trace.jobs,
        min_gpus=gpus[0],
        max_gpus=gpus[1],
        jobs=count,
        start_s=times[0],
        end_s=times[1],
    )
    if not times[0] < times[1] or not expected:
        with pytest.raises(Rejected):
            part(rebase=False)
        return
    assert list(part(rebase=False)) == expected
    moved = part()
    assert [job.submit_s for job in moved] == [job.submit_s - times[0] for job in expected]


def test_times_scale_together() -> None:
    job = select(_trace([(5.0, 1), (9.0, 1)]).jobs, time_scale=0.1)[1]
    assert job.submit_s == pytest.approx(0.4)
    assert job.duration_s == pytest.approx(1.0)
    assert dict(job.stages_s) == pytest.approx({"cpu": 0.2})


@pytest.mark.parametrize(
    "options",
    [
        {"min_gpus": -1},
        {"min_gpus": 4, "max_gpus": 2},
        {"jobs": 0},
        {"start_s": 5.0, "end_s": 5.0},
        {"end_s": 0.0},
        {"time_scale": 0.0},
        {"time_scale": float("nan")},
        {"time_scale": float("inf")},
        {"start_s": float("nan")},
    ],
)
def test_impossible_selections(options: dict[str, float]) -> None:
    with pytest.raises(Rejected):
        select(_trace([(0.0, 1)]).jobs, **options)  # type: ignore[arg-type]  # wrong on purpose


def test_an_empty_result_says_what_there_is() -> None:
    with pytest.raises(Rejected, match="no job of 16 to any number of GPUs") as caught:
        select(_trace([(0.0, 1), (50.0, 8)]).jobs, min_gpus=16)
    assert "the trace's 2 jobs have 1 to 8 GPUs and are submitted from 0 to 50 s" in str(
        caught.value
    )
    with pytest.raises(Rejected, match="there are no jobs at all"):
        select(())


def test_moments() -> None:
    philly = _trace([(0.0, 1)], format="philly", origin_s=1_507_334_400.0)
    assert seconds_after_origin("12.5", philly) == 12.5
    assert seconds_after_origin("2017-10-07 00:00:10", philly) == 10.0
    assert seconds_after_origin("2017-10-07T00:00:10+00:00", philly) == 10.0
    with pytest.raises(Rejected, match="neither seconds nor a time"):
        seconds_after_origin("monday", philly)
    with pytest.raises(Rejected, match="not a finite number"):
        seconds_after_origin("nan", philly)
    with pytest.raises(Rejected, match="has no calendar"):
        seconds_after_origin("2017-10-07", _trace([(0.0, 1)]))
