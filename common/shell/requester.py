"""Commands to other services: sent until answered, in order within a lane, within a budget.

A command may arrive twice (its answer was lost) and is idempotent by what it says, so a retry is
safe. The core sees one answer: the receiver's, or `Refused` when the budget is spent.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import msgspec

from slackwater.common.base import codec, limits, tracing
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import Answered, RefusedSoFar, Request
from slackwater.common.base.errors import DecodeRejected, Rejected, Retryable
from slackwater.common.base.failpoints import failpoint
from slackwater.common.base.retry import retry
from slackwater.common.bus.base import Bus
from slackwater.common.shell.counters import Counters
from slackwater.schemas.base import Message, Refused


class _Tag(msgspec.Struct):
    t: str = ""


_tag_decoder = msgspec.msgpack.Decoder(_Tag)


def decode_any(payload: bytes) -> Message:
    """Decode `payload`, a message of any schema. Raises DecodeRejected."""
    try:
        tag = _tag_decoder.decode(payload).t
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeRejected(f"not a message: {error}") from error
    kind = _types().get(tag)
    if kind is None:
        _types.cache_clear()  # A module of schemas may have been imported since.
        kind = _types().get(tag)
    if kind is None:
        raise DecodeRejected(f"a message of unknown type {tag!r}; is the sender a newer version?")
    message: Message = codec.decode(payload, kind)
    return message


@cache
def _types() -> dict[str, type[Message]]:
    found: dict[str, type[Message]] = {}
    open_types: list[type[Message]] = [Message]
    while open_types:
        for kind in open_types.pop().__subclasses__():
            open_types.append(kind)
            tag = kind.__struct_config__.tag
            if isinstance(tag, str):
                found[tag] = kind
    return found


class _Refusal(Retryable):
    """The receiver's own words: they are the answer, if the budget ends with them."""

    def __init__(self, reply: Refused) -> None:
        super().__init__(reply.reason, reply.retry_after_s)
        self.reply = reply


class Requester:
    """`post` gets `Answered(key, message)` for each request, in the lane's order."""

    def __init__(
        self,
        service: str,
        bus: Bus,
        clock: Clock,
        rng: Random,
        counters: Counters,
        stamp: Callable[[Message], Message],
        post: Callable[[Any], None],
        spawn: Callable[[Any, str], object],
        fenced: Callable[[int], None],
    ) -> None:
        """`fenced` is told of an epoch of this service that a receiver heard, and that is higher
        than its own. Nothing is posted then: a command that was refused for it failed for no fault
        of what it is about."""
        self._fenced = fenced
        self._bus = bus
        self._clock = clock
        self._rng = rng
        self._counters = counters
        self._stamp = stamp
        self._post = post
        self._spawn = spawn
        self._lanes: dict[str, deque[tuple[Request, str]]] = {}
        """Each with the trace that it is part of."""
        self._slots = asyncio.Semaphore(limits.REQUESTS_IN_FLIGHT_MAX)
        self._open = 0
        self._before = f"{service}.request.before"
        self._after = f"{service}.request.after"

    def __len__(self) -> int:
        return self._open

    def send(self, request: Request) -> None:
        self._open += 1
        if not request.lane:
            self._spawn(self._answer(request), f"request {request.key}")
        elif request.lane in self._lanes:
            self._lanes[request.lane].append((request, tracing.current()))
        else:
            self._lanes[request.lane] = deque([(request, tracing.current())])
            self._spawn(self._run_lane(request.lane), f"lane {request.lane}")

    async def _run_lane(self, name: str) -> None:
        lane = self._lanes[name]
        while lane:
            request, trace = lane[0]
            with tracing.under(trace):
                await self._answer(request)
            lane.popleft()
        del self._lanes[name]

    async def _answer(self, request: Request) -> None:
        async with self._slots:
            failpoint(self._before)
            message = await self._ask(request)
            failpoint(self._after)
            if isinstance(message, Refused) and message.higher_epoch:
                self._fenced(message.higher_epoch)
                await asyncio.get_running_loop().create_future()  # The process ends.
        self._open -= 1
        self._post(Answered(request.key, message))

    async def _ask(self, request: Request) -> Message:
        self._counters.requests_sent += 1

        async def once() -> Message:
            raw = await self._bus.request(request.subject, payload, timeout_s=request.timeout_s)
            reply = decode_any(raw)
            insisting = request.retry_refusals
            if insisting and isinstance(reply, Refused) and reply.retry_after_s > 0:
                if request.hear_refusals:
                    self._post(RefusedSoFar(request.key, reply))
                raise _Refusal(reply)
            return reply

        try:
            payload = codec.encode(self._stamp(request.message))
            return await retry(once, budget_s=request.budget_s, rng=self._rng, clock=self._clock)
        except _Refusal as error:
            self._counters.requests_failed += 1
            return error.reply
        except Retryable as error:
            self._counters.requests_failed += 1
            reason = f"no answer from {request.subject} within {request.budget_s} s: {error}"
            return Refused(reason=reason, retry_after_s=error.retry_after_s)
        except Rejected as error:
            self._counters.requests_failed += 1
            return Refused(reason=f"{request.subject}: {error}")
