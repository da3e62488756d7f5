"""Dispatch of received messages, the same on every bus: bounded work, and errors as answers.

An endpoint works on up to `concurrency` requests at once and refuses the next one (the client
library would run them one after the other); a subscription delivers in order from a bounded
mailbox and drops its oldest message when the handler is too slow. Both count what they refuse.
"""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final

from slackwater.common.base import codec, limits, tracing
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.bus.base import Answer, BusCounters, Delivery, Endpoint, Failed, Handler
from slackwater.schemas.base import INTERNAL, Refused

_log = logging.getLogger("slackwater.bus")
_PACE_KEPT: Final = 64
"""Requests whose ends say how fast an endpoint is."""


Send = Callable[[str, Answer, bool], Awaitable[None]]
"""Sends an answer, given as (reply address, answer, whether it is JSON)."""


def failure(refused: Refused, json: bool) -> Failed:
    """Encode a refusal as an answer."""
    return Failed(codec.encode(refused, json=json), refused.status, refused.reason)


class EndpointWorker:
    """One endpoint's requests in progress. Its figures are those of the STATS of NATS micro."""

    def __init__(self, endpoint: Endpoint, send: Send, counters: BusCounters) -> None:
        self.endpoint = endpoint
        self.figures = endpoint.figures
        self._respond = endpoint.respond
        self._concurrency = endpoint.concurrency
        self._send = send
        self._counters = counters
        self._tasks: dict[asyncio.Task[None], Awaitable[Answer]] = {}
        self._loop = asyncio.get_running_loop()
        self._ended_s: deque[float] = deque(maxlen=_PACE_KEPT)
        """When the last requests ended."""
        self._turned_away = 0
        """Less those that were let in since."""

    def begin(self, delivery: Delivery, reply_to: str) -> Answer | None:
        """Begin the work on a request. Return the answer if it is there at once; else it is sent
        later. A full endpoint refuses before it does any work."""
        self.figures.requests += 1
        if len(self._tasks) >= self._concurrency:
            return self._turn_away(delivery)
        if self._turned_away:
            self._turned_away -= 1
        work = tracing.answering(delivery.subject, delivery.trace)
        if work is None:
            return self._answer(delivery, reply_to, None)
        with work:
            return self._answer(delivery, reply_to, work)

    def _answer(
        self, delivery: Delivery, reply_to: str, work: tracing.Work | None
    ) -> Answer | None:
        began_s = perf_counter()
        try:
            answer = self._respond(delivery)
        except Exception as error:  # A responder may be anybody's: who asks is told.
            answer = self._failed(delivery, error)
        if not isinstance(answer, (bytes, Failed)):
            task = self._loop.create_task(self._finish(answer, delivery, reply_to, began_s, work))
            self._tasks[task] = answer
            return None
        self._end(answer, began_s, work)
        return answer

    def _turn_away(self, delivery: Delivery) -> Failed:
        self._counters.overloaded += 1
        reason = f"{self.endpoint.name} is busy with {self._concurrency} requests"
        refused = failure(Refused(reason=reason, retry_after_s=self._come_again_s()), delivery.json)
        self.figures.failed(refused)
        return refused

    def _come_again_s(self) -> float:
        """When there should be room, at the pace of late, for those that were turned away before as
        well: a thousand that all come back at once would keep the service from its work."""
        ended_s = self._ended_s
        gap_s = (self._loop.time() - ended_s[0]) / len(ended_s) if ended_s else 0.0
        clear_s = gap_s * (len(self._tasks) / 2 + self._turned_away)
        self._turned_away += 1
        return min(max(clear_s, limits.RETRY_WAIT_S_MIN), limits.RETRY_WAIT_S_MAX)

    async def drain(self, timeout_s: float) -> None:
        """Let the requests in progress finish; those still running after `timeout_s` are ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        await self.cancel()

    async def cancel(self) -> None:
        tasks = dict(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for unbegun in tasks.values():  # The task was cancelled before it began.
            if inspect.iscoroutine(unbegun):
                unbegun.close()
        self._tasks.clear()

    async def _finish(
        self,
        awaited: Awaitable[Answer],
        delivery: Delivery,
        reply_to: str,
        began_s: float,
        work: tracing.Work | None,
    ) -> None:
        try:
            try:
                answer = await awaited
            except Exception as error:  # Answered as `take` answers it.
                answer = self._failed(delivery, error)
            self._end(answer, began_s, work)
            await self._send(reply_to, answer, delivery.json)
        finally:
            # Here and not in a callback of the task, which would cost one more turn of the loop.
            task = asyncio.current_task()
            assert task is not None
            self._tasks.pop(task, None)

    def _end(self, answer: Answer, began_s: float, work: tracing.Work | None) -> None:
        # The loop's clock, which a simulation moves, may tick in milliseconds.
        self.figures.took_s.add(perf_counter() - began_s)
        self._ended_s.append(self._loop.time())
        if type(answer) is Failed:
            self.figures.failed(answer)
        if work is not None:
            work.end(answer.reason if type(answer) is Failed else "")

    def _failed(self, delivery: Delivery, error: Exception) -> Failed:
        match error:
            case Rejected():
                refused = Refused(reason=str(error))
            case Retryable():
                # Never 0, which would read as "do not try again".
                retry_after_s = max(error.retry_after_s, limits.RETRY_WAIT_S_MIN)
                refused = Refused(reason=str(error), retry_after_s=retry_after_s)
            case _:
                # A bug of ours: the requester gets an answer, the log the traceback.
                self._counters.failed += 1
                _log.error("endpoint %s failed", self.endpoint.name, exc_info=error)
                reason = f"internal error: {type(error).__name__}: {error}"
                refused = Refused(reason=reason, code=INTERNAL)
        return failure(refused, delivery.json)


class Mailbox:
    """Messages that wait for one subscription's handler, in order; the oldest goes when it is
    full."""

    def __init__(self, pattern: str, handler: Handler, counters: BusCounters) -> None:
        self._pattern = pattern
        self._handler = handler
        self._counters = counters
        self._waiting: deque[Delivery] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._closing = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def put(self, delivery: Delivery) -> None:
        if self._closing:
            return
        self._counters.received += 1
        self._waiting.append(delivery)
        self._bytes += len(delivery.payload)
        while (
            len(self._waiting) > limits.SUBSCRIPTION_PENDING_MAX
            or self._bytes > limits.SUBSCRIPTION_PENDING_BYTES_MAX
        ):
            self._bytes -= len(self._waiting.popleft().payload)
            self._counters.dropped += 1
        self._arrived.set()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, deliver what waits; stop after `timeout_s` at the latest."""
        self._closing = True
        self._arrived.set()
        if self._task is asyncio.current_task():
            return  # A handler closes its own subscription: its loop ends after this message.
        await asyncio.wait({self._task}, timeout=timeout_s)
        await self.cancel()

    async def cancel(self) -> None:
        self._closing = True
        self._waiting.clear()
        self._arrived.set()
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            while self._waiting:
                delivery = self._waiting.popleft()
                self._bytes -= len(delivery.payload)
                try:
                    if not delivery.trace:
                        await self._handler(delivery)
                        continue
                    with tracing.under(tracing.valid(delivery.trace)):
                        await self._handler(delivery)
                except Exception:
                    # One bad message must not end the subscription.
                    self._counters.failed += 1
                    _log.exception("the handler of %s failed", self._pattern)
            if self._closing:
                return
            self._arrived.clear()
            await self._arrived.wait()
