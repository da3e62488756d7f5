"""Published comparisons come from the command line: presets, and times as the trace has them."""

import json
from pathlib import Path

import pytest
from tests.conftest import public_traces
from typer.testing import CliRunner

from slackwater.loadgen.cli.commands import app

TRACE = "job_id,submit_s,gpus,duration_s\na,37,1,100\nb,40,2,50\n"


def _simulate(*words: str) -> list[dict[str, float]]:
    done = CliRunner().invoke(app, ["simulate", *words, "--json"])
    assert done.exit_code == 0, done.output
    found: list[dict[str, float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("rebase", [True, False])
def test_no_rebase_leaves_times_as_the_trace_has_them(tmp_path: Path, rebase: bool) -> None:
    """Rounds fall at fixed ticks, so a shift of 37 s is another experiment."""
    trace, report = tmp_path / "t.csv", tmp_path / "report"
    trace.write_text(TRACE)
    words = ["--rebase" if rebase else "--no-rebase", "--policy", "tiresias-artifact"]
    (summary,) = _simulate(str(trace), *words, "--report", str(report))
    # The first round is at 0 s or at 60 s.
    assert summary["avg_jct_s"] == ((100 + 107) / 2 if rebase else (123 + 70) / 2)
    audited = CliRunner().invoke(app, ["audit", str(report), "--trace", str(trace)])
    assert audited.exit_code == 0, audited.output


def test_an_option_beside_a_preset_wins(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(TRACE)
    words = ["--preset", "pollux-artifact", "--policy", "fifo"]
    (own,) = _simulate(str(trace), *words, "--job-model", "fixed")
    assert own["avg_jct_s"] == 30 + (100 + 50) / 2
    (free,) = _simulate(str(trace), *words, "--job-model", "fixed", "--start-s", "0")
    assert free["avg_jct_s"] == (100 + 50) / 2


def test_a_preset_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "t.csv", "--preset", "sia"])
    assert done.exit_code == 2
    assert "--preset sia: choose one of pollux-artifact" in done.stderr


@pytest.mark.traces
@pytest.mark.parametrize(("workload", "published_s"), [(1, 4087.0625), (6, 5301.875)])
def test_the_preset_gives_the_published_average(workload: int, published_s: float) -> None:
    """Optimus with the artifact's conditions; three seconds of reading and running."""
    folder = public_traces() / "pollux"
    if not folder.is_dir():
        pytest.skip(f"Pollux's traces are absent ({folder}); set SLACKWATER_TRACES")
    trace = folder / "workloads" / f"workload-{workload}.csv"
    knobs = ["--set", f"profiles.folder={folder / 'profiles'}"]
    (summary,) = _simulate(str(trace), "--preset", "pollux-artifact", "--policy", "optimus", *knobs)
    assert summary["avg_jct_s"] == pytest.approx(published_s, rel=0.002)
