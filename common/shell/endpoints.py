"""Requests and facts on their way into the core, and answers on their way out.

Bytes that do not decode are refused with the reason and counted; a command of an instance that was
replaced is refused ("fenced"); while the service drains, or while too many steps wait for their
records, a request is refused with the time to try again. An answer that takes no waiting costs no
task and no future.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from slackwater.common.base import codec, failpoints, limits, tracing
from slackwater.common.base.clock import Clock
from slackwater.common.base.effects import Observed, Reply, Requested
from slackwater.common.base.errors import DecodeRejected, Rejected
from slackwater.common.base.failpoints import failpoint
from slackwater.common.bus.base import (
    Answer,
    Delivery,
    Endpoint,
    EndpointFigures,
    Failed,
    Handler,
    Responder,
)
from slackwater.common.shell.counters import Counters
from slackwater.common.shell.fencing import Fence
from slackwater.common.shell.steps import Steps
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, INTERNAL, NO_ANSWER, Message, Refused
from slackwater.schemas.permissions import OF_TENANTS

_log = structlog.get_logger()


def _job_of(message: Any) -> str:
    """Name the job that a request is about; empty: it does not say."""
    return str(getattr(getattr(message, "spec", None), "id", "") or getattr(message, "job", ""))


class _Waiting:
    """A request whose answer is not here yet."""

    __slots__ = ("answer", "due_s", "future", "message")

    def __init__(self, message: Message, due_s: float) -> None:
        self.message, self.due_s = message, due_s
        self.answer: Message | None = None
        self.future: asyncio.Future[None] | None = None


class Intake:
    """Turns deliveries of the bus into events, and `Reply` effects into answers."""

    def __init__(
        self,
        service: str,
        id: str,
        clock: Clock,
        counters: Counters,
        steps: Steps,
        stamp: Callable[[Message], Message],
        why_not: Callable[[Message], str],
    ) -> None:
        """`why_not` says why a request cannot be taken at present; empty: it can."""
        self._why_not = why_not
        self._service = service
        self._id = id
        self._clock = clock
        self._counters = counters
        self._steps = steps
        self._stamp = stamp
        self._fence = Fence()
        self._token = 0
        self._asked = 0
        """The request that is being given to the core; 0: none."""
        self._answer: Message | None = None
        """To that request, if it came at once."""
        self._waiting: dict[int, _Waiting] = {}
        self.draining = False
        self._reply_before = f"{service}.reply.before"
        self._reply_after = f"{service}.reply.after"

    def __len__(self) -> int:
        """Requests that are not answered yet."""
        return len(self._waiting)

    def endpoint(self, verb: str, kind: Any, concurrency: int) -> Endpoint:
        """The endpoint whose requests of type `kind` become `Requested` events."""

        def respond(delivery: Delivery) -> Answer | Awaitable[Answer]:
            message = self._admit(delivery, kind)
            if type(message) is Refused:
                return self._encode(message, delivery.json)
            if tracing.recorded():
                tracing.tag("job", _job_of(message))
            self._token = self._asked = token = self._token + 1
            self._steps.post(Requested(token, message, subjects.tenant_of(delivery.subject)))
            self._asked = 0
            answer, self._answer = self._answer, None
            if answer is not None:
                return self._encode(answer, delivery.json)
            waiting = _Waiting(message, self._clock.now_s() + limits.REPLY_S)
            self._waiting[token] = waiting
            return self._answered_later(token, waiting, delivery.json)

        return self._declare(verb, kind, respond, concurrency)

    def direct(self, verb: str, kind: Any, answer: Callable[[], Message]) -> Endpoint:
        """An endpoint that the shell answers itself, also while the service drains."""

        def respond(delivery: Delivery) -> Answer:
            try:
                if delivery.payload:  # A person may send nothing at all.
                    _request(delivery, kind)
            except DecodeRejected as error:
                return self._encode(self._undecodable(delivery, error), delivery.json)
            return self._encode(answer(), delivery.json)

        return self._declare(verb, kind, respond)

    def subscriber(self, kind: Any) -> Handler:
        """The handler that turns messages of type `kind` into `Observed` events."""

        async def observe(delivery: Delivery) -> None:
            try:
                message = codec.decode(delivery.payload, kind, json=delivery.json)
            except DecodeRejected as error:
                self._undecodable(delivery, error)
                return
            self._fence.refuses(message)  # Learn the sender's epoch; a fact is not a command.
            if self._steps.full:
                await self._steps.room()
            if not self.draining:
                self._counters.facts += 1
                self._steps.post(Observed(delivery.subject, message))

        return observe

    def reply(self, effect: Reply) -> None:
        """The core's answer. A second one, or one that comes too late, is dropped and counted."""
        if effect.token == self._asked:
            self._asked, self._answer = 0, effect.message
            return
        waiting = self._waiting.pop(effect.token, None)
        if waiting is None:
            self._counters.unanswered += 1
            return
        waiting.answer = effect.message
        if waiting.future is not None and not waiting.future.done():
            waiting.future.set_result(None)

    def expire(self) -> None:
        """Refuse the requests that the core has left without an answer for REPLY_S."""
        now_s = self._clock.now_s()
        while self._waiting:
            token, oldest = next(iter(self._waiting.items()))
            if oldest.due_s > now_s:
                return
            self._counters.unanswered += 1
            request = type(oldest.message).__name__
            _log.warning("request.unanswered", request=request, after_s=limits.REPLY_S)
            reason = f"{self._service} {self._id} has not answered within {limits.REPLY_S} s"
            self.reply(Reply(token, Refused(reason=reason, retry_after_s=1.0, code=NO_ANSWER)))

    def refuse_all(self, reason: str) -> None:
        """Refuse every waiting request: its answer will not come."""
        for token in list(self._waiting):
            self.reply(Reply(token, Refused(reason=reason, retry_after_s=1.0)))

    def _declare(
        self,
        verb: str,
        kind: Any,
        respond: Responder,
        concurrency: int = limits.ENDPOINT_CONCURRENCY,
    ) -> Endpoint:
        figures = self._counters.endpoints[verb] = EndpointFigures()
        held = verb in OF_TENANTS.get(self._service, ())
        return Endpoint(
            name=verb,
            subject=subjects.command(self._service, self._id, verb),
            of_tenants=subjects.owned("*", self._service, self._id, verb) if held else "",
            respond=respond,
            metadata={"request": getattr(kind, "__name__", str(kind))},
            concurrency=concurrency,
            figures=figures,
        )

    def _admit(self, delivery: Delivery, kind: Any) -> Any:
        """Return the request, or the `Refused` that turns it away."""
        if self.draining:
            return self._refuse("is shutting down; ask again in a second", 1.0)
        if self._steps.full:
            return self._refuse("has too many records on their way to disk", 0.5)
        try:
            message = _request(delivery, kind)
        except DecodeRejected as error:
            return self._undecodable(delivery, error)
        if subjects.tenant_of(delivery.subject):  # Its sender is a person, whatever it says.
            message = msgspec.structs.replace(message, sender="", epoch=0)
        higher = self._fence.refuses(message)
        if higher:
            self._counters.fenced += 1
            return self._refuse(
                f"fenced: {message.sender} commands with epoch {message.epoch}, but epoch {higher} "
                "was heard: a newer instance has taken over",
                higher_epoch=higher,
            )
        if why := self._why_not(message):
            return self._refuse(why, 1.0)
        return message

    async def _answered_later(self, token: int, waiting: _Waiting, json: bool) -> Answer:
        if waiting.answer is None:
            waiting.future = asyncio.get_running_loop().create_future()
            try:
                await waiting.future
            finally:
                self._waiting.pop(token, None)
        assert waiting.answer is not None
        return self._encode(waiting.answer, json)

    def _encode(self, message: Message, json: bool) -> Answer:
        failpoint(self._reply_before)
        try:
            stamped = self._stamp(message)
            payload = codec.encode(stamped, json=json)
        except Rejected as error:
            stamped = self._stamp(Refused(reason=str(error), code=INTERNAL))
            payload = codec.encode(stamped, json=json)
        if failpoints.any_armed():  # A moment later, the bus has the answer.
            asyncio.get_running_loop().call_later(0.002, failpoint, self._reply_after)
        if isinstance(stamped, Refused):
            return Failed(payload, stamped.status, stamped.reason)
        return payload

    def _refuse(self, why: str, retry_after_s: float = 0.0, higher_epoch: int = 0) -> Refused:
        self._counters.refused += 1
        return Refused(
            reason=f"{self._service} {self._id} {why}",
            retry_after_s=retry_after_s,
            code=CONFLICT if higher_epoch else 0,
            higher_epoch=higher_epoch,
        )

    def _undecodable(self, delivery: Delivery, error: DecodeRejected) -> Refused:
        self._counters.undecodable += 1
        if self._counters.undecodable <= limits.UNDECODABLE_LOGGED_MAX:
            _log.warning("undecodable", subject=delivery.subject, reason=str(error))
        return Refused(reason=str(error))


def _request(delivery: Delivery, kind: Any) -> Any:
    """Raises DecodeRejected. JSON is typed by hand: a key that would be ignored is refused. Between
    services a newer release may say more than this one knows."""
    message = codec.decode(delivery.payload, kind, json=delivery.json)
    if delivery.json:
        codec.check_keys(delivery.payload, message)
    return message
