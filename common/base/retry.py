"""The one retry: within a budget, with growing and jittered waits, and only where it can help.

`Retryable` means that the same call may succeed later; anything else is raised at once. A call that
asks to be left alone for a while (`retry_after_s`) is. Waits are drawn between the least and an
exponentially growing bound, so that a thousand clients of a restarted server do not return in step.
The last error is raised when the next wait would end after the budget.
"""

from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from slackwater.common.base import limits
from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.base.errors import NobodyThere, Retryable

T = TypeVar("T")


async def retry(
    call: Callable[[], Awaitable[T]],
    *,
    budget_s: float,
    rng: Random,
    clock: Clock | None = None,
) -> T:
    """The first result of `call`. Under virtual time, give the world's clock."""
    time = clock or LiveClock()
    deadline_s = time.now_s() + budget_s
    attempt = 0
    while True:
        attempt += 1
        try:
            return await call()
        except Retryable as error:
            hint_s, most_s = error.retry_after_s, limits.RETRY_WAIT_S_MAX
            if isinstance(error, NobodyThere):  # Asking costs next to nothing.
                most_s = limits.NOBODY_WAIT_S_MAX
            wait_s = next_wait_s(attempt, hint_s, rng, most_s)
            if time.now_s() + wait_s > deadline_s:
                raise
        await time.sleep_until(time.now_s() + wait_s)


def next_wait_s(
    attempt: int, hint_s: float, rng: Random, most_s: float = limits.RETRY_WAIT_S_MAX
) -> float:
    """Return the seconds to wait after the attempt-th failure (from 1): at least the hint, never
    two alike."""
    least_s = limits.RETRY_WAIT_S_MIN
    bound_s = min(most_s, least_s * 2.0 ** min(attempt, 32))
    drawn_s = rng.uniform(least_s, bound_s)
    if drawn_s >= hint_s:
        return drawn_s
    return hint_s + rng.uniform(0.0, least_s)
