"""The bus in one process: the same contract, in an order that a seed reproduces.

Messages are delivered in the order they were sent, through the event loop, never within the
sender's call. A `Faults` hook may drop, repeat or delay each delivery, per pair of clients: the
whole-system simulation is this bus on a loop whose time jumps (`simulated_loop.py`).
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache, partial

from slackwater.common.base import codec, limits, tracing
from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.base.errors import (
    AccessRefused,
    DeadlineExceeded,
    NobodyThere,
    Rejected,
    Unavailable,
)
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
from slackwater.common.bus.dispatch import EndpointWorker, Mailbox
from slackwater.common.bus.faults import Faults
from slackwater.common.bus.micro import QUEUE_GROUP, VERBS, MicroService
from slackwater.common.bus.repeats import AGAIN, Asked
from slackwater.schemas.permissions import Grants

_ROUTES_MAX = 65_536
"""Subjects whose receivers are remembered; then they are looked up anew."""

Trace = Callable[[float, str, str, str, bytes], None]
"""(when, sender, receiver, subject, payload) of every delivery, for a log of the whole system."""


@dataclass(eq=False, slots=True)
class _Interest:
    """Somebody listens: to a pattern, alone or as one of a queue group."""

    pattern: tuple[str, ...]
    queue: str
    bus: "MemoryBus"
    take: Callable[[Delivery, str], None]


class _Interests:
    """Listeners by pattern. Most patterns are plain subjects, and found without a search."""

    def __init__(self) -> None:
        self._plain: dict[str, dict[_Interest, int]] = {}
        self._wild: dict[_Interest, int] = {}
        self._next = 0

    def add(self, interest: _Interest) -> None:
        self._next += 1
        if is_wild(interest.pattern):
            self._wild[interest] = self._next
        else:
            self._plain.setdefault(".".join(interest.pattern), {})[interest] = self._next

    def remove(self, interest: _Interest) -> None:
        if is_wild(interest.pattern):
            del self._wild[interest]
            return
        subject = ".".join(interest.pattern)
        del self._plain[subject][interest]
        if not self._plain[subject]:
            del self._plain[subject]

    def in_(self, subject: str) -> list[_Interest]:
        """Return those that a message to `subject` reaches, in the order in which they came."""
        tokens = subject.split(".")
        found = dict(self._plain.get(subject, {}))
        found |= {one: at for one, at in self._wild.items() if matches(one.pattern, tokens)}
        return sorted(found, key=lambda one: found[one])


class MemoryBroker:
    """The place where the buses of one process meet."""

    def __init__(
        self,
        seed: int = 0,
        *,
        clock: Clock | None = None,
        faults: Faults | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.clock = clock or LiveClock()
        self.faults = faults
        self.trace = trace
        self.running = True
        self._rng = random.Random(seed)
        self._interests = _Interests()
        self._routes: dict[str, list[_Interest]] = {}
        self._buses: list[MemoryBus] = []
        self._asked = 0
        self.captures: list[tuple[tuple[str, ...], Callable[[str, bytes], None]]] = []
        """Subject patterns, each with the function that keeps what is published to them."""
        self.inboxes: dict[str, MemoryBus] = {}
        """The client that waits for the answer to each inbox."""

    def connect(self, name: str) -> "MemoryBus":
        bus = MemoryBus(self, name)
        self._buses.append(bus)
        return bus

    def stop(self) -> None:
        """The broker is down: nothing is sent, what is under way is lost."""
        self.running = False

    def start(self) -> None:
        """Subscriptions are still there, as after a reconnection."""
        self.running = True

    async def crash(self, name: str) -> None:
        """Every bus of that client ends in the middle of whatever it does."""
        for bus in [bus for bus in self._buses if bus.name == name]:
            await bus.abort()

    def deliver(
        self,
        sender: str,
        receiver: "MemoryBus",
        subject: str,
        payload: bytes,
        take: Callable[[], None],
    ) -> None:
        """Call `take()` once per copy that arrives, never before this call returned."""
        delays_s: Sequence[float] = (0.0,)
        if self.faults is not None:
            delays_s = self.faults.copies(sender, receiver.name, subject)
        loop = asyncio.get_running_loop()
        for delay_s in delays_s:
            arrive = _Arrival(self, sender, receiver, subject, payload, take)
            if delay_s > 0.0:
                loop.call_later(delay_s, arrive, context=receiver.context)
            else:
                loop.call_soon(arrive, context=receiver.context)

    def capture(self, subject: str, payload: bytes) -> None:
        for pattern, take in self.captures:
            if matches(pattern, subject.split(".")):
                take(subject, payload)

    def new_inbox(self, name: str) -> str:
        self._asked += 1
        return f"{name}/{self._asked}"

    def route(self, subject: str) -> list[_Interest]:
        """Return the receivers of a message: every lone subscriber, and one of each queue group."""
        found = self._routes.get(subject)
        if found is None:
            found = self._interests.in_(subject)
            if len(self._routes) >= _ROUTES_MAX:
                self._routes.clear()
            self._routes[subject] = found
        if not any(one.queue for one in found):
            return found
        chosen = [one for one in found if not one.queue]
        for queue in dict.fromkeys(one.queue for one in found if one.queue):
            members = [one for one in found if one.queue == queue]
            chosen.append(members[0] if len(members) == 1 else self._rng.choice(members))
        return chosen

    def add(self, interest: _Interest) -> None:
        interest.bus.interests[interest] = None
        self._interests.add(interest)
        self._changed(interest)

    def remove(self, interest: _Interest) -> None:
        """Idempotent."""
        if interest not in interest.bus.interests:
            return
        del interest.bus.interests[interest]
        self._interests.remove(interest)
        self._changed(interest)

    def _changed(self, interest: _Interest) -> None:
        if is_wild(interest.pattern):
            self._routes.clear()
        else:
            self._routes.pop(".".join(interest.pattern), None)

    def forget(self, bus: "MemoryBus") -> None:
        for interest in tuple(bus.interests):
            self.remove(interest)
        if bus in self._buses:
            self._buses.remove(bus)


@dataclass(slots=True)
class _Arrival:
    broker: MemoryBroker
    sender: str
    receiver: "MemoryBus"
    subject: str
    payload: bytes
    take: Callable[[], None]

    def __call__(self) -> None:
        if not self.receiver.connected:
            return
        if self.broker.trace is not None:
            now_s = self.broker.clock.now_s()
            self.broker.trace(now_s, self.sender, self.receiver.name, self.subject, self.payload)
        self.take()


class MemoryBus:
    """One client's handle. Made by `MemoryBroker.connect(name)`."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.name = name
        self.context = copy_context()
        """Messages arrive in it, as on a connection: not in that of what their sender is doing."""
        self._grants: Grants | None = None
        self.interests: dict[_Interest, None] = {}
        self.counters = BusCounters()
        self._broker = broker
        self._closed = False
        self._instances = 0
        self._asked: dict[str, Asked[bytes]] = {}
        self._mailboxes: dict[_Interest, Mailbox] = {}
        self._workers: dict[_Interest, EndpointWorker] = {}

    @property
    def connected(self) -> bool:
        return self._broker.running and not self._closed

    def hold_to(self, grants: Grants) -> None:
        """Let this client publish and listen to no more than that."""
        self._grants = grants

    async def publish(self, subject: str, payload: bytes) -> None:
        self._check_sending(subject, payload)
        self.counters.published += 1
        self._broker.capture(subject, payload)
        self._send(subject, payload, "", codec.looks_like_json(payload))

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        json: bool = False,
        again: bool = True,
    ) -> bytes:
        self._check_sending(subject, payload)
        self.counters.requested += 1
        ask = partial(self._request, subject, payload, timeout_s, json, again)
        return await tracing.ask(subject, ask)

    async def _request(
        self, subject: str, payload: bytes, timeout_s: float, json: bool, again: bool
    ) -> bytes:
        token = self._broker.new_inbox(self.name)
        is_json = json or codec.looks_like_json(payload)

        async def send_again() -> None:
            if not self._send(subject, payload, token + AGAIN, is_json):
                asked.nobody()

        late = DeadlineExceeded(
            f"{subject}: no answer within {timeout_s:g} s; it may still have been acted on",
            limits.RETRY_WAIT_S_MIN,
        )
        asked = Asked[bytes](subject, timeout_s, late, send_again if again else None)
        self._asked[token] = asked
        self._broker.inboxes[token] = self
        try:
            if not self._send(subject, payload, token, is_json):
                raise NobodyThere(f"{subject}: nobody answers there", limits.RETRY_WAIT_S_MIN)
            return await asked.answer
        finally:
            asked.end()
            del self._asked[token], self._broker.inboxes[token]

    async def subscribe(self, pattern: str, handler: Handler) -> Subscription:
        self._check_open(pattern)
        self._check_listening(pattern)
        mailbox = Mailbox(pattern, handler, self.counters)
        interest = self._listen(pattern, "", lambda delivery, _: mailbox.put(delivery))
        self._mailboxes[interest] = mailbox
        return _Subscribed(self, interest)

    async def serve(self, info: ServiceInfo, endpoints: list[Endpoint]) -> None:
        workers = []
        for endpoint in endpoints:
            worker = EndpointWorker(endpoint, self._send_answer, self.counters)
            for subject in filter(None, (endpoint.subject, endpoint.of_tenants)):
                self._check_open(subject)
                self._check_listening(subject)
                take = self._taking(worker)
                self._workers[self._listen(subject, QUEUE_GROUP, take)] = worker
            workers.append(worker)
        self._instances += 1
        instance = f"{self.name}-{self._instances}"
        service = MicroService(info, instance, workers, self._broker.clock.now_s())
        for verb in VERBS:
            for subject in service.subjects(verb):
                self._listen(subject, "", self._showing(service, verb))

    async def stop_serving(self) -> None:
        for interest in self._workers:
            self._broker.remove(interest)

    async def flush(self) -> None:
        self._check_open("flush")
        await asyncio.sleep(0)

    async def close(self) -> None:
        if self._closed:
            return
        self._broker.forget(self)
        deadline_s = self._broker.clock.now_s() + limits.DRAIN_S
        for worker in self._workers.values():
            await worker.drain(max(0.0, deadline_s - self._broker.clock.now_s()))
        for mailbox in self._mailboxes.values():
            await mailbox.drain(max(0.0, deadline_s - self._broker.clock.now_s()))
        self._closed = True
        lost = f"{self.name} was closed before the answer; it may still have been acted on"
        for each in self._asked.values():  # An answer cannot come any more.
            each.fail(DeadlineExceeded(lost, limits.RECONNECT_WAIT_S))

    async def abort(self) -> None:
        """The client crashes: nothing is finished, nothing is answered."""
        self._closed = True
        self._broker.forget(self)
        for worker in self._workers.values():
            await worker.cancel()
        for mailbox in self._mailboxes.values():
            await mailbox.cancel()

    def _send(self, subject: str, payload: bytes, reply_to: str, json: bool) -> bool:
        """Deliver the message; False: no subscriber."""
        found = self._broker.route(subject)
        delivery = Delivery(subject, payload, json, tracing.current())
        for interest in found:
            take = partial(interest.take, delivery, reply_to)
            self._broker.deliver(self.name, interest.bus, subject, payload, take)
        return bool(found)

    async def _send_answer(self, reply_to: str, answer: Answer, json: bool) -> None:
        self._answer(reply_to, answer)

    def _answer(self, reply_to: str, answer: Answer) -> None:
        requester = self._broker.inboxes.get(reply_to.removesuffix(AGAIN))
        if requester is None:
            return  # No answer is wanted, or not any more.
        if not self.connected:
            self.counters.dropped += 1
            return
        self.counters.answered += 1
        code = answer.code if isinstance(answer, Failed) else 0
        payload = answer.payload if isinstance(answer, Failed) else answer
        take = partial(requester._receive_answer, reply_to, payload, code)
        self._broker.deliver(self.name, requester, reply_to, payload, take)

    def _receive_answer(self, token: str, payload: bytes, code: int) -> None:
        asked = self._asked.get(token.removesuffix(AGAIN))
        if asked is not None:  # Else it is late.
            asked.take(payload, again=token.endswith(AGAIN), code=code)

    def _listen(self, pattern: str, queue: str, take: Callable[[Delivery, str], None]) -> _Interest:
        interest = _Interest(tuple(pattern.split(".")), queue, self, take)
        self._broker.add(interest)
        return interest

    async def _forget(self, interest: _Interest) -> None:
        mailbox = self._mailboxes.pop(interest, None)
        if mailbox is not None:
            self._broker.remove(interest)
            await mailbox.cancel()

    def _taking(self, worker: EndpointWorker) -> Callable[[Delivery, str], None]:
        def take(delivery: Delivery, reply_to: str) -> None:
            answer = worker.begin(delivery, reply_to)
            if answer is not None:
                self._answer(reply_to, answer)

        return take

    def _showing(self, service: MicroService, verb: str) -> Callable[[Delivery, str], None]:
        def show(_: Delivery, reply_to: str) -> None:
            self._answer(reply_to, service.answer(verb))

        return show

    def _check_sending(self, subject: str, payload: bytes) -> None:
        if len(payload) > limits.MESSAGE_BYTES_MAX:
            raise Rejected(
                f"{len(payload)} bytes to {subject} are over a message's "
                f"{limits.MESSAGE_BYTES_MAX}; move large state over the transport"
            )
        self._check_open(subject)
        if self._grants is not None and not permitted(self._grants.publish, subject):
            self.counters.forbidden += 1
            raise AccessRefused(f"{subject}: this user of the bus may not ask there")

    def _check_listening(self, pattern: str) -> None:
        if self._grants is not None and not permitted(self._grants.listen, pattern):
            self.counters.forbidden += 1
            raise AccessRefused(f"{pattern}: this user of the bus may not listen there")

    def _check_open(self, subject: str) -> None:
        if not self.connected:
            state = "closed" if self._closed else "down, reconnecting"
            raise Unavailable(
                f"{subject}: the connection of {self.name} is {state}; nothing was sent",
                limits.RECONNECT_WAIT_S,
            )


class _Subscribed:
    def __init__(self, bus: MemoryBus, interest: _Interest) -> None:
        self._bus, self._interest = bus, interest

    async def unsubscribe(self) -> None:
        await self._bus._forget(self._interest)


@lru_cache(_ROUTES_MAX)
def permitted(patterns: tuple[str, ...], subject: str) -> bool:
    """Say whether a pattern allows the subject, which may be a pattern itself."""
    tokens = subject.split(".")
    wide = tokens[-1] == ">"
    return any(
        matches(tuple(pattern.split(".")), tokens)
        for pattern in patterns
        if not wide or pattern.endswith(">")
    )


def is_wild(pattern: tuple[str, ...]) -> bool:
    return "*" in pattern or pattern[-1] == ">"


def matches(pattern: tuple[str, ...], tokens: list[str]) -> bool:
    """NATS subjects: `*` is one token, a last `>` one or more."""
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(tokens) <= len(pattern):
            return False
    elif len(tokens) != len(pattern):
        return False
    return all(want in ("*", token) for want, token in zip(pattern, tokens, strict=False))
