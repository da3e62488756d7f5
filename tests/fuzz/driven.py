"""A service's real core without its shell, and what the shell would demand of it: no exception, one
answer to each request, records that another life can read, messages that their receivers take."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec
from tests.fuzz.messages import message

from slackwater.common.base import codec
from slackwater.common.base.effects import (
    Action,
    Answered,
    CancelTimer,
    Effect,
    Observed,
    Persist,
    Publish,
    Recovered,
    Reply,
    Request,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.common.base.errors import Rejected
from slackwater.common.shell import Core, ServiceDefinition
from slackwater.schemas.base import Message, Ok, Record, Refused
from slackwater.schemas.cluster import (
    AggregatorList,
    AggregatorsAllocated,
    AllocateAggregators,
    ListAggregators,
)
from slackwater.schemas.placement import BucketsHeld, ListBuckets

ANSWERS: Mapping[type[Message], type[Message]] = {
    AllocateAggregators: AggregatorsAllocated,
    ListAggregators: AggregatorList,
    ListBuckets: BucketsHeld,
}
"""Answers to requests, where that is not Ok."""


class Driven:
    """`acts` carries out an `Action` and returns the events that follow. `restarted` is called with
    the core of each new life."""

    def __init__(
        self,
        rng: Random,
        define: Callable[[], ServiceDefinition],
        acts: Callable[[Any], list[Any]] = lambda effect: [],
        restarted: Callable[[Core], list[Any]] = lambda core: [],
    ) -> None:
        self.rng = rng
        self._define, self._acts, self._restarted = define, acts, restarted
        self.now_s = 1e9
        self.epoch = 0
        self.steps = self.answered = self.stored = 0
        self._tokens = 0
        self._open: dict[int, Message] = {}
        self._asked: list[Request] = []
        self._timers: dict[Any, float] = {}
        self._records: dict[str, dict[str, bytes]] = {}
        self.restart()

    def restart(self) -> None:
        """kill -9, and the next life from what was stored."""
        self._open.clear()
        self._asked.clear()
        self._timers.clear()
        self.epoch += 1
        definition = self._define()
        self.core = definition.core
        self.endpoints = list(definition.endpoints.values())
        self.subscriptions = list(definition.subscriptions.items())
        kinds: Mapping[str, type[Record]] = definition.buckets
        found = {
            bucket: {
                key: codec.decode_record(value, kind, key)[0]
                for key, value in self._records.get(bucket, {}).items()
            }
            for bucket, kind in kinds.items()
        }
        self.step(Recovered(self.epoch, found))
        for event in self._restarted(self.core):
            self.step(event)

    def step(self, event: Any) -> None:
        """The event, and what follows from it at once."""
        events = [event]
        while events:
            self.steps += 1
            effects = self.core.step(events.pop(0), self.now_s)
            for effect in effects:
                if isinstance(effect, Persist):
                    self._store(effect)
            for effect in effects:
                events += self._perform(effect)

    def _store(self, effect: Persist) -> None:
        bucket = self._records.setdefault(effect.bucket, {})
        if effect.record is None:
            bucket.pop(effect.key, None)
            return
        value = codec.encode_record(effect.record, self.epoch)
        assert codec.decode_record(value, type(effect.record), effect.key)[0] == effect.record
        bucket[effect.key] = value
        self.stored += 1

    def _perform(self, effect: Effect) -> list[Any]:
        match effect:
            case Reply(token=token, message=said):
                assert token in self._open, f"answered twice, or never asked: {said}"
                del self._open[token]
                self._check(said)
                self.answered += 1
            case Publish(message=said):
                self._check(said)
            case Request(message=said):
                self._check(said)
                self._asked.append(effect)
            case StartTimer(key=key, at_s=at_s):
                self._timers[key] = at_s
            case CancelTimer(key=key):
                self._timers.pop(key, None)
            case Action():
                return self._acts(effect)
        return []

    def _check(self, said: Message) -> None:
        """A receiver takes it."""
        try:
            payload = codec.encode(said)
        except Rejected:
            return  # Too large: the shell says so instead.
        assert codec.decode(payload, type(said)) == said

    # Events from outside --------------------------------------------------------------------------

    def ask(self, kind: Any) -> None:
        self._tokens += 1
        self._open[self._tokens] = asked = message(kind, self.rng)
        self.step(Requested(self._tokens, asked))

    def tell(self) -> None:
        if self.subscriptions:
            subject, kind = self.rng.choice(self.subscriptions)
            self.step(Observed(subject, message(kind, self.rng)))

    def answer(self) -> None:
        """One of the core's own requests: as it should be, refused, or with anything at all."""
        if not self._asked:
            return
        request = self._asked.pop(self.rng.randrange(len(self._asked)))
        right = ANSWERS.get(type(request.message), Ok)
        kind = self.rng.choice((right, right, right, Refused, Ok))
        said = message(kind, self.rng)
        if isinstance(said, AggregatorsAllocated) and isinstance(
            request.message, AllocateAggregators
        ):
            said = msgspec.structs.replace(said, request=request.message.request)
        if isinstance(said, BucketsHeld) and self.rng.random() < 0.5:
            said = msgspec.structs.replace(said, incarnation=self.rng.choice((0, 1, 2)))
        self.step(Answered(request.key, said))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for key, at_s in sorted(self._timers.items(), key=lambda timer: timer[1]):
            if at_s <= self.now_s and self._timers.pop(key, None) is not None:
                self.step(TimerFired(key))

    def settle(self) -> None:
        """All that the core waits for is refused in the end; then it owes nobody an answer."""
        for _ in range(200):
            asked, self._asked = self._asked, []
            for request in asked:
                self.step(Answered(request.key, Refused(reason="nobody answers")))
            if not self._open:
                return
            self.pass_time(20.0)  # Jobs may ask for ten minutes to end.
        raise AssertionError(f"never answered: {list(self._open.values())[:3]}")
