"""An Agent's turns: every instant is computing, on its way up, at the server, or on its way down
(Lin et al. 2018, section III-A)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.agent.link_times import Link
from slackwater.agent.turn_times import SKIPPED, TurnClock


class Now:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


async def turn(now: Now, clock: TurnClock, iteration: int, times: tuple[float, ...]) -> None:
    link = Link(now, clock)
    worker_s, uplink_s, server_s, downlink_s = times
    now.s += worker_s
    clock.pushed(0)
    async with link.pushing(8):
        now.s += uplink_s
    now.s += server_s
    async with link.pulling(8):
        now.s += downlink_s
    clock.answered(0, iteration)


async def test_a_turn_is_computing_pushing_waiting_and_pulling() -> None:
    now = Now()
    clock = TurnClock(now)
    for iteration in range(1, SKIPPED + 4):
        await turn(now, clock, iteration, (0.3, 0.1, 0.01, 0.12))
    now.s += 5.0  # It computes on: not a whole turn yet.
    seen = clock.take()
    assert seen.turns == 3
    assert seen.worker_s == pytest.approx(0.9)
    assert seen.uplink_s == pytest.approx(0.3)
    assert seen.server_s == pytest.approx(0.03)
    assert seen.downlink_s == pytest.approx(0.36)
    assert clock.take().turns == 0


async def test_iterations_that_a_restart_brings_at_once_are_not_a_turn() -> None:
    now = Now()
    clock = TurnClock(now)
    clock.answered(0, 57)
    now.s += 9.0
    for iteration in range(58, 58 + SKIPPED):
        await turn(now, clock, iteration, (0.3, 0.1, 0.01, 0.12))
    assert clock.take().turns == 1


steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "answer", "up", "down", "up ends", "down ends"]),
        st.integers(0, 2),
        st.floats(0.0, 1.0),
    ),
    max_size=60,
)


@given(steps)
def test_whole_turns_are_at_most_the_time_that_passed(
    found: list[tuple[str, int, float]],
) -> None:
    """Buckets overlap as they like: the four sums are never more than the time, and nothing is
    counted twice."""
    now = Now()
    clock = TurnClock(now)
    iterations, open_ = [0, 0, 0], {"up": 0, "down": 0}
    for what, bucket, after_s in found:
        now.s += after_s
        match what:
            case "push":
                clock.pushed(bucket)
            case "answer":
                iterations[bucket] += 1
                clock.answered(bucket, iterations[bucket])
            case "up" | "down":
                open_[what] += 1
                getattr(clock, what)(1)
            case _:
                way = what.split()[0]
                if open_[way]:
                    open_[way] -= 1
                    getattr(clock, way)(-1)
    seen = clock.take()
    spent_s = seen.worker_s + seen.uplink_s + seen.server_s + seen.downlink_s
    assert spent_s <= now.s + 1e-9
    assert min(seen.worker_s, seen.uplink_s, seen.server_s, seen.downlink_s) >= 0.0
