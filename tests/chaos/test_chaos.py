"""Kills, pauses and failpoints under load, by tests/chaos. A few in each run of the tests; all of
them at night, and by `make chaos`."""

from pathlib import Path

import pytest
from tests.chaos import overload, points, soak
from tests.chaos.run import Plan, Report, lines, run

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

EACH = (
    "kill:master-m1", "kill:nats", "pause:master-m1", "kill:worker-w1",
    "point:master-m1:master.put.after=error@2",
    "point:worker-w1:worker.start.after=kill@1",
    "kill:controller-c1",
)  # fmt: skip


async def judged(plan: Plan, folder: Path) -> Report:
    report = await run(plan, folder)
    assert not report.wrong, "\n".join(lines(report))
    return report


async def test_what_clients_were_told_under_some_faults_has_an_order(tmp_path: Path) -> None:
    """Half a minute: each fault waits until submissions are taken again."""
    report = await judged(Plan(EACH, len(EACH), rate=20.0, programs=0.2, seed=3), tmp_path)
    assert report.acknowledged > 50
    assert report.ran > 5


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_each_failpoint_with_each_action(tmp_path: Path) -> None:
    faults = tuple(points.faults())
    plan = Plan(faults, len(faults), rate=10.0, programs=0.3, seed=5, trains=True)
    await judged(plan, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("fault", "times", "most_s"),
    [("kill:master-m1", 500, 2.0), ("kill:nats", 100, 1.0), ("pause:master-m1", 60, 15.0)],
)
async def test_many_of_one_kind(fault: str, times: int, most_s: float, tmp_path: Path) -> None:
    report = await judged(Plan((fault,), times, rate=100.0, programs=0.02, seed=7), tmp_path)
    assert report.back_s[fault][1] < most_s


@pytest.mark.nightly
@pytest.mark.timeout(4000)
async def test_an_hour_of_use_leaves_nothing_behind(tmp_path: Path) -> None:
    told = await soak.soak(3600.0, 10.0, tmp_path)
    assert told.calls > 60_000
    assert not told.wrong, "\n".join(soak.lines(told))


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.nightly)])
async def test_more_submissions_than_a_master_can_take_are_all_answered(seconds: float) -> None:
    """Some seconds, most of them the cluster's start and the measurement of what it takes."""
    told = await overload.overload(seconds, 5.0)
    assert not told.wrong, "\n".join(overload.lines(told))
    assert told.answers["taken"] > 0
    assert told.answers["refused with a time"] > 0 or seconds < 60.0
    before, after = told.resident_bytes
    assert after < before + 64 * 2**20
