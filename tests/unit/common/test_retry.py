"""The one retry, under virtual time: budgets, hints, jitter."""

import asyncio
import itertools
import random

from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, NobodyThere, Rejected, Unavailable
from slackwater.common.base.retry import next_wait_s, retry
from slackwater.common.shell.simulated_loop import SimClock, run_simulated


class Flaky:
    """Fails `failures` times, then answers; remembers when it was called."""

    def __init__(self, clock: SimClock, failures: int, error: Exception) -> None:
        self.clock, self.failures, self.error = clock, failures, error
        self.called_s: list[float] = []

    async def __call__(self) -> str:
        self.called_s.append(self.clock.now_s())
        if len(self.called_s) <= self.failures:
            raise self.error
        return "done"


def run(failures: int, error: Exception, budget_s: float, seed: int = 1) -> tuple[object, Flaky]:
    async def main() -> tuple[object, Flaky]:
        clock = SimClock(asyncio.get_running_loop())
        call = Flaky(clock, failures, error)
        try:
            found: object = await retry(
                call, budget_s=budget_s, rng=random.Random(seed), clock=clock
            )
        except (Unavailable, DeadlineExceeded, Rejected) as raised:
            found = raised
        return found, call

    return run_simulated(main())


def test_it_tries_until_it_succeeds() -> None:
    found, call = run(5, Unavailable("away", 0.0), budget_s=60.0)
    assert found == "done"
    waits_s = [b - a for a, b in zip(call.called_s, call.called_s[1:], strict=False)]
    assert len(waits_s) == 5
    assert all(limits.RETRY_WAIT_S_MIN <= wait <= limits.RETRY_WAIT_S_MAX for wait in waits_s)


def test_a_rejection_is_raised_at_once() -> None:
    found, call = run(1, Rejected("no"), budget_s=60.0)
    assert isinstance(found, Rejected)
    assert len(call.called_s) == 1


def test_the_last_error_comes_back_within_the_budget() -> None:
    """No wait is begun that would end after the budget."""
    error = DeadlineExceeded("slow", 0.0)
    found, call = run(10**6, error, budget_s=10.0)
    assert found is error
    spent_s = call.called_s[-1] - call.called_s[0]
    assert 10.0 - limits.RETRY_WAIT_S_MAX <= spent_s <= 10.0
    assert len(call.called_s) > 8


def test_no_budget_is_one_try() -> None:
    found, call = run(3, Unavailable("away"), budget_s=0.0)
    assert isinstance(found, Unavailable)
    assert len(call.called_s) == 1


def test_the_hint_is_honoured() -> None:
    _, call = run(3, Unavailable("busy", 7.0), budget_s=60.0)
    waits_s = [b - a for a, b in zip(call.called_s, call.called_s[1:], strict=False)]
    assert all(7.0 <= wait <= 7.0 + limits.RETRY_WAIT_S_MIN + 1e-6 for wait in waits_s)


def test_two_callers_do_not_come_back_in_step() -> None:
    _, one = run(6, Unavailable("away", 0.2), budget_s=60.0, seed=1)
    _, other = run(6, Unavailable("away", 0.2), budget_s=60.0, seed=2)
    assert one.called_s[1:] != other.called_s[1:]


def test_waits_grow_and_stay_bounded() -> None:
    rng = random.Random(4)
    means_s = [sum(next_wait_s(n, 0.0, rng) for _ in range(500)) / 500 for n in range(1, 12)]
    assert means_s[0] < means_s[2] < means_s[4]
    for attempt in (1, 5, 50, 10**6):
        wait_s = next_wait_s(attempt, 0.0, rng)
        assert limits.RETRY_WAIT_S_MIN <= wait_s <= limits.RETRY_WAIT_S_MAX


async def test_it_works_on_the_wall_clock_too() -> None:
    calls = 0

    async def call(least: int) -> int:
        nonlocal calls
        calls += 1
        if calls < least:
            raise Unavailable("away", 0.0)
        return calls

    assert await retry(lambda: call(3), budget_s=30.0, rng=random.Random(1)) == 3


def test_whoever_finds_nobody_there_soon_asks_again() -> None:
    """A service that was killed is back in a second or two."""
    found, call = run(30, NobodyThere("nobody", 0.0), budget_s=60.0)
    assert found == "done"
    waits_s = [b - a for a, b in itertools.pairwise(call.called_s)]
    assert max(waits_s) <= limits.NOBODY_WAIT_S_MAX
