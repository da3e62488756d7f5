"""Tiresias' testbed workload and sensitivity: rows that say what the runs say."""

from math import inf

import msgspec
import pytest

from slackwater.loadgen.reproduce import tiresias_sensitivity as sensitivity
from slackwater.loadgen.reproduce import tiresias_testbed as testbed
from slackwater.loadgen.reproduce.simulated import Run, simulate
from slackwater.loadgen.reproduce.verdict import UNLIKE


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(
        "fifo",
        {
            "trace": "generate:tiresias", "nodes": 15, "gpus_per_node": 4, "overhead": "none",
            "seed": 1,
        },
    )  # fmt: skip


def with_figures(run: Run, **figures: float) -> Run:
    return run._replace(summary=msgspec.structs.replace(run.summary, **figures))


def test_a_run_names_the_command_that_repeats_it(run: Run) -> None:
    assert run.command == (
        "loadgen simulate generate:tiresias --policy fifo --nodes 15 --gpus-per-node 4 "
        "--overhead none --seed 1"
    )
    assert run.summary.jobs == len(run.figures) == 480


def test_the_testbed_s_own_figures_have_no_verdict(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(testbed, "SEEDS", 1)
    rows = {row.what: row for row in testbed.rows(tmp_path)}  # type: ignore[arg-type]
    simulated = rows["fifo / tiresias-las, average JCT, their simulator"]
    assert simulated.goal == "at least 5.11 (published)"
    assert 2 < float(simulated.ours) < 5.11
    assert simulated.met == "**no**"
    for what, row in rows.items():
        assert (row.met == UNLIKE) == ("their simulator" not in what)
    queueing = rows["fifo, queueing of jobs on several GPUs: average, median, p95 (s)"]
    assert queueing.goal.startswith("8,146, 7,464, 15,327 (published; their testbed")


def test_limits_that_matter_more_than_published_are_a_miss(run: Run) -> None:
    even = {limit: with_figures(run, avg_jct_s=100.0) for limit in sensitivity.LIMITS}
    assert [row.met for row in sensitivity._of_limits("tiresias-las", dict(even))] == ["yes"] * 2
    half_an_hour, largest = sensitivity._of_limits(
        "tiresias-las", even | {1800: with_figures(run, avg_jct_s=127.0)}
    )
    assert (half_an_hour.ours, half_an_hour.met) == ("1.270", "**no**")
    assert largest.met == "yes"
    (spread,) = sensitivity._of_limits(
        "tiresias-gittins", even | {1800: with_figures(run, avg_jct_s=127.0)}
    )
    assert (spread.ours, spread.met) == ("1.270", "**no**")


def test_queues_and_knobs(run: Run) -> None:
    queues = {
        k: with_figures(run, avg_jct_s=seconds) for k, seconds in ((2, 100), (3, 99), (4, 94))
    }
    three, four = sensitivity._of_queues("tiresias-las", queues)
    assert (three.met, four.met) == ("yes", "**no**")
    knobs = {knob: with_figures(run, p95_jct_s=50.0) for knob in (1.0, 2.0, inf)}
    p95, largest = sensitivity._of_knobs("tiresias-gittins", knobs)
    assert p95.met == "yes"
    assert (largest.ours, largest.met) == ("1.000", "**no**")
