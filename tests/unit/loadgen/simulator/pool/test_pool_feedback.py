"""Monitor windows under the event heap: the controller's own feedback repairs what is lost."""

from functools import cache
from random import Random

import msgspec
import pytest

from slackwater.loadgen.simulator.pool.feedback import LossRecord, Mode
from slackwater.loadgen.simulator.pool.profiles import PoolJob, cost, draw_models
from slackwater.loadgen.simulator.pool.run import PoolOutcome, PoolRun, PoolSettings

SMALL = PoolSettings(aggregators=40, clusters=1, aggregators_max=40, plays=0, scaling_s=0.0)
LIMIT = SMALL.loss_limit
SHRINKS = [
    PoolJob("long", "vgg19", 2, 0.0, 3000.0),
    PoolJob("mid", "awd-lm", 2, 300.0, 9000.0),
    PoolJob("short", "alexnet", 2, 600.0, 9000.0),
]
"""AlexNet iterates 7.25 times in VGG19's second. When that has ended, it iterates 6.76 times in
AWD-LM's cycle, and loses 11 %."""
INNOCENT = [
    PoolJob("long", "vgg19", 2, 0.0, 3000.0),
    PoolJob("stretched", "vgg11", 2, 300.0, 9000.0),
    *(PoolJob(f"new{n}", "awd-lm", 2, 600.0 + 200.0 * n, 9000.0) for n in range(4)),
]
"""VGG11 iterates twice in VGG19's second, and once in AWD-LM's cycle, which is shorter."""
FIVE = [PoolJob(f"v{n}", "vgg19", 2, 200.0 * n, 6000.0) for n in range(5)]


@cache
def run(mode: Mode, jobs: str = "five", policy: str = "cyclic") -> PoolOutcome:
    chosen = {"five": FIVE, "shrinks": SHRINKS, "innocent": INNOCENT}[jobs]
    return PoolRun(policy, chosen, msgspec.structs.replace(SMALL, feedback=mode)).run()


def window_s(model: str) -> float:
    """A window of an iteration that has become half as long again, and its report."""
    return SMALL.window_iterations * cost(model, 2).profile.iteration_s * 1.5 + 5.0


def test_what_the_slots_show_is_reverted_until_nobody_is_beyond_the_limit() -> None:
    """Five VGG19 fill two aggregators and, run as they come, lose more than the limit there;
    without feedback for ever, with it for a few windows."""
    without, repaired = run("none"), run("slots")
    assert sum(row.reverts for row in repaired.rows) > 0
    assert repaired.migrations["reverted"] > 0
    assert max(row.beyond_longest_s for row in repaired.rows) <= 6 * window_s("vgg19")
    assert sum(row.reverts for row in without.rows) == 0
    assert "reverted" not in without.migrations


def test_by_deadline_there_is_nothing_to_repair() -> None:
    outcome = run("slots", policy="edf")
    assert max(row.loss for row in outcome.rows) <= LIMIT
    assert sum(row.reverts for row in outcome.rows) == 0


def test_a_cycle_that_shrinks_is_repaired_within_a_window_of_each_revert() -> None:
    without, repaired = run("none", "shrinks"), run("scheme", "shrinks")
    longest_s = max(row.beyond_longest_s for row in without.rows)
    assert longest_s > 1000.0, "the case shows the harm"
    assert max(row.beyond_longest_s for row in repaired.rows) <= 3 * window_s("vgg19")


def test_whom_a_shrunk_cycle_stretches_is_moved_itself_and_no_newer_job_for_it() -> None:
    """Undoing assignments, the newest first, took a window for each of them: eleven in a trace of
    two months, 1,132 s for one VGG11."""
    without, repaired = run("none", "innocent"), run("scheme", "innocent")
    assert max(row.beyond_longest_s for row in without.rows) > 1000.0, "the case shows the harm"
    rows = {row.job: row for row in repaired.rows}
    assert rows["stretched"].loss > 0.4
    assert rows["stretched"].reverts == 1
    window_s = SMALL.window_iterations * cost("vgg11", 2).profile.iteration_s / (1.0 - 0.47) + 5.0
    assert rows["stretched"].beyond_longest_s <= 3 * window_s
    assert sum(row.reverts for row in repaired.rows) == 1


def test_losses_are_summed_over_time_and_the_longest_time_beyond_the_limit_is_kept() -> None:
    felt = LossRecord(since_s=100.0)
    for loss, at_s in ((0.2, 110.0), (0.05, 140.0), (0.3, 150.0), (0.3, 155.0), (0.0, 160.0)):
        felt.note(loss, 0.1, at_s)
    assert felt.lost_s == pytest.approx(0.2 * 30 + 0.05 * 10 + 0.3 * 10)
    assert (felt.worst, felt.beyond_longest_s, felt.beyond_s) == (0.3, 30.0, -1.0)


@pytest.mark.parametrize("pack", [False, True], ids=["keeps", "packs"])
def test_a_lone_job_keeps_its_servers_unless_it_is_told_to_pack(pack: bool) -> None:
    """A VGG19 that uses a third of each of its two servers; by deadline one is enough, at a loss
    below the limit."""
    settings = msgspec.structs.replace(SMALL, pack_alone=pack, plays=2)
    outcome = PoolRun("edf", [PoolJob("a", "vgg19", 2, 0.0, 4000.0)], settings).run()
    held = [count for from_s, count in outcome.allocated if from_s <= 2000.0][-1]
    assert held == (1 if pack else 2)
    assert outcome.rows[0].played <= LIMIT
    assert outcome.allocated[-1][1] == 0


# A day --------------------------------------------------------------------------------------------


def hours(count: float, seed: int, policy: str, kills: float) -> PoolRun:
    """Jobs that come and go, eight an hour, while aggregators die and jobs' own machines slow."""
    rng = Random(f"day {seed}")
    models = draw_models(int(8 * count), seed)
    starts_s = sorted(rng.uniform(0.0, 3600.0 * count) for _ in models)
    jobs = [
        PoolJob(f"j{n}", model, rng.choice((2, 2, 4)), at_s, at_s + rng.expovariate(1 / 2400) + 200)
        for n, (model, at_s) in enumerate(zip(models, starts_s, strict=True))
    ]
    settings = msgspec.structs.replace(
        SMALL, clusters=2, aggregators=30, kills=kills, stragglers=100.0, check=True
    )
    return PoolRun(policy, jobs, settings, seed)


def check_day(run: PoolRun) -> None:
    outcome = run.run()  # Its checker raises where something does not hold.
    assert outcome.allocated[-1][1] == 0
    assert min(run.faults.kills, run.faults.stragglers) > 0
    for row in outcome.rows:
        if row.job not in run.faults.slowed:
            assert row.beyond_longest_s <= 3 * window_s("bert-large"), row


@pytest.mark.parametrize("policy", ["cyclic", "edf"])
def test_an_hour_of_deaths_and_slow_machines_breaks_nothing(policy: str) -> None:
    check_day(hours(1.0, 1, policy, 100.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["cyclic", "edf"])
def test_a_day_of_deaths_and_slow_machines_breaks_nothing(policy: str) -> None:
    check_day(hours(24.0, 2, policy, 50.0))
