"""The Agent's shell: its own thread, in which the bus, the channels and the core live.

The training program's thread fills slots and waits; this one rings, hears of versions, follows
redirects and reconnects. Doorbells are coalesced: whatever the program finished since the thread
last ran goes out as one frame per aggregator. The bus is needed to register and to ask where
buckets are, never for a push or a pull: when it or the master is away, training goes on.
"""

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import uvloop

from slackwater.agent.address_choice import agent_fabrics, dial
from slackwater.agent.attachment import Attached
from slackwater.agent.control import Control, Progress
from slackwater.agent.core import AgentCore
from slackwater.agent.effects import (
    AgentAction,
    Connect,
    Deliver,
    Fail,
    Locate,
    MakeOffer,
    Reattach,
    Refuse,
    Resume,
    Ring,
    Send,
    WriteSeed,
    WriteSize,
)
from slackwater.agent.initial import Initial
from slackwater.agent.line import connected
from slackwater.agent.patience import Patience
from slackwater.agent.permits import leave, lent, node_permits, on_boundary
from slackwater.agent.region_access import InPlace
from slackwater.agent.region_choice import attach
from slackwater.agent.sizing import Sizing, size_at
from slackwater.agent.transfers import Transfers
from slackwater.agent.worker_bucket import Waiter, WorkerBucket, worker_buckets
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import (
    DeadlineExceeded,
    Fatal,
    Rejected,
    Retryable,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.bus.access import Access
from slackwater.common.bus.relay import Ticket
from slackwater.common.domains.slots.frames import (
    ENTRIES_MAX,
    Granted,
    Hello,
    decode,
    encode_control,
    encode_hello,
    encode_rings,
)
from slackwater.common.domains.slots.sizes import Size
from slackwater.common.shell.effect_runner import EffectRunner, Handlers, handlers, on
from slackwater.common.transport.base import Channel, Fabric
from slackwater.common.transport.gpu import Device
from slackwater.schemas.base import RUN_ATTEMPTS, AggregatorId, JobId
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import Endpoint, JobPlan, Located
from slackwater.schemas.tensors import TensorSpec

_log = logging.getLogger("slackwater.agent")
_CLOSE_S: Final = 10.0


class Session:
    """One rank's life with the cluster. Its methods are called from the program's thread, except
    those that begin with an underscore, which run in the Agent's own."""

    def __init__(
        self,
        spec: JobSpec,
        rank: int,
        tensors: tuple[TensorSpec, ...],
        initial: Initial,
        way: Access | Ticket,
        *,
        submitted: bool,
        transport: str | None,
        deadline_s: float,
        device: Device | None = None,
    ) -> None:
        self.job, self.rank = JobId(spec.id), rank
        self.buckets: list[WorkerBucket] = []
        self.plan: JobPlan | None = None
        self.failure: SlackwaterError | None = None
        self.progress = Progress(permits=node_permits() if isinstance(way, Ticket) else None)
        self.sizing: Sizing | None = None
        """Set in rank 0 of an elastic job."""
        self.least = 0  # Becomes `Sizing.least`.
        self._spec, self._tensors, self._initial, self._device = spec, tensors, initial, device
        self._way, self._submitted, self._transport = way, submitted, transport
        self._attempt = way.hello.attempt if isinstance(way, Ticket) else 0
        self.attempt, self.restarts = divmod(self._attempt, RUN_ATTEMPTS)
        self._core = AgentCore(rank, random.Random(f"{spec.id}/{rank}"))
        self._deadline_s, self._not_located = deadline_s, "the controller has not answered"
        self._channels: dict[AggregatorId, Channel] = {}
        self._transfers = Transfers(self._core, self._channels, initial, self._came, self._drop)
        self._errors: dict[AggregatorId, str] = {}
        self._fabrics: dict[str, Fabric] = {}
        self._rung: deque[tuple[int, int]] = deque()
        self._rings: dict[AggregatorId, list[tuple[int, int]]] = {}
        """Handles and iterations that leave with the effects of one step, by aggregator."""
        self._flush_due = self._delivered = self._all_here = self._finished = False
        self._waiter: Waiter | None = None
        self._patience = Patience(
            self._who(), rank, lambda asking: self._call(lambda: self._spawn(asking)), self._fail
        )
        self._control: Control | None = None
        self._opened = threading.Event()
        self._finish: str | None = None
        self._thread = threading.Thread(
            target=self._live, name=f"slackwater-{spec.id}-{rank}", daemon=True
        )

    # The program's side ---------------------------------------------------------------------------

    def open(self, within_s: float) -> None:
        """Returns when every bucket is attached and its parameters are here."""
        self._thread.start()
        missing = "" if self._opened.wait(within_s) else self._missing_at_start(within_s)
        if error := (DeadlineExceeded(f"{self._who()}: {missing}") if missing else self.failure):
            self.close(None)
            raise error

    def ring(self, bucket: WorkerBucket) -> None:
        """All tensors of the bucket's newest iteration are in its slot."""
        self._rung.append((bucket.index, bucket.iteration))
        if not self._flush_due:
            self._flush_due = True
            self._call(self._flush)

    def size(self, iteration: int) -> Size:
        """Return how many workers count in an iteration, the next one at most, as far as this one
        knows."""
        slots = self.buckets[0].slots if self.buckets else None
        return size_at(self.plan, slots.sizes if slots else None, self.sizing, iteration)

    def on_boundary(self, iteration: int) -> None:
        """The program has waited for all of the iteration: here the number of workers changes."""
        on_boundary(self.progress.permits)
        if self.sizing is None:
            return
        if self.sizing.decide(max(bucket.iteration for bucket in self.buckets) + 1):
            self._call(self._announce_size)
        if self.sizing.reached(iteration) and self._control is not None:
            self._call(self._control.look_at_size)

    def wait(self, buckets: Sequence[WorkerBucket], deadline_s: float) -> None:
        """Until each has settled: its version is there, or its push was refused."""
        self._waiter = waiter = Waiter(buckets)
        waiter.look()
        late: WorkerBucket | None = None
        if self.failure is None and all(bucket.refused is None for bucket in buckets):
            with lent(self.progress.permits):
                late = self._patience.sleep(waiter, buckets, deadline_s, self.plan, self._control)
        self._waiter = None
        if self.failure is not None:
            raise self.failure
        if late is not None:
            within = f"within {deadline_s:g} s{self._patience.reason}"
            raise DeadlineExceeded(f"{self._who()}: {self._describe(late)} did not come {within}")

    def close(self, finish: str | None) -> None:
        """`finish`: tell the master that this rank is done, with this result."""
        self._finish = finish
        leave(self.progress.permits)
        if self._thread.is_alive():
            self._call(self._closing.set)
            self._thread.join(_CLOSE_S + (self._deadline_s if finish is not None else 0.0))
        if finish is not None and not self._finished:
            raise self.failure or DeadlineExceeded(
                f"{self._who()}: the master did not store its end within {self._deadline_s:g} s"
            )

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # The loop is closed: its thread failed, and every wait says why.
            assert self.failure is not None

    def _who(self) -> str:
        return f"job {self.job}, rank {self.rank}"

    def _describe(self, bucket: WorkerBucket) -> str:
        where = self._core.describe(bucket.index)
        where += "".join(f"; {at}: {text}" for at, text in sorted(self._errors.items()))
        return f"version {bucket.iteration} of bucket {bucket.index} ({bucket.names}; {where})"

    def _missing_at_start(self, within_s: float) -> str:
        cluster = self._control.cluster if self._control is not None else None
        if cluster is None:
            return f"the master at {self._way} did not register it within {within_s:g} s"
        late = next((bucket for bucket in self.buckets if bucket.version < 0), None)
        if late is None:
            return f"cluster {cluster} did not place it within {within_s:g} s: {self._not_located}"
        return f"{self._describe(late)} did not come within {within_s:g} s"

    # The thread -----------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except SlackwaterError as error:
            self._fail(error)
        except BaseException as error:  # However this thread ends, the waits must end.
            self._fail(Fatal(f"{self._who()}: the Agent's thread ended: {error!r}"))
            raise

    async def _main(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.run = lambda work: asyncio.run_coroutine_threadsafe(work, loop)
        self._closing = asyncio.Event()
        self._fabrics = agent_fabrics(self._device)
        async with connected(self._way, f"agent-{self.job}-{self.rank}") as line:
            self._begin(line.clock)
            self._control = control = Control(
                line, self._spec, self.rank, self._attempt, self._deadline_s,
                lambda: self._core.location_epoch,
                lambda: self.size(self.progress.first_iteration).workers,
            )  # fmt: skip
            await control.register(self._tensors, self._submitted)
            self._apply(self._core.start(line.clock.now_s()))
            observing = self._runner.tasks.spawn(control.observe(self.progress))
            self._spawn(control.repeat(lambda now_s: self._apply(self._core.repeat(now_s))))
            await self._closing.wait()
            observing.cancel()
            await control.publish(self.progress)
            if self._finish is not None:
                await control.finish(self._finish)
                self._finished = True
            await self._runner.close()
            await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def _fail(self, error: SlackwaterError) -> None:
        if self.failure is None:
            self.failure = error
        self._opened.set()
        if self._waiter is not None:
            self._waiter.release()

    def _begin(self, clock: Clock) -> None:
        self._clock = clock
        self._runner = EffectRunner(clock, self._no_event, self._task_failed, self._handlers())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.tasks.spawn(work)

    def _no_event(self, event: object) -> None:
        raise AssertionError(f"the Agent's core has no step for {event!r}: call its method")

    def _task_failed(self, name: str, error: BaseException) -> None:
        if isinstance(error, SlackwaterError):
            self._fail(error)
            return
        failure = Fatal(f"{self._who()}: {name}: {error!r}")
        failure.__cause__ = error
        self._fail(failure)

    def _announce_size(self) -> None:
        assert self.sizing is not None
        self._apply(self._core.sized(self.sizing.announced))

    def _flush(self) -> None:
        self._flush_due, effects = False, list[AgentAction]()
        while self._rung:
            effects += self._core.pushed(*self._rung.popleft())
        self._apply(effects)

    # Effects --------------------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return handlers(
            AgentAction,
            on(Ring, self._ring),
            on(Deliver, self._deliver),
            on(Resume, self._resume),
            on(Send, lambda e: self._send(e.aggregator, encode_control(e.frame))),
            on(MakeOffer, self._make_offer),
            on(Connect, lambda e: self._spawn(self._connect(e.endpoint, e.at_s))),
            on(Locate, lambda e: self._spawn(self._locate(e.at_s))),
            on(Reattach, lambda e: self._spawn(self._reattach(e.aggregator, e.at_s))),
            on(WriteSeed, lambda e: self._spawn(self._seed(e))),
            on(WriteSize, self._write_size),
            on(Refuse, self._refuse),
            on(Fail, lambda e: self._fail(Rejected(f"{self._who()}: {e.reason}"))),
        )

    def _apply(self, effects: Iterable[AgentAction]) -> None:
        """Carry them out. Rings of one step leave as one frame per aggregator."""
        for effect in effects:
            self._runner.perform(effect)
        rings, self._rings = self._rings, {}
        for aggregator, pairs in rings.items():
            for first in range(0, len(pairs), ENTRIES_MAX):
                self._send(aggregator, encode_rings(pairs[first : first + ENTRIES_MAX]))
        if self._delivered:
            self._delivered = False
            if self._waiter is not None:
                self._waiter.look()

    def _ring(self, effect: Ring) -> None:
        bucket = self.buckets[effect.bucket]
        slots = bucket.slots
        self.progress.links.turns.pushed(bucket.index)
        if isinstance(slots, InPlace):
            if self.sizing is not None:
                slots.sizes.write(self.sizing.written_with(effect.iteration))
            slots.mark(effect.iteration, bucket.hyper)
            self._rings.setdefault(effect.aggregator, []).append((effect.handle, effect.iteration))
        elif slots is not None:
            self._spawn(self._transfers.push(effect, bucket, slots, self.sizing))

    def _write_size(self, effect: WriteSize) -> None:
        bucket, sizing = self.buckets[effect.bucket], self.sizing
        assert sizing is not None
        if isinstance(bucket.slots, InPlace):
            bucket.slots.sizes.write(sizing.written_with(effect.version + 1))
            self._rings.setdefault(effect.aggregator, []).append((effect.handle, effect.version))
        else:
            self._spawn(self._transfers.write_size(effect, bucket, sizing))

    async def _seed(self, seed: WriteSeed) -> None:
        await self._transfers.seed(seed, self.buckets[seed.bucket])

    def _deliver(self, effect: Deliver) -> None:
        bucket = self.buckets[effect.bucket]
        slots = bucket.slots
        if isinstance(slots, InPlace):
            self._have(bucket, slots, effect.version)
            self._delivered = True
        elif slots is not None:
            bucket.acknowledged = effect.version
            self._delivered |= (later := bucket.reads_later and bucket.version >= 0)
            fetch = self._transfers.fetch_later if later else self._transfers.fetch
            self._spawn(fetch(self._who(), bucket, slots, effect.version))

    def _resume(self, effect: Resume) -> None:
        self.buckets[effect.bucket].iteration = effect.iteration

    def _make_offer(self, effect: MakeOffer) -> None:
        offer = self.buckets[effect.bucket].offer(effect.handle, effect.version, effect.wanted)
        self._send(effect.aggregator, encode_control(offer))

    def _refuse(self, effect: Refuse) -> None:
        bucket = self.buckets[effect.bucket]
        bucket.was_refused, bucket.refused = True, effect.refused
        if self._waiter is not None:
            self._waiter.release()

    def _send(self, aggregator: AggregatorId, frame: bytes) -> None:
        channel = self._channels.get(aggregator)
        if channel is None:
            return  # Lost a moment ago: whoever attaches there again says it again.
        try:
            channel.send(frame)
        except Unavailable as error:  # A frame that was not taken would be missed for ever.
            self._spawn(self._drop(aggregator, channel, error))

    def _have(self, bucket: WorkerBucket, slots: Attached, version: int) -> None:
        """Note that the parameters of `version` can be read from `slots`."""
        if version < bucket.version:
            return
        old, bucket.source = bucket.source, slots
        bucket.version, bucket.acknowledged = version, max(version, bucket.acknowledged)
        self.progress.links.turns.answered(bucket.index, version)
        self._core.held(bucket.index, version)
        if old is not None and old not in (slots, bucket.slots):
            old.close()
        if not self._all_here and all(c.version >= 0 for c in self.buckets):
            self._all_here = True
            self._initial.keep_sparse(self._tensors)
            if self.sizing is not None:
                self.sizing.opened = True
                self.on_boundary(0)
            self._opened.set()

    def _came(self, bucket: WorkerBucket, slots: Attached, version: int) -> None:
        self._have(bucket, slots, version)
        if self._waiter is not None:
            self._waiter.look()

    # Where things are -----------------------------------------------------------------------------

    async def _locate(self, at_s: float) -> None:
        assert self._control is not None
        await self._clock.sleep_until(at_s)
        try:
            located = await self._control.locate()
            self._take_plan(located)
        except (Retryable, Rejected) as error:
            self._not_located = str(error)
            after_s = error.retry_after_s if isinstance(error, Retryable) else 0.0
            effects = self._core.not_located(str(error), after_s, self._clock.now_s())
        else:
            effects = self._core.located(located, self._clock.now_s())
        self._apply(effects)

    async def _reattach(self, aggregator: AggregatorId, at_s: float) -> None:
        await self._clock.sleep_until(at_s)
        self._apply(self._core.reattach(aggregator, self._clock.now_s()))

    def _take_plan(self, located: Located) -> None:
        """The first table makes the buckets; the token may change with any. Raises Rejected."""
        if self.plan is None:
            self.buckets = worker_buckets(located, self._spec, self.rank, self._tensors)
            if located.plan.active and self.rank == 0:
                self.sizing = Sizing(self._spec.workers, self.least, ahead=located.plan.virtual)
                if self._control is not None and self._submitted:
                    self._spawn(self._control.follow_size(self.sizing))
        self.plan = located.plan

    async def _connect(self, endpoint: Endpoint, at_s: float) -> None:
        clock, aggregator = self._clock, endpoint.aggregator
        assert self.plan is not None
        await clock.sleep_until(at_s)
        hello = Hello(
            role="agent", job=self.job, rank=self.rank, attempt=self._attempt,
            layout_epoch=self.plan.layout_epoch, token=self.plan.token,
            sender=f"agent.{self.job}.{self.rank}",
        )  # fmt: skip
        try:
            channel = await dial(endpoint, encode_hello(hello), self._fabrics, self._transport)
        except Unavailable as error:
            self._errors[aggregator] = str(error)
            self._apply(self._core.connect_failed(aggregator, clock.now_s()))
            return
        self._errors.pop(aggregator, None)
        self._channels[aggregator] = channel
        self._spawn(self._converse(aggregator, channel))
        self._apply(self._core.connected(aggregator, clock.now_s()))

    # Channels -------------------------------------------------------------------------------------

    async def _converse(self, aggregator: AggregatorId, channel: Channel) -> None:
        """Exchange messages until the channel is lost."""
        try:
            while True:
                frame = await channel.receive()
                effects: list[AgentAction] = []
                for entry in decode(frame):
                    if isinstance(entry, Granted):
                        self._apply(effects)
                        effects = await self._granted(aggregator, channel, entry)
                    else:
                        effects += self._core.heard(aggregator, entry, self._clock.now_s())
                self._apply(effects)
        except (Unavailable, Rejected) as error:
            self._errors[aggregator] = str(error)
            _log.info("%s: channel to %s lost: %s", self._who(), aggregator, error)
        finally:
            self._channels.pop(aggregator, None)
            await channel.close()
        self._apply(self._core.channel_lost(aggregator, self._clock.now_s()))

    async def _granted(
        self, aggregator: AggregatorId, channel: Channel, granted: Granted
    ) -> list[AgentAction]:
        """Open the bucket's region and make it the place of the next gradient."""
        if not self._core.expects(aggregator, granted.bucket):
            return []
        assert self.plan is not None
        bucket = self.buckets[granted.bucket]
        remote = await channel.open(granted.key)
        slots = await attach(channel, remote, self.plan, bucket, self.rank, self._device)
        slots.link = self.progress.links.to(aggregator)
        old = bucket.slots
        bucket.adopt(slots)
        if self.sizing is not None:
            attempt = self.attempt if self.plan.virtual else None
            if await self._transfers.settle_size(granted, bucket, self.sizing, attempt):
                self._send(aggregator, encode_rings([(granted.handle, granted.version)]))
        effects = self._core.granted(aggregator, granted, slots.pushed)
        if isinstance(slots, InPlace) and granted.initialized and granted.version == bucket.version:
            self._have(bucket, slots, bucket.version)
        elif old is not None and old is not bucket.source:
            old.close()
        if self.rank and self._core.all_offered and self._control is not None and self.plan.active:
            self._spawn(self._control.join(lambda: self._all_here))
        return effects

    async def _drop(self, aggregator: AggregatorId, channel: Channel, error: Exception) -> None:
        """Begin anew with this peer: all attachments end, and are made again."""
        self._errors[aggregator] = str(error)
        await channel.close()
