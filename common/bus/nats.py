"""The bus over NATS: error mapping, bounded endpoints.

While the connection is down nothing is sent and nothing is kept for later: a heartbeat delivered a
minute late is worse than one lost, and a command's sender retries. All the library's exceptions are
mapped here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import nats.errors
import structlog
from nats.aio.client import NO_RESPONDERS_STATUS
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription
from nats.nuid import NUID
from nats.protocol.parser import AUTHORIZATION_VIOLATION

from slackwater.common.base import codec, limits, tracing
from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.base.errors import (
    AccessRefused,
    ConfigRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.bus.access import Credentials, carries_identity, shown
from slackwater.common.bus.base import (
    Answer,
    BusCounters,
    Delivery,
    Endpoint,
    Failed,
    Handler,
    ServiceInfo,
    Subscription,
)
from slackwater.common.bus.connection import (
    ConnectionLost,
    Forbidden,
    SecuredClient,
    cancellable,
    distrusted,
    distrusts,
    forbidden,
    mapped,
    options,
    refused,
    unanswered,
)
from slackwater.common.bus.dispatch import EndpointWorker, Mailbox
from slackwater.common.bus.micro import (
    ERROR_CODE_HEADER,
    ERROR_HEADER,
    QUEUE_GROUP,
    VERBS,
    MicroService,
)
from slackwater.common.bus.repeats import AGAIN, Asked, fail
from slackwater.common.bus.server import check_version

_log = structlog.get_logger()
_JSON_HEADERS = {"Content-Type": codec.CONTENT_TYPE_JSON}


class NatsBus:
    """One connection. Make it with `await NatsBus.connect(url, name)`."""

    def __init__(self, url: str, name: str, clock: Clock) -> None:
        self.url = url
        self.name = name
        self.client = SecuredClient()
        self.counters = BusCounters()
        self._clock = clock
        self._closing = False
        self._on_closed: Callable[[], None] | None = None
        self._on_reconnect: set[Callable[[], None]] = set()
        self._last_error: Exception | None = None
        self._inbox = ""
        self._asked = 0
        self._open: dict[str, Asked[Msg]] = {}
        """Requests that are not answered yet, by the last token of their inbox."""
        self._refused = asyncio.Event()
        """The server knows us, and will not have us; or it is not to be trusted."""
        self._only_server = False
        self._unheard = ""
        """A subject that this user may not listen to, and tried."""
        self._subscriptions: dict[ClientSubscription, Mailbox] = {}
        self._endpoints: dict[ClientSubscription, EndpointWorker] = {}
        self._ended: set[ClientSubscription] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        name: str,
        *,
        credentials: Credentials | None = None,
        on_closed: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> "NatsBus":
        """`url`: one server, or several with commas between them. Raises Unavailable if none
        answers within BUS_CONNECT_S, ConfigRejected if they will not have us, or are not to be
        trusted. A password or token in `url` counts before `credentials`.

        `on_closed` is called when the connection is closed for good by anything but `close()`: a
        daemon ends then, and is started anew.
        """
        identity = credentials or Credentials()
        servers, chosen = options(url, identity)
        bus = cls(shown(url), name, clock or LiveClock())
        bus._on_closed = on_closed
        bus.client.encrypted = "tls" in chosen
        connecting = asyncio.ensure_future(
            bus.client.connect(
                servers,
                name=name,
                error_cb=bus._note_error,
                disconnected_cb=bus._note_disconnect,
                reconnected_cb=bus._note_reconnect,
                closed_cb=bus._note_closed,
                **chosen,
            )
        )
        bus._only_server = len(servers) == 1
        turned_away = asyncio.ensure_future(bus._refused.wait())
        waits: set[asyncio.Future[Any]] = {connecting, turned_away}
        await asyncio.wait(waits, timeout=limits.BUS_CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        turned_away.cancel()
        who = "what this URL says of its client" if carries_identity(url) else str(identity)
        await bus._finish_connecting(connecting, who)
        await bus._open_answers()
        return bus

    async def _finish_connecting(self, connecting: "asyncio.Future[None]", who: str) -> None:
        if not connecting.done():
            self._closing = True
            connecting.cancel()
            await asyncio.wait({connecting}, timeout=1.0)
            await self.client.close()
            why = self._last_error
            if distrusts(why):
                raise distrusted(self.url, why)
            if self._refused.is_set():
                raise refused(self.url, who, why)
            raise unanswered(self.url, why)
        error = connecting.exception()
        if error is not None:
            raise ConfigRejected(f"cannot connect to {self.url}: {error}") from error
        try:
            check_version(str(self.client.connected_server_version), f"at {self.url}")
        except ConfigRejected:
            await self.close()
            raise

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    async def publish(self, subject: str, payload: bytes, reply_to: str = "") -> None:
        self._check_sending(subject, payload)
        self.counters.published += 1
        try:
            await self.client.publish(subject, payload, reply=reply_to, headers=tracing.headers())
        except nats.errors.Error as error:
            raise self._mapped(error, subject) from error

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        json: bool = False,
        again: bool = True,
    ) -> bytes:
        usual = _JSON_HEADERS if json else None
        answer = await tracing.ask(
            subject,
            lambda: self.call(
                subject, payload, timeout_s=timeout_s, headers=tracing.headers(usual), again=again
            ),
        )
        data: bytes = answer.data
        if not data and answer.headers is not None and ERROR_CODE_HEADER in answer.headers:
            # Not one of our services: ours say why in the body, in a `Refused`.
            code, why = answer.headers[ERROR_CODE_HEADER], answer.headers.get(ERROR_HEADER, "")
            kind = Unavailable if code.startswith("5") else Rejected
            raise kind(f"{subject} answered with error {code}: {why}")
        return data

    async def call(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        again: bool = False,
    ) -> Msg:
        """A request as NATS has it, headers and all; `request` and the store are made of it."""
        self._check_sending(subject, payload)
        self.counters.requested += 1
        # Not the library's `request`, which makes a random name, a timer and a task's wait of each.
        self._asked += 1
        token = str(self._asked)
        reply_to = f"{self._inbox}.{token}"
        send = partial(self.client.publish, subject, payload, headers=headers)
        repeat = partial(send, reply=reply_to + AGAIN) if again else None
        asked = Asked[Msg](subject, timeout_s, nats.errors.TimeoutError(), repeat)
        self._open[token] = asked
        try:
            await send(reply=reply_to)
            message = await asked.answer
            if _nobody(message):
                raise nats.errors.NoRespondersError
        except nats.errors.Error as error:
            raise self._mapped(error, subject, timeout_s) from error
        finally:
            asked.end()
            del self._open[token]
        return message

    async def _open_answers(self) -> None:
        """Subscribe to the answers to `call`."""

        async def deliver(message: Msg) -> None:
            token = message.subject.rpartition(".")[2]
            again = token.endswith(AGAIN)
            asked = self._open.get(token.removesuffix(AGAIN))
            if asked is None:
                return  # It is late.
            if again and _nobody(message):
                asked.nobody()
            else:
                asked.take(message, again=again, code=_code(message))

        self._inbox = self.client.new_inbox()
        await self._listen(f"{self._inbox}.*", deliver)

    async def open_inbox(self, take: Callable[[Msg], None]) -> "Inbox":
        """A subject of this connection's own: answers to `<subject>.<token>` go to `take`."""

        async def deliver(message: Msg) -> None:
            take(message)

        subject = self.client.new_inbox()
        return Inbox(self, subject, await self._listen(f"{subject}.*", deliver))

    async def subscribe(self, pattern: str, handler: Handler) -> Subscription:
        mailbox = Mailbox(pattern, handler, self.counters)

        async def deliver(message: Msg) -> None:
            mailbox.put(_delivery(message))

        subscription = await self._listen(pattern, deliver)
        self._subscriptions[subscription] = mailbox
        return _Subscribed(self, subscription)

    async def serve(self, info: ServiceInfo, endpoints: list[Endpoint]) -> None:
        workers = []
        for endpoint in endpoints:
            worker = EndpointWorker(endpoint, self._answer, self.counters)
            for subject in filter(None, (endpoint.subject, endpoint.of_tenants)):
                subscription = await self._listen(subject, self._taking(worker), QUEUE_GROUP)
                self._endpoints[subscription] = worker
            workers.append(worker)
        service = MicroService(info, NUID().next().decode(), workers, self._clock.now_s())
        for verb in VERBS:
            for subject in service.subjects(verb):
                await self._listen(subject, self._showing(service, verb))
        await self.flush()

    async def stop_serving(self) -> None:
        await self._end_intake([*self._endpoints])

    async def flush(self) -> None:
        if not self.connected:
            raise self._disconnected("flush")
        try:
            # The library's flush writes its PING past the commands that still wait in its buffer:
            # without this the PONG proves nothing, and a service that says it is ready is not.
            await self.client._flush_pending(force_flush=True)
            with cancellable():
                await self.client.flush(timeout=round(limits.REQUEST_TIMEOUT_S))
        except nats.errors.Error as error:
            raise self._mapped(error, "flush", limits.REQUEST_TIMEOUT_S) from error
        if self._unheard:
            raise AccessRefused(f"{self._unheard}: this user of the bus may not listen there")

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        deadline_s = self._clock.now_s() + limits.DRAIN_S
        try:
            async with asyncio.timeout(limits.DRAIN_S):
                await self._end_intake([*self._endpoints, *self._subscriptions])
        except (TimeoutError, nats.errors.Error):
            # The server is gone or slow: what is in progress still gets its time below.
            self.counters.errors += 1
        for worker in self._endpoints.values():
            await worker.drain(max(0.0, deadline_s - self._clock.now_s()))
        for mailbox in self._subscriptions.values():
            await mailbox.drain(max(0.0, deadline_s - self._clock.now_s()))
        if self.connected:
            try:
                await self.client._flush_pending(force_flush=True)
                await self.client.flush(timeout=1)
            except nats.errors.Error:
                self.counters.errors += 1
        try:
            await self.client.close()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self.counters.errors += 1  # A connection that was being made was cancelled, not we.

    def on_reconnect(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` at every reconnection, until the function returned is called."""
        self._on_reconnect.add(wake)
        return lambda: self._on_reconnect.discard(wake)

    # The library's side ---------------------------------------------------------------------------

    async def _listen(
        self, subject: str, callback: Callable[[Msg], Awaitable[None]], queue: str = ""
    ) -> ClientSubscription:
        try:
            return await self.client.subscribe(subject, queue=queue, cb=callback)
        except nats.errors.Error as error:
            raise self._mapped(error, subject) from error

    async def _end_intake(self, subscriptions: list[ClientSubscription]) -> None:
        """Let nothing more come; what has come is worked on."""
        begun, self._ended = self._ended, self._ended | {*subscriptions}
        if self.connected:
            drains = (each.drain() for each in subscriptions if each not in begun)  # type: ignore[no-untyped-call]
            await asyncio.gather(*drains)

    async def _forget(self, subscription: ClientSubscription) -> None:
        mailbox = self._subscriptions.pop(subscription, None)
        if mailbox is None:
            return  # Unsubscribed before.
        try:
            await subscription.unsubscribe()
        except nats.errors.Error:
            self.counters.errors += 1  # The connection is closed, and the subscription with it.
        await mailbox.cancel()

    async def _answer(self, reply_to: str, answer: Answer, json: bool) -> None:
        if not reply_to:
            return  # The command was published, not requested: no answer is wanted.
        headers = None
        if isinstance(answer, Failed):
            headers = dict(_JSON_HEADERS) if json else {}
            headers[ERROR_HEADER] = " ".join(answer.reason.split())[:256]
            headers[ERROR_CODE_HEADER] = str(answer.code)
            answer = answer.payload
        elif json:
            headers = _JSON_HEADERS
        if not self.client.is_connected:
            self.counters.dropped += 1  # The requester's deadline passes, and it asks again.
            return
        self.counters.answered += 1
        try:
            # Not `publish`: the server itself named the subject, which need not be looked at, and
            # what is too large for a message was refused when it was encoded.
            await self.client._send_publish(reply_to, "", answer, len(answer), headers)
        except nats.errors.Error:
            self.counters.dropped += 1

    def _taking(self, worker: EndpointWorker) -> Callable[[Msg], Awaitable[None]]:
        async def take(message: Msg) -> None:
            delivery = _delivery(message)
            answer = worker.begin(delivery, message.reply)
            if answer is not None:
                await self._answer(message.reply, answer, delivery.json)

        return take

    def _showing(self, service: MicroService, verb: str) -> Callable[[Msg], Awaitable[None]]:
        async def show(message: Msg) -> None:
            await self._answer(message.reply, service.answer(verb), False)

        return show

    def _check_sending(self, subject: str, payload: bytes) -> None:
        if len(payload) > limits.MESSAGE_BYTES_MAX:
            raise Rejected(
                f"{len(payload)} bytes to {subject} are over a message's "
                f"{limits.MESSAGE_BYTES_MAX}; move large state over the transport"
            )
        if not self.client.is_connected:
            raise self._disconnected(subject)

    def _disconnected(self, subject: str) -> Unavailable:
        state = "closed" if self.client.is_closed else "down, reconnecting"
        return Unavailable(
            f"{subject}: the connection to {self.url} is {state}; nothing was sent",
            limits.RECONNECT_WAIT_S,
        )

    def _mapped(self, error: Exception, subject: str, timeout_s: float = 0.0) -> SlackwaterError:
        return mapped(error, subject, self.url, timeout_s)

    async def _note_error(self, error: Exception) -> None:
        # Awaited inside the library's read loop: count, nothing more.
        self.counters.errors += 1
        self._last_error = error
        if AUTHORIZATION_VIOLATION in str(error).lower() or (
            self._only_server and distrusts(error)
        ):
            self._refused.set()
        elif (found := forbidden(error)) is not None:
            self._forbid(*found)
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.dropped += 1

    def _forbid(self, listens: bool, subject: str) -> None:
        self.counters.forbidden += 1
        waiting = [each for each in self._open.values() if each.subject.lower() == subject]
        for each in waiting:  # The server did not pass them on: nobody will answer.
            each.fail(Forbidden())
        if listens:
            self._unheard = subject
        if listens or not waiting:
            _log.warning("bus.forbidden", subject=subject, listens=listens, url=self.url)

    async def _note_disconnect(self) -> None:
        # Unsent requests would leave after the reconnection, however late that is.
        self.client._pending.clear()
        self.client._pending_data_size = 0
        # No answer can arrive any more: who waits for one need not wait for the deadline.
        for each in self._open.values():
            each.fail(ConnectionLost())
        for pong in self.client._pongs:
            fail(pong, ConnectionLost())

    async def _note_reconnect(self) -> None:
        self.counters.reconnects += 1
        for wake in list(self._on_reconnect):
            wake()

    async def _note_closed(self) -> None:
        if not self._closing and self._on_closed is not None:
            self._on_closed()


def _nobody(message: Msg) -> bool:
    """Say whether the server itself answered: nobody listens to the request's subject."""
    status = "" if message.headers is None else message.headers.get("Status")
    return not message.data and status == NO_RESPONDERS_STATUS


def _code(message: Msg) -> int:
    code = "" if message.headers is None else message.headers.get(ERROR_CODE_HEADER, "")
    return int(code) if code.isdigit() else 0


class Inbox:
    """Where answers to several questions arrive."""

    def __init__(self, bus: NatsBus, subject: str, subscription: ClientSubscription) -> None:
        self.subject = subject
        self._bus, self._subscription = bus, subscription

    async def close(self) -> None:
        try:
            await self._subscription.unsubscribe()
        except nats.errors.Error:
            self._bus.counters.errors += 1  # The connection is closed, and the inbox with it.


class _Subscribed:
    def __init__(self, bus: NatsBus, subscription: ClientSubscription) -> None:
        self._bus, self._subscription = bus, subscription

    async def unsubscribe(self) -> None:
        await self._bus._forget(self._subscription)


def _delivery(message: Msg) -> Delivery:
    headers, data = message.headers, message.data
    if headers is None:
        return Delivery(message.subject, data, codec.looks_like_json(data))
    json = headers.get("Content-Type", "").startswith(codec.CONTENT_TYPE_JSON)
    trace = headers.get(tracing.HEADER, "")
    return Delivery(message.subject, data, json or codec.looks_like_json(data), trace)
