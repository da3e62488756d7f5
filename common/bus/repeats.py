"""A request on its way: it is sent again while nobody has answered it.

It may have gone with the process that was to answer, killed at that moment. Commands are
idempotent, so that the first answer counts, whichever copy it is to. But a copy that is refused for
now says nothing of the one before it, which may be in progress.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

import nats.errors

from slackwater.common.base import limits
from slackwater.schemas.base import TOO_MANY, UNAVAILABLE

A = TypeVar("A")

AGAIN: Final = "-again"
"""Ends the subject on which the answer to a repetition is expected."""


class Asked(Generic[A]):
    """One request. `send_again` repeats it, REQUEST_ATTEMPT_S after this was made, and then after
    twice as long each time; None: it is not repeated.

    A repetition that cannot be sent is left out: the wait for the answer has its own deadline.
    """

    def __init__(self, subject: str, send_again: Callable[[], Awaitable[object]] | None) -> None:
        self.subject = subject
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[A] = self._loop.create_future()
        self._send = send_again
        self._wait_s = limits.REQUEST_ATTEMPT_S
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if send_again is not None:
            self._timer = self._loop.call_later(self._wait_s, self._due)

    def take(self, told: A, *, again: bool, code: int = 0) -> None:
        """An answer has come. `again`: to a repetition; `code`: why it is refused, by HTTP's codes;
        0: it is not."""
        if not self.answer.done() and not (again and code in (TOO_MANY, UNAVAILABLE)):
            self.answer.set_result(told)

    def nobody(self) -> None:
        """A repetition found nobody there: who had the request has died, or is about to end and
        finishes it. The next one follows soon."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(limits.REQUEST_SOON_S, self._due)

    def end(self) -> None:
        """It is answered, or given up."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _due(self) -> None:
        self._task = self._loop.create_task(self._again(), name="request, again")

    async def _again(self) -> None:
        assert self._send is not None, "only what is repeated has a timer"
        self._wait_s *= 2.0
        self._timer = self._loop.call_later(self._wait_s, self._due)
        with contextlib.suppress(nats.errors.Error):
            await self._send()
