"""Live runs beside simulated ones: the comparison, the live event log and the measured costs."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.integration.fidelity.conftest import runs_of
from tests.sim.submissions import submission

from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.loadgen.cli.fidelity import scale, summary, table
from slackwater.loadgen.fidelity import compare, costs, program
from slackwater.loadgen.fidelity.costs import FREE
from slackwater.loadgen.fidelity.experiment import Fidelity, Plan, simulated, submissions_of
from slackwater.loadgen.fidelity.jobs import Attempt, LiveJob, attempts, live_jobs, progress
from slackwater.loadgen.fidelity.live import LiveRun
from slackwater.loadgen.fidelity.livelog import live_log, result_of, stretches
from slackwater.loadgen.simulator.gpu.audit import audit
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobRecord

ORIGIN_S = 1_700_000_000.0


def live(folder: Path, duration_s: float = 10.0, gpus: int = 2) -> LiveJob:
    (job,) = live_jobs([submission(gpus=gpus, duration_s=duration_s)], folder)
    return job


def fact(name: str, at_s: float, attempt: int = 0, on: str = "") -> JobEvent:
    allocation = ((NodeId(on), 2),) if on else ()
    return JobEvent(
        job=JobId("f0000"), fact=name, at_s=ORIGIN_S + at_s, attempt=attempt, allocation=allocation
    )


PAUSED_ONCE = [
    fact("starting", 1.0, on="w1"),
    fact("stopping", 5.0),
    fact("paused", 5.5, 1),
    fact("starting", 8.0, 1, on="w2"),
    fact("completed", 14.5, 1),
]


def record(job: LiveJob, **fields: Any) -> JobRecord:
    return JobRecord(spec=job.spec, state="completed", submitted_s=ORIGIN_S, **fields)


def paused_once(folder: Path) -> tuple[LiveRun, LiveJob]:
    job = live(folder)
    run = LiveRun(ORIGIN_S)
    run.facts[job.spec.id] = PAUSED_ONCE
    run.records[job.spec.id] = record(
        job, started_s=ORIGIN_S + 1.0, finished_s=ORIGIN_S + 14.5, run_s=10.5, gpu_s=21.0,
        preemptions=1, reallocations=1,
    )  # fmt: skip
    return run, job


WROTE = {
    0: Attempt(0, ORIGIN_S + 1.1, ORIGIN_S + 5.5, 0, 38),
    1: Attempt(1, ORIGIN_S + 8.2, ORIGIN_S + 14.4, 38, 100),
}


def test_a_live_run_is_told_as_the_simulator_tells_one_and_audited(tmp_path: Path) -> None:
    run, job = paused_once(tmp_path)
    result = result_of(run, [job], {job.spec.id: WROTE})
    told = [(s.start_s, s.end_s, s.why, s.allocation, s.work_after) for s in result.segments]
    assert told == [
        (1.0, 5.0, "preempted", ((0, 2),), 38), (8.0, 14.5, "completed", ((1, 2),), 100),
    ]  # fmt: skip
    nodes = [(4, "fake"), (4, "fake")]
    assert audit(live_log(result, "srsf", nodes)) == []


def test_the_auditor_finds_lost_work_and_gpus_given_twice_in_a_live_run(tmp_path: Path) -> None:
    run, job = paused_once(tmp_path)
    forgot = {**WROTE, 1: replace(WROTE[1], before=30)}
    result = result_of(run, [job], {job.spec.id: forgot})
    assert any("had 38" in each for each in audit(live_log(result, "srsf", [(4, ""), (4, "")])))
    result = result_of(run, [job], {job.spec.id: WROTE})
    assert any(
        "over its capacity" in each for each in audit(live_log(result, "srsf", [(1, "")] * 2))
    )


def test_a_job_that_goes_on_at_once_holds_its_next_gpus_from_the_decision_on() -> None:
    facts = [
        fact("starting", 1.0, on="w1"), fact("resized", 5.0, on="w2"),
        fact("starting", 5.6, 1, on="w2"), fact("completed", 9.0, 1),
    ]  # fmt: skip
    found = [(s.start_s - ORIGIN_S, s.end_s - ORIGIN_S, s.why, s.attempt) for s in stretches(facts)]
    assert found == [(1.0, 5.0, "resized", 0), (5.0, 9.0, "completed", 1)]


def test_a_promise_that_is_broken_before_it_begins_is_not_held() -> None:
    """It was stopped, given GPUs again while it saved, and stopped once more."""
    facts = [
        fact("starting", 1.0, on="w1"), fact("stopping", 5.0), fact("resized", 5.1, on="w2"),
        fact("stopping", 5.2), fact("paused", 5.5, 1), fact("starting", 7.0, 1, on="w1"),
        fact("completed", 9.0, 1),
    ]  # fmt: skip
    found = [(s.start_s - ORIGIN_S, s.attempt) for s in stretches(facts)]
    assert found == [(1.0, 0), (7.0, 1)]


def test_a_fact_that_was_lost_with_its_master_is_made_up_for() -> None:
    without = [each for each in PAUSED_ONCE if each.fact != "stopping"]
    assert [s.end_s - ORIGIN_S for s in stretches(without)] == [5.5, 14.5]


def test_the_end_that_was_stored_and_never_told_is_that_of_the_record(tmp_path: Path) -> None:
    """Red before: the last segment went on for ever, and the audit called the job's end wrong."""
    run, job = paused_once(tmp_path)
    run.facts[job.spec.id] = PAUSED_ONCE[:-1]
    result = result_of(run, [job], {job.spec.id: WROTE})
    assert (result.segments[-1].end_s, result.segments[-1].why) == (14.5, "completed")
    assert audit(live_log(result, "srsf", [(4, "fake")] * 2)) == []


def test_costs_are_medians_of_what_no_work_was_done_in(tmp_path: Path) -> None:
    run = LiveRun(ORIGIN_S)
    jobs = live_jobs([submission(n, duration_s=6.0, gpus=1) for n in range(6)], tmp_path)
    for number, job in enumerate(jobs):
        twice = number % 2
        run.records[job.spec.id] = record(
            job, run_s=6.0 + 0.1 * (number + 1) + twice, reallocations=twice
        )
        run.facts[job.spec.id] = PAUSED_ONCE
    found = costs.measured(run, jobs)
    assert found.start_s == pytest.approx(0.3)
    assert found.restart_s == pytest.approx(1.1)
    assert found.stop_s == pytest.approx(0.5)
    with pytest.raises(Unavailable, match="it needs 3 of each"):
        costs.measured(run, jobs[:2])


@given(st.lists(st.integers(0, 100), min_size=2, max_size=12, unique=True))
def test_kendall_s_tau(starts: list[int]) -> None:
    assert compare.kendall_tau([(s, s) for s in starts]) == 1.0
    assert compare.kendall_tau([(s, -s) for s in starts]) == -1.0
    assert compare.kendall_tau([(s, 7.0) for s in starts]) == 1.0, "no order to disagree with"


def test_a_simulation_agrees_with_itself_and_the_control_without_costs_does_not() -> None:
    plan = Plan(policy="tiresias-las", seed=1)
    jobs = submissions_of(plan)
    assert len(jobs) == 60
    paid = replace(FREE, start_s=0.5, stop_s=1.0, restart_s=0.5)
    run = simulated(plan, jobs, paid)
    same = compare.compare(run, simulated(plan, jobs, paid))
    assert not same.misses()
    assert (same.mean_error, same.jobs_near, same.tau) == (0.0, 1.0, 1.0)
    other = compare.compare(run, simulated(plan, jobs, FREE))
    assert any("mean JCT" in each for each in other.misses_of_times())


def test_the_program_saves_when_it_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """It takes two seconds: a program runs for real, is stopped and runs again."""
    words = [sys.executable, "-I", "-S", program.__file__, str(tmp_path), "15", "0.1", "0.2"]

    def start(attempt: int) -> "subprocess.Popen[bytes]":
        result = str(tmp_path / f"result{attempt}")
        told = {"RANK": "0", "ATTEMPT": str(attempt), "RESULT": result}
        env = {**os.environ, **{f"SLACKWATER_{name}": value for name, value in told.items()}}
        return subprocess.Popen(words, env=env)

    job = replace(live(tmp_path), folder=tmp_path)
    assert (progress(job), attempts(job)) == (0, {})
    first = start(0)
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.7)
    first.send_signal(signal.SIGTERM)
    assert first.wait(10.0) == 0
    assert not (tmp_path / "result0").exists(), "it has not completed"
    assert start(1).wait(30.0) == 0
    found = attempts(job)
    assert found[0].after == found[1].before > 0
    assert (found[1].after, (tmp_path / "result1").read_text()) == (15, "{}")


def test_jobs_have_a_process_for_each_gpu_and_as_many_as_a_job_may_have(tmp_path: Path) -> None:
    job = live(tmp_path, duration_s=2.34, gpus=8)
    assert (job.spec.workers, job.spec.gpus, job.iterations) == (8, 8, 23)
    assert job.iterations * job.iteration_s == pytest.approx(2.34)
    with pytest.raises(Rejected, match="--max-gpus"):
        live(tmp_path, gpus=128)


def test_a_scale_may_be_a_fraction() -> None:
    assert scale("1/60") == pytest.approx(1 / 60)
    assert scale("0.5") == 0.5
    for wrong in ("0", "-1", "1/0", "inf", "soon"):
        with pytest.raises(Rejected, match="must be above 0"):
            scale(wrong)


def fidelity(policy: str, seed: int) -> Fidelity:
    plan = Plan(policy=policy, seed=seed, jobs=6)
    result = simulated(plan, submissions_of(plan), FREE)
    same = compare.compare(result, result)
    return Fidelity(
        plan=plan, costs=FREE, compared=same, control=same, lost=(), findings=(),
        simulated_findings=(), kills=0, load=0.0,
    )  # fmt: skip


def test_the_measures_of_one_run_fit_80_columns_and_a_replay_has_no_verdict() -> None:
    found = [fidelity(policy, 1) for policy in ("fifo", "tiresias-las")]
    lines = table(found)
    assert lines[0].split() == ["policy", "fifo", "tiresias-las"]
    assert lines[-1].split() == ["verdict", "pass", "pass"]
    assert max(map(len, lines)) <= 80
    assert not [line for line in table(found, verdict=False) if line.startswith("verdict")]


def test_a_table_of_runs_has_a_row_for_each_and_comes_from_their_tests_reports() -> None:
    """Nightly runs said nothing beyond a dot."""
    runs = [fidelity(policy, seed) for policy, seed in (("srsf", 2), ("fifo", 1), ("srsf", 1))]
    kept = [("fidelity", msgspec.json.encode(each).decode()) for each in runs]
    report = SimpleNamespace(user_properties=[("another", "1"), *kept])
    found = runs_of([report])  # type: ignore[list-item]  # what of a report is read
    assert [(each.plan.policy, each.plan.seed) for each in found] == [
        ("fifo", 1), ("srsf", 1), ("srsf", 2),
    ]  # fmt: skip
    heads, *rows = summary(found)
    assert heads.startswith("policy  seed")
    assert heads.endswith("verdict")
    assert [row.split()[:2] for row in rows] == [["fifo", "1"], ["srsf", "1"], ["srsf", "2"]]
