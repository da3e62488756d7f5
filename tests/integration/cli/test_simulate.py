"""`loadgen simulate` and `loadgen audit` as typed: what a user can get wrong is one line with a
remedy, and what a report promises is in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

SUMMARY = [
    "policy", "jobs", "completed", "avg_jct_s", "median_jct_s", "p95_jct_s", "p99_jct_s",
    "makespan_s", "avg_queueing_s", "median_queueing_s", "p95_queueing_s", "gpu_utilization",
    "preemptions", "max_finish_time_fairness", "wasted_gpu_s", "wall_s",
]  # fmt: skip


def loadgen(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slackwater.loadgen.cli.main", *map(str, words)],
        capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = ["job_id,num_gpu,submit_time,iterations,model_name,duration,interval"]
    rows += [f"{i},{1 << i % 4},{7 * i},10,vgg19,{30 + 40 * (i % 5)},1" for i in range(24)]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_several_policies_in_processes_of_their_own(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "report"
    done = loadgen(
        "simulate", trace, "--policy", "fifo", "--policy", "tiresias-las", "--nodes", 2,
        "--restart-s", 5, "--report", folder, "--json", "--processes", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert [list(one) for one in printed] == [SUMMARY, SUMMARY]
    assert json.loads((folder / "summary.json").read_text()) == printed
    assert [one["completed"] for one in printed] == [24, 24]
    counts = json.loads((folder / "counts.json").read_text())
    assert [one["policy"] for one in counts] == ["fifo", "tiresias-las"]
    assert all(one["restarts"] >= 0 and one["decisions"] > 0 for one in counts)
    audited = loadgen("audit", folder, "--trace", trace)
    assert audited.returncode == 0, audited.stdout
    log = folder / "events-fifo.json"
    log.write_text(log.read_text().replace('"work_after":30.0', '"work_after":29.0', 1))
    audited = loadgen("audit", folder)
    assert audited.returncode == 1
    assert "29.0 of 30.0 done" in audited.stdout


def refused(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert done.returncode == code
    assert done.stdout == ""
    for part in parts:
        assert part in lines[0]


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    trace: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    done = loadgen("simulate", trace, "--nodes", 2, "--report", taken)
    refused(done, 65, f"--report {taken}", "name another folder")
    (tmp_path / "report" / "summary.json").mkdir(parents=True)
    done = loadgen("simulate", trace, "--nodes", 2, "--report", tmp_path / "report")
    refused(done, 65, "cannot be written (Is a directory)")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--restart-s", "inf"), ("--checkpoint-s", "nan"), ("--mtbf-s", "-1"), ("--repair-s", "0")],
)
def test_times_are_seconds(trace: Path, option: str, value: str) -> None:
    done = loadgen("simulate", trace, "--nodes", 2, option, value)
    refused(done, 2, option, "loadgen simulate --help")


def test_a_job_without_a_duration_is_not_taken_for_a_short_one(tmp_path: Path) -> None:
    path = tmp_path / "pollux.csv"
    path.write_text("name,time,application,num_replicas,batch_size\nncf-1,5,ncf,1,32768\n")
    done = loadgen("simulate", path)
    refused(done, 65, "ncf-1 has no duration", "--job-model profiles")


def test_what_is_no_event_log_cannot_be_audited(trace: Path, tmp_path: Path) -> None:
    refused(loadgen("audit", trace), 65, "trace.csv is not an event log")
    foreign = tmp_path / "events-x.json"
    foreign.write_text('{"traceEvents": []}')
    refused(loadgen("audit", tmp_path), 65, "events-x.json is not an event log")


def test_a_workload_goes_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "lin.csv"
    done = loadgen("generate", "lin", "--set", "jobs=20", "--seed", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    assert loadgen("generate", "lin", "--set", "jobs=20", "--seed", 3).stdout == out.read_text()
    refused(loadgen("generate", "lin", "--out", tmp_path), 65, "--out", "name another file")
