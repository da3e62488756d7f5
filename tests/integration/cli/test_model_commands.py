"""`slackwater model`: JSON for scripts, a table for people, one line for bad input."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from slackwater.cli.model import app

MB_8 = ["--worker-s", ".029", "--server-s", ".018", "--uplink-s", ".072", "--downlink-s", ".072"]
KINDS = ["--machine", "3x.001:1e9", "--machine", "1x.0005:4e9"]
CRUISE = ["--instances", "1e6", "--batch", "1000", "--model-bytes", "2.5e8"]


def answer(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    ("method", "expected"), [("exact", 11.672), ("fcfs", 13.774), ("hybrid", 12.659)]
)
def test_throughput(method: str, expected: float) -> None:
    found = answer("throughput", *MB_8, "--workers", "6", "--method", method)
    assert found["workers"] == 6
    assert found["throughput"] == pytest.approx(expected, abs=5e-4)
    assert set(found["utilization"]) == {"worker", "uplink", "server", "downlink"}
    assert found["solver"] == "mva"


def test_different_workers_and_several_servers() -> None:
    times = ["--server-s", ".018", "--uplink-s", ".072", "--downlink-s", ".072"]
    found = answer("throughput", "--worker-s", ".029,.029,.2", *times)
    assert found["throughput"] == pytest.approx(9.12576, abs=5e-6)
    assert found["workers"] == 3
    halved = answer("throughput", *MB_8, "--workers", "6", "--servers", "2")
    assert halved["throughput"] > 1.5 * 11.672
    many = ",".join(str(0.03 + 0.01 * i) for i in range(20))
    found = answer("throughput", "--worker-s", many, *times)
    assert found["solver"] == "bard-schweitzer"
    assert found["approximate"] is True
    slow = ["--worker-s", ".05", "--uplink-s", ".03", "--downlink-s", ".03"]
    found = answer("throughput", *slow, "--server-s", ".02,.02,.3")
    assert found["approximate"] is True
    assert found["approximation"].startswith("times at the server differ")
    found = answer("throughput", *slow, "--server-s", ".02", "--workers", "3")
    assert (found["approximate"], found["approximation"]) == (False, "")


def test_configure() -> None:
    alike = ["--machines", "32", "--instance-s", ".001", "--bytes-per-s", "1e9"]
    found = answer("configure", *CRUISE, *alike, "--now-workers", "27")
    assert (found["workers"], found["servers"]) == (21, 11)
    assert found["epoch_s"] == pytest.approx(70.346, abs=5e-4)
    assert found["reconfigure"] is True
    assert answer("configure", *CRUISE, *alike, "--now-workers", "22")["reconfigure"] is False
    kinds = ["--machine", "4x.001:1e9", "--machine", "1x.0005:4e9"]
    found = answer("configure", *CRUISE, *kinds, "--blocks", "20")
    assert found["solver"] == "by-kind"
    by_kind_s = found["epoch_s"]
    assert sum(m["instances"] for m in found["machines"]) == pytest.approx(1e6)
    found = answer("configure", *CRUISE, *kinds, "--server-s", ".01")
    assert found["epoch_s"] > by_kind_s
    found = answer("configure", *CRUISE, *kinds, "--machine", "1x.0008:2e9", "--blocks", "20")
    assert found["solver"] == "milp"
    assert sum(m["instances"] for m in found["machines"]) == pytest.approx(1e6)
    whole = answer("configure", *CRUISE, *alike, "--whole-batches")
    assert whole["epoch_s"] >= 70.346 - 5e-4


def test_people_get_a_table() -> None:
    result = CliRunner().invoke(app, ["throughput", *MB_8, "--workers", "6"])
    assert "11.67" in result.stdout
    alike = ["--machines", "32", "--instance-s", ".001", "--bytes-per-s", "1e9"]
    result = CliRunner().invoke(app, ["configure", *CRUISE, *alike])
    assert "21 workers, 11 servers" in result.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["throughput", *MB_8, "--workers", "6", "--method", "magic"], "magic"),
        (["throughput", "--worker-s", "abc"], "abc"),
        (["throughput", "--worker-s", "1,2", "--workers", "3"], "2 values for 3"),
        (["throughput", "--worker-s", "1e308", "--uplink-s", "1e308"], "worker_s is 1e+308"),
        (["throughput", "--worker-s", "1e-320"], "1e-12 to 1e+10 seconds"),
        (["configure", *CRUISE, *KINDS, "--time-limit-s", "nan"], "time_limit_s is nan"),
        (["configure", *CRUISE], "--machine"),
        (["configure", *CRUISE, "--machine", "3by4"], "3by4"),
        (["configure", *CRUISE, "--machines", "1", "--bytes-per-s", "1"], "machines is 1"),
    ],
)
def test_bad_input_is_one_line(words: list[str], named: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_rework_by_the_published_forms() -> None:
    one = answer("rework", "--contraction", ".9", "--perturbation", "20:.1")
    assert one["rework_iterations"] == pytest.approx(5.697, abs=5e-4)
    two = ["--distance", "2", "--perturbation", "10:.05", "--perturbation", "30:.05"]
    found = answer("rework", "--contraction", ".9", *two)
    assert found["rework_iterations"] == pytest.approx(4.819, abs=5e-4)
    endless = answer("rework", "--contraction", ".9", "--each", ".001", "--accuracy", ".05")
    assert endless["rework_iterations"] == pytest.approx(1.798, abs=5e-4)


def test_the_interval_of_checkpoints() -> None:
    """Young's where all is lost: the square root of 2 x 10 s x 3600 s."""
    options = ["--iteration-s", ".5", "--checkpoint-s", "10", "--failures-per-h", "1"]
    found = answer("rework", "--contraction", ".99", *options)
    assert found["period_s"] == pytest.approx(268.33, abs=0.1)
    assert (
        answer("rework", "--contraction", ".99", *options, "--lost", ".25")["overhead"]
        < (found["overhead"])
    )
    shown = CliRunner().invoke(app, ["rework", "--contraction", ".99", *options])
    assert "a checkpoint every 268.3 s" in shown.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--perturbation, --each and --iteration-s"),
        (["--perturbation", "x"], "--perturbation 'x'"),
        (["--each", ".001", "--perturbation", "20:.1"], "give one of"),
        (["--each", ".01", "--accuracy", ".05"], "accuracy 0.05"),
        (["--iteration-s", "1"], "checkpoint_s 0.0"),
    ],
)
def test_rework_refuses_what_has_no_answer(words: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["rework", "--contraction", ".9", *words])
    assert result.exit_code == 2
    assert named in result.stderr.replace("\n", " ")
