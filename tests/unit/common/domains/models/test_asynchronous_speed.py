"""X(k) of an asynchronous job by the times that its Agents measure (Lin et al. 2018, III, VII)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.domains.models.asynchronous_speed import profile_of, shares_of, speeds
from slackwater.common.domains.models.queueing import (
    StepTimes,
    solve,
    throughputs,
    undisturbed,
)
from slackwater.schemas.steps import StepProfile, TurnTimes

seconds = st.floats(1e-3, 1.0)


def seen_by(step: StepTimes, workers: int) -> StepTimes:
    """Reckon by plain mean value analysis how long a task stays at each station."""
    times_s = [step.uplink_s, step.server_s, step.downlink_s]
    tasks, stays_s = [0.0] * 3, times_s
    for n in range(1, workers + 1):
        stays_s = [own_s * (1 + there) for own_s, there in zip(times_s, tasks, strict=True)]
        rate = n / (step.worker_s + sum(stays_s))
        tasks = [rate * stay_s for stay_s in stays_s]
    return StepTimes(step.worker_s, stays_s[1], stays_s[0], stays_s[2])


@given(seconds, seconds, seconds, seconds, st.integers(1, 8))
def test_the_waiting_of_several_workers_is_reckoned_out(
    worker_s: float, uplink_s: float, server_s: float, downlink_s: float, workers: int
) -> None:
    step = StepTimes(worker_s, server_s, uplink_s, downlink_s)
    found = undisturbed(seen_by(step, workers), workers)
    exact = throughputs(step, workers + 4)[1:]
    assert throughputs(found, workers + 4)[1:] == pytest.approx(exact, rel=0.01)


def test_a_worker_alone_waits_for_nobody() -> None:
    alone = StepTimes(0.3, 0.01, 0.16, 0.16)
    assert undisturbed(alone, 1) == alone
    assert undisturbed(StepTimes(0.3, 0.0, 0.1, 0.1), 3).server_s == 0.0


def test_a_profile_is_of_means_and_tells_x_of_one_as_it_was_measured() -> None:
    times = TurnTimes(turns=50, worker_s=12.5, uplink_s=4.0, server_s=0.5, downlink_s=4.0)
    profile = profile_of(times, 1, (300, 100))
    assert profile.worker_s == pytest.approx(0.25)
    assert profile.shares == (0.75, 0.25)
    assert speeds(profile, 6)[1] == pytest.approx(50 / 21.0)
    even = StepProfile(worker_s=0.25, uplink_s=0.08, server_s=0.01, downlink_s=0.08, turns=50)
    assert speeds(even, 6)[6] == pytest.approx(
        solve([StepTimes(0.25, 0.01, 0.08, 0.08)] * 6).throughput
    )


def test_unequal_servers_are_slower_with_many_workers_than_equal_ones() -> None:
    """They are as fast alone, by measurement: the larger one fills up first."""
    both = [
        speeds(
            StepProfile(
                worker_s=0.1, uplink_s=0.1, server_s=0.0, downlink_s=0.1, turns=40, shares=shares
            ),
            12,
        )
        for shares in ((0.5, 0.5), (0.8, 0.2))
    ]
    assert both[0][1] == pytest.approx(both[1][1])
    assert both[0][12] > both[1][12]


def test_shares_are_of_servers_that_count() -> None:
    assert shares_of((10, 0)) == shares_of(()) == shares_of((5,)) == ()
    assert shares_of((1, 3)) == (0.75, 0.25)
    assert shares_of((1,) * 13) == ()


def test_the_plain_analysis_is_the_models() -> None:
    step = StepTimes(0.2, 0.02, 0.1, 0.1)
    seen = seen_by(step, 5)
    assert 5 / seen.total_s == pytest.approx(solve([step] * 5).throughput)
