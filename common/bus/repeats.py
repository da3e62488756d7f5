"""A request on its way: it is sent again while nobody has answered it.

It may have gone with the process that was to answer, killed at that moment. Commands are
idempotent, so that the first answer counts, whichever copy it is to. But a copy that is refused for
now says nothing of the one before it, which may be in progress.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import nats.errors

from slackwater.common.base import limits
from slackwater.schemas.base import TOO_MANY, UNAVAILABLE

A = TypeVar("A")

AGAIN: Final = "-again"
"""Ends the subject on which the answer to a repetition is expected."""


def fail(answer: "asyncio.Future[Any]", error: Exception) -> None:
    """End the wait for an answer, if it has not ended yet."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # Marks the error as seen: the waiter may be gone.


class Asked(Generic[A]):
    """One request. `answer` is `late`, an error, after `timeout_s`. `send_again` repeats it,
    REQUEST_ATTEMPT_S after this was made, and then after twice as long each time; None: it is not
    repeated. A repetition that cannot be sent is left out: the request has its deadline."""

    def __init__(
        self,
        subject: str,
        timeout_s: float,
        late: Exception,
        send_again: Callable[[], Awaitable[object]] | None,
    ) -> None:
        self.subject = subject
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[A] = self._loop.create_future()
        self._send, self._late = send_again, late
        self._ends_s = self._loop.time() + timeout_s
        self._wait_s = limits.REQUEST_ATTEMPT_S if send_again is not None else timeout_s
        self._task: asyncio.Task[None] | None = None
        self._timer = self._after(self._wait_s)

    def take(self, told: A, *, again: bool, code: int = 0) -> None:
        """An answer has come. `again`: to a repetition; `code`: why it is refused, by HTTP's codes;
        0: it is not."""
        if not self.answer.done() and not (again and code in (TOO_MANY, UNAVAILABLE)):
            self.answer.set_result(told)

    def fail(self, error: Exception) -> None:
        """No answer will come."""
        fail(self.answer, error)

    def nobody(self) -> None:
        """A repetition found nobody there: who had the request has died, or is about to end and
        finishes it. The next one follows soon."""
        self._timer.cancel()
        self._timer = self._after(limits.REQUEST_SOON_S)

    def end(self) -> None:
        """It is answered, or given up."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _after(self, wait_s: float) -> asyncio.TimerHandle:
        """One timer is enough: it is the next repetition's, or the deadline's."""
        at_s = self._loop.time() + wait_s
        if at_s >= self._ends_s:
            return self._loop.call_at(self._ends_s, self.fail, self._late)
        return self._loop.call_at(at_s, self._repeat)

    def _repeat(self) -> None:
        self._wait_s *= 2.0
        self._timer = self._after(self._wait_s)
        self._task = self._loop.create_task(self._again(), name="request, again")

    async def _again(self) -> None:
        assert self._send is not None, "only what is repeated comes here"
        with contextlib.suppress(nats.errors.Error):
            await self._send()
