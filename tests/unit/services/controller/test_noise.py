"""Noise of a busy machine in iterations, and the controller's answer: profiles that were too long
are corrected and what followed from them is decided again; one busy moment undoes nothing."""

import msgspec
import pytest
from tests.unit.services.controller.harness import Harness, Pool, last, placed

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import Profile, ReleaseJob
from slackwater.schemas.telemetry import JobProfiled
from slackwater.services.controller import feedback

TRUE_S = 0.134
NOISY_S = 0.1727
"""The iteration of the same job, profiled while twenty processes started."""


def sharing(neighbour_s: float, noisy_s: float = NOISY_S) -> Harness:
    """A slow neighbour with its own two, then "fast" on what its profile says."""
    harness = Harness(Pool(8))
    harness.place("slow", [0.002, 0.002], neighbour_s)
    harness.pass_time(5)
    harness.place("fast", [0.0005, 0.0005], noisy_s)
    harness.pass_time(60)
    return harness


def test_a_profile_that_was_too_long_is_lowered_and_losses_are_judged_by_the_new_one() -> None:
    """No job is faster shared than alone. 4 x .134 holds both .134 and .1727 within the limit."""
    harness = sharing(4 * TRUE_S)
    assert set(harness.homes("fast")) <= set(harness.homes("slow"))
    for _ in range(5):
        harness.window("fast", TRUE_S, times=1)
        harness.pass_time(3)
    profile = harness.stored["fast"].profile
    assert profile is not None
    assert profile.iteration_s == TRUE_S, "in the record, so that a restart knows"
    told = last([fact for fact in harness.facts if fact.fact == "corrected"], JobEvent)
    assert (told.job, told.detail) == ("fast", {"iteration_s": "0.134", "profiled_s": "0.1727"})
    assert "reverted" not in harness.said("fast")
    harness.pass_time(60)
    harness.window("fast", 0.19, times=1)
    reverted = last([fact for fact in harness.facts if fact.fact == "reverted"], JobEvent)
    assert (reverted.job, reverted.detail["loser"]) == ("fast", "fast")
    assert reverted.detail["loss"] == f"{1 - TRUE_S / 0.19:.4f}"


def test_one_window_that_was_shorter_lowers_nothing() -> None:
    harness = sharing(4 * TRUE_S)
    for iteration_s in (NOISY_S, TRUE_S, NOISY_S, TRUE_S, NOISY_S * 0.99):
        harness.window("fast", iteration_s, times=1)
    profile = harness.stored["fast"].profile
    assert profile is not None
    assert profile.iteration_s == NOISY_S


def test_a_job_that_its_noisy_profile_kept_from_sharing_shares_once_it_is_corrected() -> None:
    """1.017 / .1727 is 5.89, which would lose 15 %; 1.017 / .134 is 7.59, which loses 8 %."""
    harness = sharing(1.017)
    alone = set(harness.homes("fast"))
    assert not alone & set(harness.homes("slow"))
    harness.window("fast", TRUE_S)
    harness.migrated("fast")
    assert set(harness.homes("fast")) <= set(harness.homes("slow"))
    harness.pass_time(60)
    assert not alone & set(harness.pool.records), "given back"


def test_a_job_that_its_corrected_profile_does_not_allow_where_it_is_leaves() -> None:
    """.35 holds two iterations of .1727 (1 % lost), and of .134 (23 % lost)."""
    harness = sharing(2 * NOISY_S + 0.003)
    assert set(harness.homes("fast")) <= set(harness.homes("slow"))
    harness.window("fast", TRUE_S)
    assert harness.stored["fast"].phase == "moving"
    harness.migrated("fast")
    assert not set(harness.homes("fast")) & set(harness.homes("slow"))


def test_positions_follow_a_corrected_iteration() -> None:
    """They are parts of it, of gaps that were measured in seconds."""
    harness = Harness(Pool(4))
    harness.ask(placed("j", 2))
    epoch = sum(place.location_epoch for place in harness.stored["j"].places)
    profile = Profile(iteration_s=NOISY_S, task_cpu_s=(0.001, 0.001), positions=(0.2, 0.9))
    harness.see(JobProfiled(job=JobId("j"), location_epoch=epoch, profile=profile))
    harness.window("j", TRUE_S)
    lowered = harness.stored["j"].profile
    assert lowered is not None
    assert lowered.positions == (pytest.approx(0.2 * NOISY_S / TRUE_S), 1.0)


def test_one_busy_window_undoes_nothing_and_two_in_succession_do() -> None:
    harness = sharing(4 * TRUE_S, TRUE_S)
    busy_s = TRUE_S / (1.0 - 0.17)
    for iteration_s in (busy_s, TRUE_S, busy_s, TRUE_S):
        harness.window("fast", iteration_s, times=1)
        harness.pass_time(5)
    assert "reverted" not in harness.said("fast")
    harness.window("fast", busy_s, times=1)
    harness.pass_time(5)
    harness.window("fast", busy_s, times=1)
    assert "reverted" in harness.said("fast")


def test_a_burst_that_reaches_into_the_next_window_undoes_nothing_and_a_beat_does() -> None:
    """The burst is over in the quieter half of the second window. What comes and goes with every
    window, because two jobs run in and out of step, is beyond the limit in three of them."""
    harness = sharing(4 * TRUE_S, TRUE_S)
    busy_s = TRUE_S / (1.0 - 0.17)
    for iteration_s in (busy_s, busy_s, TRUE_S, busy_s, busy_s, TRUE_S):
        harness.window("fast", iteration_s, times=1, quieter_half_s=TRUE_S)
        harness.pass_time(5)
    assert "reverted" not in harness.said("fast")
    for _ in range(3):
        assert "reverted" not in harness.said("fast")
        harness.window("fast", busy_s, times=1, quieter_half_s=TRUE_S)
        harness.pass_time(5)
    assert "reverted" in harness.said("fast")


def test_a_window_before_the_last_change_confirms_nothing() -> None:
    harness = sharing(4 * TRUE_S, TRUE_S)
    busy_s = TRUE_S / (1.0 - 0.17)
    harness.window("fast", busy_s, times=1)
    harness.place("third", [0.0005, 0.0005], TRUE_S)
    assert set(harness.homes("third")) & set(harness.homes("fast"))
    harness.pass_time(60)
    harness.window("fast", busy_s, times=1)
    assert not any(fact.fact == "reverted" for fact in harness.facts)
    harness.window("fast", busy_s, times=1)
    assert "reverted" in harness.said("third"), "the newest assignment"


def test_what_is_lost_beyond_doubt_is_undone_at_once() -> None:
    harness = sharing(4 * TRUE_S, TRUE_S)
    loss = feedback.DOUBTLESS * 0.1 + 0.01
    harness.window("fast", TRUE_S / (1.0 - loss), times=1)
    assert "reverted" in harness.said("fast")


def protected() -> Harness:
    """Three jobs that share, each reverted as often as may be; one of them loses."""
    harness = Harness(Pool(12), reverts_max=1)
    harness.place("a", [0.02, 0.02])
    harness.pass_time(5)
    for id in ("b", "c"):
        harness.place(id, [0.02, 0.01])
        harness.pass_time(5)
        assert set(harness.homes(id)) & set(harness.homes("a"))
    for id, record in harness.stored.items():
        harness.stored[id] = msgspec.structs.replace(record, reverts=1)
    harness.restart()
    harness.pass_time(60)
    harness.window("a", 1.5)
    harness.migrated("a")
    return harness


def test_a_job_that_still_loses_when_nobody_may_be_reverted_gets_its_own_and_it_is_said() -> None:
    harness = protected()
    fact = last([fact for fact in harness.facts if fact.fact == "protected"], JobEvent)
    assert (fact.job, fact.detail["loser"], fact.detail["loss"]) == ("a", "a", "0.3333")
    own = set(harness.homes("a"))
    assert len(own) == 2, "as many as it asked for"
    assert not own & {home for id in ("b", "c") for home in harness.homes(id)}
    why = harness.waiting()["a"]
    assert why.startswith("has aggregators of its own: it lost 33% of its speed beside others")
    harness.restart()
    assert harness.waiting()["a"] == why, "it is in the record"


def test_the_aggregators_of_a_protected_job_are_shared_with_nobody_until_it_ends() -> None:
    harness = protected()
    own = set(harness.homes("a"))
    harness.pass_time(60)
    harness.place("d", [0.001])
    assert not own & set(harness.homes("d"))
    for id in ("b", "c", "d"):  # With every exit, the least loaded would be emptied.
        harness.ask(ReleaseJob(job=id))
        harness.pass_time(30)
    assert set(harness.homes("a")) == own == set(harness.pool.records)
    harness.ask(ReleaseJob(job="a"))
    harness.pass_time(30)
    assert not harness.pool.records


def test_a_protected_job_that_loses_an_aggregator_gets_another_of_its_own() -> None:
    harness = protected()
    (gone, stays) = sorted(set(harness.homes("a")))
    harness.pool.dead.add(AggregatorId(gone))
    harness.pass_time(40, gone)
    own = set(harness.homes("a"))
    assert stays in own
    assert gone not in own
    assert not own & {home for id in ("b", "c") for home in harness.homes(id)}
