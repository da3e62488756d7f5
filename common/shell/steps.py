"""The inbox and the order of things: step, persist, then say.

One event at a time goes through the core. The step's records are handed to the buckets' writers
at once, its other effects wait in line until all records of this step and of the steps before it
are durable; the next event does not wait for that (group commit). So nothing is ever said that a
restart would not remember, and all is said in the order in which it was decided.

A step that raises because of an event from outside ends nothing here: nothing of it is stored or
said, no further event goes through the core, and `breached` is told (breaches.py). All records of
a step are encoded, and so checked, before the first of them is written.

Effects are carried out without a task switch wherever none of them has to be awaited: a request
whose answer needs no record is answered within the call that brought it in.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from slackwater.common.base import limits, tracing
from slackwater.common.base.clock import Clock
from slackwater.common.base.codec import encode_record
from slackwater.common.base.effects import Answered, Effect, Persist, Publish, Reply, Requested
from slackwater.common.base.errors import Fatal, Rejected
from slackwater.common.base.failpoints import failpoint
from slackwater.common.shell.breaches import Breaches, from_outside
from slackwater.common.shell.counters import Counters
from slackwater.common.shell.definition import Core
from slackwater.common.shell.persister import BucketWriter
from slackwater.schemas.base import Message, Record, Refused


class Step:
    """The effects of one event, which wait for `outstanding` records."""

    __slots__ = ("begun", "outputs", "outstanding", "persisted", "trace")

    def __init__(self) -> None:
        self.outputs: deque[Effect] = deque()
        self.outstanding = 0
        self.persisted = False
        self.begun = False
        self.trace = tracing.current()


class Steps:
    """Runs `core`. `perform` carries out an effect that needs no await, `publish` sends a fact."""

    doubtful: Callable[[], bool]
    """Says whether the store has not answered for long. Set before `begin`."""
    reads: frozenset[type[Message]] = frozenset()
    """Types of requests that change nothing: while the store is doubtful, their answers wait for no
    record."""
    breached: Callable[[Any, Exception], None]
    """Told of an event from outside that broke the core, and how. Set before `begin`."""

    def __init__(
        self,
        service: str,
        core: Core,
        clock: Clock,
        counters: Counters,
        breaches: Breaches,
        perform: Callable[[Effect], None],
        publish: Callable[[Publish], Awaitable[None]],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._clock = clock
        self._counters = counters
        self._breaches = breaches
        self._perform = perform
        self._publish = publish
        self._fail = fail
        self._writers: Mapping[str, BucketWriter] = {}
        self._epoch = 0
        self._inbox: deque[tuple[Any, str]] = deque()
        """Each with the trace that it is part of."""
        self._waiting: deque[Step] = deque()
        self._paused = True
        self._deaf = False
        """The core is broken: no further event goes through it."""
        self._busy = False
        self._publishing = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._persist_before = f"{service}.persist.before"
        self._persist_after = f"{service}.persist.after"

    @property
    def waiting(self) -> int:
        """Steps that are not carried out yet."""
        return len(self._waiting) + len(self._inbox)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= limits.STEPS_WAITING_MAX

    async def room(self) -> None:
        """Return when there is room for another event."""
        while self.full:
            self._room.clear()
            await self._room.wait()

    def begin(self, first: Any, writers: Mapping[str, BucketWriter], epoch: int) -> None:
        """The core's first event; what was posted before it follows."""
        self._writers = writers
        self._epoch = epoch
        self._paused = False
        self._inbox.appendleft((first, ""))
        self._drain()

    def halt(self) -> None:
        """No further step, no further output."""
        self._paused = True
        self._inbox.clear()
        self._waiting.clear()

    def post(self, event: Any) -> None:
        """Take an event in: at once, unless a step is under way."""
        if len(self._inbox) >= limits.INBOX_EVENTS_MAX:
            raise Fatal(f"the inbox is full ({limits.INBOX_EVENTS_MAX} events): the core is stuck")
        self._inbox.append((event, tracing.current()))
        if not self._busy:
            self._drain()

    def durable(self, step: Step) -> None:
        """One of the step's records is on disk."""
        step.outstanding -= 1
        if step.outstanding == 0 and not self._busy and not self._publishing:
            self._drain()

    def _drain(self) -> None:
        if self._paused:
            return
        self._busy = True
        try:
            if self._waiting:
                self._release()
            while self._inbox and not self._deaf and not self._paused:
                event, trace = self._inbox.popleft()
                if trace == tracing.current():
                    self._step(event)
                else:
                    with tracing.under(trace):
                        self._step(event)
                if self._waiting:
                    self._release()
        except Exception as error:  # A broken invariant: the process ends and is started anew.
            self._paused = True
            self._fail(error)
        finally:
            self._busy = False

    def _step(self, event: Any) -> None:
        if self._breaches.kept:
            refusal = self._breaches.refuses(event)
            if refusal and (event := self._refused(event, refusal)) is None:
                return
        counters = self._counters
        begun_s = perf_counter()
        try:
            effects = self._core.step(event, self._clock.now_s())
            values = self._encoded(effects)
        except Exception as error:  # A broken invariant: what comes from outside is refused now.
            if not from_outside(event):
                if isinstance(error, Rejected):  # Ours: another life may decide otherwise.
                    raise Fatal(f"{type(event).__name__}: {error}") from error
                raise
            self._deaf = True
            self._inbox.clear()
            self.breached(event, error)
            return
        spent_s = perf_counter() - begun_s
        counters.step_s.add(spent_s)
        if spent_s > counters.step_s_max:
            counters.step_s_max = spent_s
        if effects and not values and not self._waiting:
            effects = self._carry_out(effects)
        elif type(event) is Requested and type(event.message) in self.reads and self.doubtful():
            for reply in (each for each in effects if type(each) is Reply):
                self._perform(reply)
            effects = [each for each in effects if type(each) is not Reply]
        if not effects:
            return
        step = Step()
        for effect in effects:
            if type(effect) is Persist:
                step.outstanding += 1
            else:
                step.outputs.append(effect)
        self._waiting.append(step)
        if step.outstanding:
            step.persisted = True
            counters.records += step.outstanding
            failpoint(self._persist_before)
            for effect, value in values:
                self._writers[effect.bucket].write(effect.key, value, step)

    def _carry_out(self, effects: Sequence[Effect]) -> Sequence[Effect]:
        """Carry out effects that need no waiting. Return the first that must be awaited, and all
        after it."""
        for at, effect in enumerate(effects):
            if type(effect) is Publish:
                return effects[at:]
            self._perform(effect)
        return ()

    def _encoded(self, effects: Sequence[Effect]) -> list[tuple[Persist, bytes | None]]:
        """Encode the step's records, and check that they can be read back. Raises Rejected."""
        return [
            (effect, None if effect.record is None else self._value(effect, effect.record))
            for effect in effects
            if type(effect) is Persist
        ]

    def _value(self, effect: Persist, record: Record) -> bytes:
        if effect.bucket not in self._writers:
            raise Fatal(f"bucket {effect.bucket} is not this service's own: it may not write it")
        try:
            return encode_record(record, self._epoch)
        except Rejected as error:
            raise Rejected(f"bucket {effect.bucket}, key {effect.key}: {error}") from error

    def _refused(self, event: Any, reason: str) -> Any:
        """Refuse an event that broke a former life: it does not reach the core. Returns the event
        in its place; None: there is none."""
        self._counters.breaches_refused += 1
        match event:
            case Requested(token=token):
                self._perform(Reply(token, Refused(reason=reason)))
                return None
            case Answered(key=key):
                return Answered(key, Refused(reason=reason))
        return None

    def _release(self) -> None:
        """Carry out effects up to the first that must be awaited."""
        waiting = self._waiting
        while waiting and not self._publishing and not waiting[0].outstanding:
            step = waiting[0]
            self._begin(step)
            with tracing.under(step.trace):
                if not self._say(step.outputs):
                    self._publishing = True
                    self._wake.set()
                    return
            waiting.popleft()
            self._room.set()

    def _say(self, outputs: deque[Effect]) -> bool:
        """Carry out effects up to the first that must be awaited. Return whether none must."""
        while outputs:
            if type(outputs[0]) is Publish:
                return False
            self._perform(outputs.popleft())
        return True

    def _begin(self, step: Step) -> None:
        if step.persisted and not step.begun:
            failpoint(self._persist_after)
        step.begun = True

    async def run(self) -> None:
        """Carries out the effects from the first that must be awaited, as long as there are."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting = self._waiting
            while waiting and not waiting[0].outstanding:
                step = waiting[0]
                self._begin(step)
                with tracing.under(step.trace):
                    while step.outputs:
                        effect = step.outputs.popleft()
                        if type(effect) is Publish:
                            await self._publish(effect)
                        else:
                            self._perform(effect)
                if waiting:  # Not halted meanwhile.
                    waiting.popleft()
                    self._room.set()
            self._publishing = False
