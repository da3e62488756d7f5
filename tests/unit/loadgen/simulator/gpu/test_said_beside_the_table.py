"""A trace that cannot be taken at its word is refused, or the result says how it was taken."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slackwater.loadgen.cli.commands import app

TRACE = "job_id,submit_s,gpus,duration_s,priority\na,0,2,100,1\nb,40,2,50,{}\n"
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,\
deletion_time,scheduled_time
p0,1000,1000,1,1000,,LS,Running,0,100,0
p1,1000,1000,1,460,,LS,Running,5,105,5
p2,1000,1000,1,10,,BE,Running,5,105,5
p3,1000,1000,2,1000,,LS,Running,5,105,5
"""


def _simulate(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["simulate", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_shares_of_a_gpu_are_counted(tmp_path: Path) -> None:
    trace, report = tmp_path / "openb_pod_list.csv", tmp_path / "report"
    trace.write_text(PODS)
    code, said = _simulate(trace, "--report", report)
    assert code == 0
    note = "2 of 4 jobs ask for a share of one GPU (gpu_milli) and are given a whole one"
    assert f"note: {note}" in said
    assert json.loads((report / "manifest.json").read_bytes())["notes"] == [note]


@pytest.mark.parametrize("mode", ["rigid", "malleable", "moldable"])
def test_linear_speed_ups_of_durations_are_said(tmp_path: Path, mode: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE.format(2))
    code, said = _simulate(trace, "--mode", mode, "--policy", "hell")
    assert code == 0
    assert ("N times as fast on N times its GPUs" in said) == (mode != "rigid")


def test_sharing_without_stage_times_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE.format(2))
    code, said = _simulate(trace, "--colocate", 2)
    assert code == 65
    assert "no job of" in said
    assert "stages_s" in said


@pytest.mark.parametrize(("priority", "code"), [("2", 0), ("2.0", 0), ("2.7", 65), ("high", 65),
                                                ("inf", 65), ("nan", 65)])  # fmt: skip
def test_priorities_are_whole_numbers(tmp_path: Path, priority: str, code: int) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE.format(priority))
    found, said = _simulate(trace, "--priorities")
    assert found == code, said
    assert (f"job b has priority '{priority}'; give whole numbers" in said) == (code != 0)
