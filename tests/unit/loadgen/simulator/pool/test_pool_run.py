"""The pool under the event heap: what is required, allocated, shared and given back."""

from pathlib import Path

import msgspec
import pytest

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.loadgen.cli.simulate_pool import settings_for, simulate_pool
from slackwater.loadgen.simulator.options import Options
from slackwater.loadgen.simulator.pool.minutes import (
    Minutes,
    area,
    minutes,
    ratios,
    required_series,
    summarize,
)
from slackwater.loadgen.simulator.pool.profiles import (
    MODELS,
    SERVER_CORES,
    PoolJob,
    cost,
    draw_models,
    workers_of,
)
from slackwater.loadgen.simulator.pool.run import PoolOutcome, PoolRun, PoolSettings

SMALL = PoolSettings(aggregators=40, clusters=2, aggregators_max=20, plays=2)
TWO = [PoolJob("a", "vgg19", 2, 0.0, 4000.0), PoolJob("b", "vgg19", 2, 1000.0, 3000.0)]


def run(policy: str, jobs: list[PoolJob], settings: PoolSettings = SMALL) -> PoolOutcome:
    return PoolRun(policy, jobs, settings).run()


def held(outcome: PoolOutcome, at_s: float) -> int:
    return [count for from_s, count in outcome.allocated if from_s <= at_s][-1]


def test_static_allocates_exactly_what_is_required() -> None:
    outcome = run("static", TWO)
    found = minutes(outcome, TWO)
    assert found.allocated[:-1] == found.required[:-1]
    assert held(outcome, 500.0) == 2
    assert held(outcome, 2000.0) == 4
    assert outcome.migrations == {}


@pytest.mark.parametrize("policy", ["cyclic", "edf"])
def test_two_jobs_of_one_model_share_the_firsts_aggregators_after_profiling(policy: str) -> None:
    """Alone the first keeps its two; the second is profiled on two temporary ones for a hundred
    iterations, then both share two."""
    outcome = run(policy, TWO, msgspec.structs.replace(SMALL, scaling_s=0.0))
    assert held(outcome, 500.0) == 2
    assert held(outcome, 1050.0) == 4, "temporary ones count"
    assert held(outcome, 2000.0) == 2
    assert outcome.allocated[-1][1] == 0, "all is given back at the end"
    assert outcome.migrations["profiled"] == 1
    assert all(row.played >= 0.0 for row in outcome.rows if row.job == "a")


def test_with_a_period_what_is_idle_stays_until_its_end_and_serves_the_next() -> None:
    """Inception v4 does not fit VGG11's cycle and gets two of its own; when it has ended they idle
    until 3600."""
    jobs = [
        PoolJob("v", "vgg11", 2, 0.0, 9000.0),
        PoolJob("x", "inception4", 2, 100.0, 2000.0),
    ]
    period = msgspec.structs.replace(SMALL, scaling_s=3600.0)
    outcome = run("cyclic", jobs, period)
    assert held(outcome, 1900.0) > 2
    assert held(outcome, 3500.0) == held(outcome, 1900.0)
    assert held(outcome, 3700.0) == 2
    at_once = run("cyclic", jobs, msgspec.structs.replace(SMALL, scaling_s=0.0))
    assert held(at_once, 2100.0) == 2


def test_ours_packs_where_iterations_do_not_fit_a_cycle() -> None:
    """Inception v4 (0.9 s) and VGG11 (0.5 s): C / D = 1.8 would cost VGG11 44 %; by deadlines they
    share, and the slots show that nobody loses more than the limit."""
    jobs = [
        PoolJob("i", "inception4", 2, 0.0, 4000.0),
        PoolJob("v", "vgg11", 2, 100.0, 4000.0),
    ]
    settings = msgspec.structs.replace(SMALL, scaling_s=0.0, plays=4)
    paper, ours = run("cyclic", jobs, settings), run("edf", jobs, settings)
    assert held(ours, 2000.0) == 2 < held(paper, 2000.0)
    assert max(row.played for row in ours.rows) <= settings.loss_limit


def test_a_rerun_gives_the_same_and_nothing_is_leaked() -> None:
    models = draw_models(14, 3)
    jobs = [
        PoolJob(f"j{n}", model, 2 + 2 * (n % 2), 150.0 * n, 150.0 * n + 700.0 + 90.0 * n)
        for n, model in enumerate(models)
    ]
    for policy in ("static", "cyclic", "edf"):
        first, again = run(policy, jobs), run(policy, jobs)
        first.wall_s = again.wall_s = 0.0
        assert first == again
        assert first.allocated[-1][1] == 0
        assert max(row.loss for row in first.rows) < SMALL.loss_limit


def test_ratios_area_and_savings_are_those_of_the_definitions() -> None:
    jobs = [PoolJob("a", "vgg19", 2, 0.0, 120.0), PoolJob("b", "vgg19", 4, 60.0, 180.0)]
    assert required_series(jobs) == [(0.0, 2), (60.0, 6), (120.0, 4), (180.0, 0)]
    assert area(required_series(jobs), 0.0, 180.0) == 120 + 360 + 240
    outcome = PoolOutcome(
        "x", run("static", TWO).rows, [(0.0, 2), (60.0, 3), (120.0, 5)], [(0.0, 1)], {}, 0, 0, 0.0
    )
    found = minutes(outcome, jobs)
    assert (found.required, found.allocated) == ([6, 4, 0], [3, 5, 5])
    assert list(ratios(found)) == [0.5, 1.25]
    summary = summarize(outcome, jobs, found, 0.1)
    assert summary.saved == pytest.approx(1 - (2 + 3 + 5) * 60 / 720)
    assert (summary.below_one, summary.ratio_worst) == (0.5, 1.25)
    assert isinstance(found, Minutes)


def test_the_published_table_keeps_the_papers_bounds() -> None:
    """docs/readings.md: VGG19 at most half a server a job, AlexNet about 1.0 to 1.25."""
    assert cost("vgg19", 2).servers_used <= 0.5
    assert 1.0 <= cost("alexnet", 2).servers_used <= 1.25
    assert all(cost(m, 2).profile.iteration_s >= cost(m, 2).compute_s - 1e-9 for m in MODELS)
    assert [workers_of(gpus) for gpus in (2, 4, 8, 12, 16, 32)] == [2, 2, 2, 3, 4, 8]
    assert SERVER_CORES < 1.0


TRACE = """timestamp,duration,num_gpus,gpu_time,cluster
2017-09-04 10:00:00,3000.0,8,24000.0,aa
2017-09-04 10:05:00,2000.0,1,2000.0,aa
2017-09-04 10:10:00,2500.0,8,20000.0,bb
2017-09-04 10:20:00,1500.0,16,24000.0,bb
"""


def test_the_command_writes_its_report_and_the_same_bytes_again(tmp_path: Path) -> None:
    trace = tmp_path / "philly.csv"
    trace.write_text(TRACE)
    options = Options(
        trace=str(trace), policies=("static", "edf"), nodes=10,
        settings=("pool.plays=1", "edf.scaling_s=60"),
    )  # fmt: skip
    names = ("summary.json", "jobs.csv", "minutes.csv", "manifest.json", "allocated.png")
    seen = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        runs = simulate_pool(options, folder, processes=1, progress=False)
        assert [summary.jobs for _, _, summary in runs] == [3, 3], "the job on one GPU is not there"
        seen.append([(folder / n).read_bytes() for n in names if n != "summary.json"])
        assert all((folder / name).stat().st_size for name in names)
    assert seen[0] == seen[1]
    assert settings_for(options, "edf").scaling_s == 60.0
    assert settings_for(options, "static").plays == 1


def test_what_cannot_be_simulated_is_refused_by_name(tmp_path: Path) -> None:
    trace = tmp_path / "philly.csv"
    trace.write_text("\n".join(TRACE.splitlines()[:1] + TRACE.splitlines()[2:3]) + "\n")
    with pytest.raises(Rejected, match="no job of the trace has 2 GPUs"):
        simulate_pool(Options(trace=str(trace), policies=("edf",)), progress=False)
    with pytest.raises(ConfigRejected, match="no placement policy 'tiresias-las'"):
        simulate_pool(Options(trace=str(trace)), progress=False)
    wrong = Options(trace=str(trace), policies=("edf",), settings=("edf.periods=3",))
    with pytest.raises(ConfigRejected, match="options are aggregators"):
        settings_for(wrong, "edf")
    with pytest.raises(ConfigRejected, match=r"pool\.NAME=VALUE"):
        settings_for(msgspec.structs.replace(wrong, settings=("cyclic.plays=3",)), "edf")


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("pool.aggregators=0", "`int` >= 1"),  # Waited for ever.
        ("pool.clusters=0", "`int` >= 1"),  # Saved 100 %.
        ("pool.scaling_s=-5", "`float` >= 0"),
        ("pool.scaling_s=0.001", r"scaling_s is 0 \(none\) or at least 1"),
        ("pool.kills=nan", "`float`"),
        ("pool.stragglers=inf", "`float` <="),
        ("pool.loss_limit=2", "`float` < 1"),
        ("pool.plays=-1", "`int` >= 0"),
        ("pool.window_iterations=0", "`int` >= 1"),
        ("pool.feedback=always", r"feedback \(none\|scheme\|slots\)"),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused_with_what_is_good(setting: str, why: str) -> None:
    options = Options(trace="t.csv", policies=("cyclic",), settings=(setting,))
    with pytest.raises(ConfigRejected, match=why):
        settings_for(options, "cyclic")
