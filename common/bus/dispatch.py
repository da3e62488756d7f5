"""What every bus does with a message once it is here: bounded work, and errors as answers.

An endpoint works on up to `concurrency` requests at once and refuses the next one (the client
library would run them one after the other); a subscription delivers in order from a bounded
mailbox and drops its oldest message when the handler is too slow. Both count what they refuse.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from slackwater.common import codec, limits
from slackwater.common.bus.base import Delivery, Endpoint, Handler
from slackwater.common.errors import Rejected, Retryable
from slackwater.schemas.base import Refused

_log = logging.getLogger("slackwater.bus")
_PACE_KEPT: Final = 64
"""Requests whose ends say how fast an endpoint is."""


@dataclass(slots=True)
class BusCounters:
    """Since the bus was connected."""

    published: int = 0
    received: int = 0
    requested: int = 0
    answered: int = 0
    overloaded: int = 0
    """Requests refused because their endpoint was full."""
    dropped: int = 0
    """Messages dropped because their subscriber was too slow, or answers without a connection."""
    failed: int = 0
    """Handlers that raised an error which is not ours."""
    errors: int = 0
    """Errors that the client library reported."""
    reconnects: int = 0


class Failure(NamedTuple):
    """Why a request was not done, as operators' tools show it: 400, 500 or 503."""

    code: int
    reason: str


Answer = Callable[[str, bytes, bool, Failure | None], Awaitable[None]]
"""(reply address, payload, as JSON, failure): send the answer to a request."""


class EndpointWorker:
    """One endpoint's requests in progress, and its figures for the STATS of NATS micro."""

    def __init__(self, endpoint: Endpoint, answer: Answer, counters: BusCounters) -> None:
        self.endpoint = endpoint
        self._answer = answer
        self._counters = counters
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.requests = 0
        self.errors = 0
        self.busy_s = 0.0
        self.last_error = ""
        self._ended_s: deque[float] = deque(maxlen=_PACE_KEPT)
        """When the last requests ended."""
        self._turned_away = 0
        """Less those that were let in since."""

    def begin(self, delivery: Delivery, reply_to: str) -> bool:
        """Begin the work on a request; false: the endpoint is full, call `turn_away`."""
        self.requests += 1
        if len(self._tasks) >= self.endpoint.concurrency:
            return False
        self._turned_away = max(0, self._turned_away - 1)
        self._tasks.add(self._loop.create_task(self._work(delivery, reply_to)))
        return True

    async def turn_away(self, delivery: Delivery, reply_to: str) -> None:
        """Tell the requester to come back: explicit, at once, and before any work is done."""
        self._counters.overloaded += 1
        reason = f"{self.endpoint.name} is busy with {self.endpoint.concurrency} requests"
        await self._refuse(delivery, reply_to, Failure(503, reason), self._come_again_s())

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
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()  # One that was cancelled before it began has not removed itself.

    async def _work(self, delivery: Delivery, reply_to: str) -> None:
        began_s = self._loop.time()
        try:
            payload = await self.endpoint.respond(delivery)
        except Rejected as error:
            await self._refuse(delivery, reply_to, Failure(400, str(error)), 0.0)
        except Retryable as error:
            failure = Failure(503, str(error))
            # Never 0, which would read as "do not try again".
            retry_after_s = max(error.retry_after_s, limits.RETRY_WAIT_S_MIN)
            await self._refuse(delivery, reply_to, failure, retry_after_s)
        except Exception as error:
            # A bug of ours: the requester gets an answer, the log the traceback.
            self._counters.failed += 1
            _log.exception("endpoint %s failed", self.endpoint.name)
            failure = Failure(500, f"internal error: {type(error).__name__}: {error}")
            await self._refuse(delivery, reply_to, failure, 0.0)
        else:
            await self._answer(reply_to, payload, delivery.json, None)
        finally:
            ended_s = self._loop.time()
            self.busy_s += ended_s - began_s
            self._ended_s.append(ended_s)
            # Here and not in a callback of the task, which would cost one more turn of the loop.
            task = asyncio.current_task()
            assert task is not None
            self._tasks.discard(task)

    async def _refuse(
        self, delivery: Delivery, reply_to: str, failure: Failure, retry_after_s: float
    ) -> None:
        self.errors += 1
        self.last_error = f"{failure.code}:{failure.reason}"
        refused = Refused(reason=failure.reason, retry_after_s=retry_after_s)
        payload = codec.encode(refused, json=delivery.json)
        await self._answer(reply_to, payload, delivery.json, failure)


class Mailbox:
    """What waits for one subscription's handler, in order; the oldest goes when it is full."""

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
                    await self._handler(delivery)
                except Exception:
                    # One bad message must not end the subscription.
                    self._counters.failed += 1
                    _log.exception("the handler of %s failed", self._pattern)
            if self._closing:
                return
            self._arrived.clear()
            await self._arrived.wait()
