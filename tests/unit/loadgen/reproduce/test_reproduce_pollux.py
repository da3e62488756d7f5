"""The page of Pollux's experiments: every cell it needs is run, once, and put in its place."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from slackwater.loadgen.reproduce.page import stated
from slackwater.loadgen.reproduce.pollux import EXPERIMENTS, page, run_cells
from slackwater.loadgen.reproduce.pollux_cells import WORKLOADS, Cell, Outcome, simulate


def outcome(jct_s: float) -> Outcome:
    return Outcome(
        avg_jct_s=jct_s, median_jct_s=1.0, p99_jct_s=2.0, makespan_s=3.0, max_fairness=1.5,
        fair_part=0.99, restarts=160, capacity_gpu_s=3600.0, run_s=7200.0,
        application_jct_s={"cifar10": jct_s, "imagenet": jct_s},
    )  # fmt: skip


def published(name: str) -> dict[str, Any]:
    return {"avgs": {f"workload-{w}": 1000.0 for w in WORKLOADS}}


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_an_experiment_runs_every_cell_that_it_shows(name: str) -> None:
    """Rows that ask for a cell that nobody ran would fail with its key."""
    results = {cell.key: outcome(900.0 + i) for i, cell in enumerate(EXPERIMENTS[name].cells())}
    text = page([name], results, published)
    assert f"## {EXPERIMENTS[name].heading}" in text
    assert list(stated(text))


def test_the_best_policy_and_the_ratio_are_said() -> None:
    results = {
        cell.key: outcome(1100.0 if cell.policy == "pollux" else 1200.0)
        for cell in EXPERIMENTS["load"].cells()
    }
    text = page(["load"], results, published)
    assert "1000 / 1100 (1.100) | 1000 / 1200 (1.200) | 1000 / 1200 (1.200) | pollux |" in text
    rows = {row.what: row for row in stated(text)}
    assert rows["pollux best, five workloads at four loads"].met == "yes"


def test_any_workload_that_is_off_is_a_miss() -> None:
    """Not only the workload that the artifact's README shows."""
    results = {cell.key: outcome(1000.0) for cell in EXPERIMENTS["load"].cells()}
    off = Cell(policy="optimus", workload=3, load="2.0")
    results[off.key] = outcome(900.0)
    rows = [row for row in stated(page(["load"], results, published)) if "JCT (s)" in row.what]
    (miss,) = (row for row in rows if row.met != "yes")
    assert "load 2.0, optimus, workload 3" in miss.what
    assert (miss.ours, miss.ratio) == ("900", "0.900")


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    """Everything is in the results file, so no trace is read: there is none."""
    cell = Cell(policy="optimus", workload=6)
    kept = tmp_path / "results.json"
    kept.write_bytes(msgspec.json.encode({cell.key: outcome(7.0)}))
    found = run_cells([cell], tmp_path, 1, kept, Console(quiet=True))
    assert found[cell.key].avg_jct_s == 7.0


@pytest.mark.traces
def test_a_cell_is_the_artifacts_run(traces_dir: Path) -> None:
    found = simulate(Cell(policy="optimus", workload=6), str(traces_dir))
    assert found.avg_jct_s == pytest.approx(5301.875, abs=1.0)
