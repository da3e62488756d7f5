"""A host: one process that runs executors' tasks, and flushes what they add to the tables.

A completion is told after every update of its process's tasks was applied (Qiao 2021, section
4.3.2): else an order that was dispatched because of it could read a table without them. What is
flushed at once, updates and completions, is a batch with a number. It is sealed, in a file that
outlives the process, before the first of its updates is applied; a process that comes after a kill
finds it there, applies the rest under the same number, and tells the completions. An executor with
a state keeps it with each batch, so that state and updates are of the same tasks.

The class is synchronous. Whatever it touches outside itself is behind three seams, which tests
replace by memory and kill at any call.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from slackwater.agent.permits import ComputePermit
from slackwater.agent.table_rows import RowNumbers
from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.common.base.packing import ARRAYS
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.app import App, Executor
from slackwater.elastic.cache import TableCache, Update
from slackwater.elastic.context import Context
from slackwater.elastic.failures import last_words
from slackwater.elastic.memory import ExecutorMemory
from slackwater.schemas.base import Message
from slackwater.schemas.elastic import (
    FRAME_PACKED_BYTES,
    PACKED_BYTES_MAX,
    Completion,
    ExecutorGiven,
    ForgetExecutor,
    GiveExecutor,
    HostLeaving,
    HostReady,
    HostWelcome,
    Noted,
    Order,
    Orders,
    Over,
    TakeExecutor,
    TaskFailed,
    Told,
)
from slackwater.schemas.relay import MemoryAsk

COMPLETIONS_MAX: Final = 4096
"""Completions of one batch."""
FLUSH_S: Final = 0.05
"""Seconds after which updates are flushed even where there is more to do: a process that always has
orders would else never tell."""
FLUSH_BY_TURNS_S: Final = 5.0
"""The same, of a job that takes turns: what it can compute, one task after another, is one subtask,
and its updates move once."""
SHARE_S: Final = 1.0
"""Seconds between two questions how much memory the process may use."""


class Batch(NamedTuple):
    number: int
    completions: tuple[Completion, ...]
    deltas: Mapping[str, Update]
    counts: Mapping[str, int] = MappingProxyType({})
    """How many updates a table's are, where its rule asks."""


class Tables(Protocol):
    """The program's tables, where all hosts read and add to them."""

    meanwhile: Callable[[Callable[[], bool]], None]
    """Called while a read waits for a network, with what says whether it is there."""

    @property
    def number(self) -> int:
        """The newest batch of this host that is applied whole."""
        ...

    def read(self, name: str) -> Floats:
        """Return the present values, all applied batches included, as an array of the caller's."""
        ...

    def read_rows(self, name: str, rows: RowNumbers) -> Floats:
        """Return present rows of a sparse table, none of them twice, in this order."""
        ...

    def apply(
        self,
        number: int,
        deltas: Mapping[str, Update],
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Add a batch, number `number` + 1, and return once it is applied. A batch of which a part
        was applied before is completed."""
        ...


class Files(Protocol):
    """The part of a host that outlives its process, of one run."""

    durable: bool
    """False: nothing outlives it, and nobody asks."""

    def seal(self, batch: Batch) -> None: ...

    def sealed(self) -> Batch | None:
        """Return the batch that was sealed last."""
        ...

    def keep(self, executor: int, move: int, number: int, state: bytes) -> None:
        """Keep an executor's state as of a batch; it counts once that is sealed."""
        ...

    def kept(self, executor: int, move: int, number: int) -> bytes | None:
        """Return the state, of this move, as of the newest batch up to `number`."""
        ...

    def settle(self, number: int) -> None:
        """Forget states of batches after this one: those were never sealed."""
        ...

    def forget(self, executor: int) -> None: ...

    def remove(self) -> None:
        """Remove all of it: the run is over."""
        ...


class _Held(NamedTuple):
    executor: Executor
    move: int


class Host:
    """`send`: hands a frame to the driver, with the payload that follows it."""

    def __init__(
        self,
        app: App,
        tables: Tables,
        files: Callable[[str], Files],
        send: Callable[[Message, bytes], None],
        now_s: Callable[[], float] = time.monotonic,
        memory: ExecutorMemory | None = None,
        permit: ComputePermit | None = None,
    ) -> None:
        """`files`: opens those of a run. `memory`: keeps executors within a limit. `permit`: tasks
        are computed with it alone, as the job takes turns."""
        self._app, self._tables, self._open, self._line = app, tables, files, send
        self._now_s, self.memory, self._permit = now_s, memory, permit
        self._files: Files | None = None
        self._run = ""
        self.cache = TableCache(app.tables, tables.read, tables.read_rows)
        tables.meanwhile = self._meanwhile
        self._running: list[int] = []
        """Executors whose tasks have begun; all but the last one wait for a table."""
        self._executors: dict[int, _Held] = {}
        self._parked: dict[int, _Held] = {}
        """Let go, and not to be forgotten yet."""
        self._giving: set[int] = set()
        self._queue: deque[Order] = deque()
        self._done: list[Completion] = []
        self._done_bytes = 0
        """Bytes of their results."""
        self._computed_s = 0.0
        self._reads = True
        """The last task read a table, as the next one will, then."""
        self._shared_s = float("-inf")
        """When it was last asked how much memory it may use."""
        self._ran: set[int] = set()
        """Executors that ran since the last batch."""
        self._unnoted: Batch | None = None
        self._oldest_s = 0.0
        self._leaving = False
        self._greeted = False
        """The driver knows what is here: what changes is told."""
        self.over: Over | None = None
        """Set once the host is to end."""
        self._failure: TaskFailed | None = None

    @property
    def failed(self) -> bool:
        """Say whether the program raised: nothing more is run."""
        return self._failure is not None

    # From the driver ------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """The connection to the driver is lost. What is not noted is said again after the next
        Welcome, before anything else is."""
        self._greeted = False

    def _send(self, message: Message, payload: bytes = b"") -> None:
        if self._greeted:
            self._line(message, payload)

    def heard(self, message: Message, payload: bytes = b"") -> None:
        """Take a frame of the driver's. Raises Rejected for one of another run."""
        match message:
            case HostWelcome():
                self._welcome(message.run)
            case Orders():
                self._take_orders(message)
            case Noted():
                if self._unnoted is not None and message.number >= self._unnoted.number:
                    self._unnoted = None
            case TakeExecutor():
                self._take(message, payload)
            case GiveExecutor() if message.executor in self._executors:
                self._giving.add(message.executor)
            case ForgetExecutor():
                self._forget(message.executor)
            case Over():
                self.over = message

    def _welcome(self, run: str) -> None:
        if self._files is None:
            self._files, self._run = self._open(run), run
            self._redo()
        elif run != self._run:
            raise Rejected(f"the driver began run {run} while this host was in run {self._run}")
        batch = self._unnoted
        waiting = [order.number for order in self._queue] + [each.order for each in self._done]
        ready = HostReady(
            completions=batch.completions if batch else (),
            number=batch.number if batch else 0,
            orders=tuple(waiting),
            executors=tuple((number, held.move) for number, held in self._executors.items()),
            parked=tuple((number, held.move) for number, held in self._parked.items()),
        )
        self._giving.clear()
        self._greeted = True
        self._send(ready)
        if self._leaving:
            self._send(HostLeaving())
        if self._failure is not None:
            self._send(self._failure)

    def _redo(self) -> None:
        """Complete the batch that a former process of this host sealed, or one without updates that
        it may have left in some of the tables: else the next one, under its number, would count in
        the others alone."""
        assert self._files is not None
        batch, number = self._files.sealed(), self._tables.number + 1
        sealed = batch is not None and batch.number == number
        self._files.settle(number if sealed else number - 1)
        if batch is not None and sealed:
            self._tables.apply(number, batch.deltas, batch.counts)
        else:
            self._tables.apply(number, {})
        self._unnoted = batch

    def _take_orders(self, message: Orders) -> None:
        known = {order.number for order in self._queue} | {each.order for each in self._done}
        for order in message.orders:
            if order.number not in known and order.executor in self._executors:
                known.add(order.number)
                self._queue.append(order)

    def _take(self, take: TakeExecutor, payload: bytes) -> None:
        assert self._files is not None
        number, held = take.executor, self._executors.get(take.executor)
        if held is not None and held.move == take.move:
            return
        parked = self._parked.pop(number, None)
        if parked is not None and parked.move in (take.move, take.parked):
            self._executors[number] = parked._replace(move=take.move)
            return
        try:
            made = self._app.executor(number)
            made.load(number)
            state = self._files.kept(number, take.move, self._tables.number)
            if state is None and take.has_state:
                state = payload
            if state is not None:
                made.restore(ARRAYS.unpack(state))
        except Exception as error:  # The program's own code: whatever it raises ends the program.
            self._fail(number, error)
            return
        self._executors[number] = _Held(made, take.move)
        if self.memory is not None:
            self.memory.came(number, made, self._waiting, self._ran)
        self.cache.clear()

    def _forget(self, number: int) -> None:
        assert self._files is not None
        self._parked.pop(number, None)
        if self._executors.pop(number, None) is not None:
            self._drop_orders(number)
        if self.memory is not None:
            self.memory.gone(number)
        self._files.forget(number)

    def _drop_orders(self, number: int) -> None:
        self._queue = deque(order for order in self._queue if order.executor != number)

    # Tasks ----------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Say whether no task waits that may run."""
        return self._next() is None

    def _next(self) -> int | None:
        for at, order in enumerate(self._queue):
            if self._may_run(order.executor):
                return at
        return None

    def _may_run(self, executor: int) -> bool:
        if executor in self._giving or executor in self._running:
            return False
        return self.memory is None or self.memory.has(executor)

    @property
    def _waiting(self) -> list[int]:
        """Return the executors of tasks that wait, in their order."""
        return [each.executor for each in self._queue if each.executor not in self._giving]

    def step(self) -> None:
        """Run the next task, if any; flush what is due; let executors go. Returns soon."""
        if self.failed or self._files is None:
            return
        at = self._next()
        if self.memory is not None:
            self._look_at_memory(self.memory, stalled=at is None and not self._ran)
        full = len(self._done) >= COMPLETIONS_MAX or self._done_bytes > FRAME_PACKED_BYTES
        if at is not None and not full:
            self._run_task(at)
        patience_s = FLUSH_S if self._permit is None else FLUSH_BY_TURNS_S
        late = bool(self._done) and self._now_s() - self._oldest_s >= patience_s
        if (late or full or self._giving or self.idle) and not self.failed:
            self._flush()
        if self._giving and not self._done and self._greeted:
            self._give()
        if self.memory is not None:
            self.memory.look_ahead(self._waiting, self._ran, idle=self.idle and not self._ran)

    def _look_at_memory(self, memory: ExecutorMemory, stalled: bool) -> None:
        """Count for how long nothing can be run, as data are read; and, of a job that takes turns,
        learn how much memory it may use from now on."""
        now_s = self._now_s()
        memory.waits(now_s, stalled and bool(self._waiting))
        if self._permit is None or now_s - self._shared_s < SHARE_S:
            return
        self._shared_s = now_s
        told = MemoryAsk(
            used_bytes=memory.used_bytes, aside_bytes=memory.aside_bytes,
            stalled_s=memory.stalled_s,
        )  # fmt: skip
        if limit_bytes := self._permit.share(told):
            memory.limit_bytes = limit_bytes

    def _meanwhile(self, is_there: Callable[[], bool]) -> None:
        """Run other executors' tasks while the running one waits for a table: it gives its slot
        away, and goes on after the last of them."""
        while self._running and not is_there() and not self.failed and self._has_room():
            at = self._next()
            if at is None:
                return
            self.cache.put_aside()
            try:
                self._run_task(at)
            finally:
                self.cache.take_back()
            if self._permit is not None and not is_there():
                self._permit.give_back()

    def _has_room(self) -> bool:
        """Say whether the batch has room for a task beside those that have begun."""
        begun = len(self._running) + 1
        most = self._done_bytes + begun * PACKED_BYTES_MAX
        return len(self._done) + begun <= COMPLETIONS_MAX and most <= FRAME_PACKED_BYTES

    def _run_task(self, at: int) -> None:
        order = self._queue[at]
        del self._queue[at]
        held = self._executors[order.executor]
        context = Context(
            self.cache, order.executor, order.version, self._app.executors, self._now_s,
            self._computes,
        )  # fmt: skip
        self._ran.add(order.executor)
        self._running.append(order.executor)
        if self.cache.has(order.version) or not self._reads:
            self._computes()  # Else it reads first, which needs no processor.
        began_s = self._now_s()
        try:
            result = ARRAYS.pack(held.executor.run(context, ARRAYS.unpack(order.task)))
            if len(result) > PACKED_BYTES_MAX:
                raise Rejected(
                    f"a result of {len(result)} bytes, at most {PACKED_BYTES_MAX}: put what is "
                    "large into a table"
                )
        except Exception as error:  # The program's own code: whatever it raises ends the program.
            self.cache.discard()
            if isinstance(error, SlackwaterError) and not isinstance(error, Rejected):
                raise  # The tables cannot be reached: it is not the program's fault.
            self._fail(order.executor, error)
            return
        finally:
            self._running.pop()
            self._let_others_compute()
        self.cache.complete()
        self._reads = context.has_read
        self._computed_s += max(0.0, self._now_s() - began_s - context.read_s)
        if not self._done:
            self._oldest_s = self._now_s()
        self._done.append(Completion(order=order.number, result=result))
        self._done_bytes += len(result)

    def _computes(self) -> None:
        """Take the permit to compute, if the job takes turns."""
        if self._permit is not None:
            self._permit.take()

    def _let_others_compute(self) -> None:
        """Give the permit back once no other task can be run: several of them, one after another,
        would else take turns with other jobs' and be done when these are, and all would wait for
        the network together. One that waits for a table goes on, if that is there by now."""
        if self._permit is not None and not self._running and self.idle:
            self._permit.give_back()

    def _fail(self, executor: int, error: Exception) -> None:
        """Tell the driver what the program raised; it ends the run."""
        self._failure = TaskFailed(executor=executor, reason=last_words(error))
        self._send(self._failure)

    def _flush(self) -> None:
        """Seal, apply and tell what is done, unless the batch before is not noted yet."""
        if not self._done or self._unnoted is not None:
            return
        if self._permit is not None:
            self._permit.give_back()
        assert self._files is not None
        number = self._tables.number + 1
        kept = self._ran & self._executors.keys() if self._files.durable else ()
        for executor in sorted(kept):
            if (state := self._state(executor)) is not None:
                self._files.keep(executor, self._executors[executor].move, number, state)
        if self.failed:
            return
        batch = Batch(number, tuple(self._done), self.cache.log, self.cache.counts)
        self._files.seal(batch)
        self._tables.apply(number, batch.deltas, batch.counts)
        self.cache.sent()
        computed_s, self._computed_s = self._computed_s, 0.0
        self._done, self._done_bytes, self._ran = [], 0, set()
        self._unnoted = Batch(number, batch.completions, {})
        told = Told(number=number, completions=batch.completions, computed_s=computed_s)
        self._send(told)

    def push_nothing(self) -> None:
        """Number a batch without updates, for which a change of the number of workers waits: once
        what a former process sealed is complete, which may have the next number."""
        if self._files is None:
            return
        self._tables.apply(self._tables.number + 1, {})

    def remove_files(self) -> None:
        """Leave nothing behind: the run is over, and its result is told."""
        if self._files is not None:
            self._files.remove()
        if self.memory is not None:
            self.memory.close()

    # Leaving --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask the driver to take the executors away, and to say then that it is over."""
        if not self._leaving:
            self._leaving = True
            self._send(HostLeaving())

    def _give(self) -> None:
        """Let executors go whose updates are all applied. Their orders are sent anew, elsewhere."""
        for number in sorted(self._giving & self._executors.keys()):
            state = self._state(number)
            if self.failed:
                return
            held = self._parked[number] = self._executors.pop(number)
            self._drop_orders(number)
            given = ExecutorGiven(executor=number, move=held.move, has_state=state is not None)
            self._send(given, state or b"")
        self._giving.clear()

    def _state(self, number: int) -> bytes | None:
        """Return an executor's state, packed; None: it has none, or cannot say it."""
        executor = self._executors[number].executor
        if self.memory is not None and type(executor).save is not Executor.save:
            self.memory.bring(number)
        try:
            state = executor.save()
            return None if state is None else ARRAYS.pack(state)
        except Exception as error:  # The program's own code.
            self._fail(number, error)
            return None
