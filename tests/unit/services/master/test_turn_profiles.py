"""Iterations of a job that takes turns, measured by what its nodes tell."""

import pytest

from slackwater.common.domains.models.group import Subtasks
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import PermitUse
from slackwater.services.master.turn_profiles import TurnProfile

N1, N2 = NodeId("n1"), NodeId("n2")
BOTH = ((N1, 1), (N2, 1))


def use(node: NodeId, computed_s: float, moved_s: float) -> PermitUse:
    return PermitUse(job=JobId("j"), node=node, computed_s=computed_s, moved_s=moved_s)


def train(
    profile: TurnProfile,
    from_s: int,
    to_s: int,
    cpu_s: dict[NodeId, float],
    network_s: float = 0.1,
    each_s: float = 0.5,
) -> None:
    """Tell it each second what iterations of `each_s` took so far."""
    for at_s in range(from_s, to_s):
        ended = int(at_s / each_s)
        for node, computing_s in cpu_s.items():
            profile.heard(use(node, computing_s * ended, network_s * ended), ended, float(at_s))


def test_the_slowest_node_counts() -> None:
    profile = TurnProfile()
    profile.lies(1, BOTH, 0.0)
    train(profile, 0, 5, {N1: 0.2, N2: 0.3})
    assert not profile.measured
    assert profile.known is None
    train(profile, 5, 12, {N1: 0.2, N2: 0.3})
    assert profile.measured
    assert profile.known is not None
    assert profile.known.machines == 2
    assert (profile.known.cpu_s, profile.known.network_s) == pytest.approx((0.3, 0.1))


def test_one_node_that_says_nothing_leaves_it_unmeasured() -> None:
    profile = TurnProfile()
    profile.lies(1, BOTH, 0.0)
    train(profile, 0, 30, {N1: 0.2})
    assert not profile.measured
    assert profile.known is None


def test_a_change_of_speed_is_followed_by_a_moving_average() -> None:
    profile = TurnProfile()
    profile.lies(1, ((N1, 1),), 0.0)
    train(profile, 0, 6, {N1: 0.1})
    assert profile.known == Subtasks(pytest.approx(0.1), pytest.approx(0.1), 1)
    # Three times as long from here on: a profile that lies is mended by what is measured.
    for at_s in range(6, 60):
        computed_s = 1.0 + 0.3 * 2 * (at_s - 5)
        profile.heard(use(N1, computed_s, 0.2 * at_s), 2 * at_s, float(at_s))
    assert profile.known is not None
    assert profile.known.cpu_s == pytest.approx(0.3, rel=0.05)


def test_elsewhere_it_is_measured_anew_and_what_was_known_counts_until_then() -> None:
    profile = TurnProfile()
    profile.lies(1, ((N1, 1),), 0.0)
    train(profile, 0, 12, {N1: 0.2})
    profile.decided = True
    profile.lies(1, ((N1, 1),), 12.0)
    assert profile.decided, "it lies where it lay"
    profile.lies(2, ((N2, 1),), 12.0)
    assert not profile.measured
    assert not profile.decided
    assert profile.known is not None
    train(profile, 12, 24, {N1: 9.0})
    assert not profile.measured, "late news of where it was"
    train(profile, 24, 40, {N2: 0.4})
    assert profile.known.machines == 1
    assert profile.known.cpu_s == pytest.approx(0.4)


@pytest.mark.parametrize("back", ["iterations", "sums"])
def test_a_job_that_goes_back_or_a_service_that_begins_anew_gives_no_negative_times(
    back: str,
) -> None:
    profile = TurnProfile()
    profile.lies(1, ((N1, 1),), 0.0)
    profile.heard(use(N1, 5.0, 5.0), 100, 0.0)
    profile.heard(
        use(N1, 9.0, 9.0) if back == "iterations" else use(N1, 0.5, 0.5),
        50 if back == "iterations" else 110,
        10.0,
    )
    assert not profile.measured
    base = 9.0 if back == "iterations" else 0.5
    iteration = 50 if back == "iterations" else 110
    profile.heard(use(N1, base + 1.0, base + 2.0), iteration + 10, 20.0)
    assert profile.known == Subtasks(pytest.approx(0.1), pytest.approx(0.2), 1)


def test_a_job_that_holds_no_permit_at_all_is_not_known() -> None:
    profile = TurnProfile()
    profile.lies(1, ((N1, 1),), 0.0)
    train(profile, 0, 20, {N1: 0.0}, network_s=0.0)
    assert profile.known is None
