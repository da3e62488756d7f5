"""The life of a service: lead, recover, serve, drain.

    (standby) -> take the buckets over -> Recovered -> subscribe, serve, READY=1 -> steps ...
    SIGTERM, drain or Stop -> Draining -> no new requests -> all records and outputs done -> close

Everything that goes wrong for good ends the process with one clear reason; its supervisor starts
it anew, and it rebuilds from its buckets. The same code runs live and in a simulation.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any

import msgspec
import structlog

from slackwater.common.base import limits
from slackwater.common.base.codec import encode
from slackwater.common.base.effects import (
    Count,
    Draining,
    Publish,
    Recovered,
    Reply,
    Request,
    Requested,
    Stop,
)
from slackwater.common.base.errors import Breached, Deposed, Rejected, Retryable, RolledBack
from slackwater.common.base.failpoints import failpoint
from slackwater.common.bus.base import Subscription
from slackwater.common.shell import leadership, metrics
from slackwater.common.shell.breaches import Breaches
from slackwater.common.shell.counters import Counters
from slackwater.common.shell.definition import Level, ServiceDefinition
from slackwater.common.shell.effect_runner import EffectRunner, Handlers
from slackwater.common.shell.endpoints import Intake
from slackwater.common.shell.facts import Introspection
from slackwater.common.shell.fencing import sender_name
from slackwater.common.shell.own_buckets import OwnBuckets
from slackwater.common.shell.peers import Peers
from slackwater.common.shell.process import Process
from slackwater.common.shell.requester import Requester
from slackwater.common.shell.steps import Steps
from slackwater.common.shell.store_health import BUS_STATES, StoreHealth
from slackwater.common.shell.world import World
from slackwater.common.store.base import Lease
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Refused
from slackwater.schemas.cluster import Heartbeat

_log = structlog.get_logger()


async def run_service(
    definition: ServiceDefinition,
    world: World,
    stop: asyncio.Event,
    process: Process | None = None,
) -> int:
    """Run one service until `stop` is set, it is told to drain, or its core says Stop; the exit
    code. The world's bus is the service's own and is closed at the end.

    Raises Deposed when another instance took over, Retryable when bus or store stay away, Rejected
    when it cannot start from what it finds, and whatever its core or handlers raised.
    """
    return await Shell(definition, world, stop, process or Process()).run()


class Shell:
    """One run of one service. Implements `definition.Port`."""

    def __init__(
        self, definition: ServiceDefinition, world: World, stop: asyncio.Event, process: Process
    ) -> None:
        self.definition = definition
        self.counters = Counters()
        self.stopping = asyncio.Event()
        self._world = world
        self._stop = stop
        self.process = process
        self._epoch = 0
        self._code = 0
        self._sender = sender_name(definition.service, definition.id)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._subscriptions: list[Subscription] = []
        self._lease: Lease | None = None
        self._leads_until_s = inf
        """Until then nobody else can have the lease."""
        self._damaged: Mapping[str, frozenset[str]] = {}
        """Bucket -> keys whose records could not be read."""
        service, clock, counters = definition.service, world.clock, self.counters
        self._runner = EffectRunner(
            clock, self.post, lambda _, error: self.fail(error), definition.handlers
        )
        self._spawn = self._runner.tasks.spawn
        self._breaches = Breaches(self._sender, clock, lambda: self._epoch)
        self._steps = Steps(
            service, definition.core, clock, counters, self._breaches, self._runner.perform,
            self._publish, self.fail,
        )  # fmt: skip
        self._steps.breached = self._breached
        self._peers = Peers(service, definition.id, world.bus, clock, self._publish)
        writer = f"{self._sender} on {process.host}, process {process.pid}"
        self._buckets = OwnBuckets(
            definition, world, self._sender, writer, self._peers, self._steps.durable, self.fail
        )
        self._store = StoreHealth(clock, self._buckets.writers, world.store.replicas)
        self._steps.doubtful = self._store.away
        self._steps.reads = definition.reads
        self._intake = Intake(
            service, definition.id, clock, counters, self._steps, self.stamp, self._why_not
        )
        self._requester = Requester(
            service, world.bus, clock, world.rng, counters, self.stamp, self.post, self._spawn,
            self._note_fenced,
        )  # fmt: skip
        self._facts = Introspection(
            definition, process, world.bus, clock, counters, self.shell_gauges,
            lambda: self._steps.waiting, self._doubts, stop.set,
        )  # fmt: skip
        self._runner.register(self._handlers())
        self._publish_after = f"{service}.publish.after"

    # For handlers and tasks -----------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._epoch

    def now_s(self) -> float:
        return self._world.clock.now_s()

    def post(self, event: Any) -> None:
        self._steps.post(event)

    def stamp(self, message: Message) -> Message:
        return msgspec.structs.replace(message, sender=self._sender, epoch=self._epoch)

    def count(self, name: str, by: int = 1) -> None:
        self.counters.count(name, by)

    def _why_not(self, message: Message) -> str:
        """Say why a request cannot be taken at present; empty: it can."""
        definition = self.definition
        if self._world.clock.now_s() >= self._leads_until_s:
            return "may not lead any more: its lease was not renewed in time"
        kind = type(message)
        if kind in definition.reads or not definition.buckets:
            return ""
        return self._store.why_not(full=kind in definition.adds)

    def _note_fenced(self, epoch: int) -> None:
        """A command was refused for a higher epoch of this service. Either another instance has
        taken over, or the store that tells the epochs was emptied or is an older copy."""
        if not self._intake.draining:
            self._intake.draining = True
            self._spawn(self._end_fenced(epoch), "fenced")

    async def _end_fenced(self, epoch: int) -> None:
        """Let the next life have a higher epoch than that, if this one still owns its buckets."""
        self._steps.halt()
        await self._buckets.raise_epoch(epoch)
        raise Deposed(
            f"{self._sender} has epoch {self._epoch}, and {epoch} was heard: another instance has "
            "taken over, or the store is an older copy; it starts anew with a higher one"
        )

    def fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _breached(self, event: Any, error: Exception) -> None:
        """The core broke on an event from outside: refuse it, keep it, be started anew."""
        self._intake.draining = True
        if isinstance(event, Requested):
            why = str(error) if isinstance(error, Rejected) else f"{type(error).__name__}: {error}"
            reason = f"{self._sender} cannot do this and starts anew without it: {why}"
            self._intake.reply(Reply(event.token, Refused(reason=reason)))
        self._spawn(self._end_breached(event, error), "breach")

    async def _end_breached(self, event: Any, error: Exception) -> None:
        clock = self._world.clock
        until_s = clock.now_s() + limits.BREACH_S
        await self._breaches.keep(self._world.store, event, error)
        while self._steps.waiting and clock.now_s() < until_s:
            # Earlier decisions are still sent.
            await clock.sleep_until(clock.now_s() + limits.RETRY_WAIT_S_MIN)
        raise Breached(
            f"a {type(event.message).__name__} broke the core ({type(error).__name__}); it is "
            f"refused from now on, see {self._breaches.where}"
        ) from error

    # A life ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        try:
            if not await self._unless_stopped(self._start()):
                return self._code
            self.process.notify.ready(f"epoch {self._epoch}")
            _log.info("ready", epoch=self._epoch)
            await self._unless_stopped(self._forever())
            await self._drain()
            return self._code
        except RolledBack as lost:
            self._steps.halt()
            raise await self._buckets.write_back(lost) from None
        finally:
            await self._close()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """True when the work is done, False when the service was told to stop before; raises what
        ended the service otherwise."""
        task = asyncio.ensure_future(work)
        told = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, told, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            if task.done():
                task.result()
                return True
            return False
        finally:
            for unfinished in (task, told):
                unfinished.cancel()
            await asyncio.gather(task, told, return_exceptions=True)

    async def _start(self) -> None:
        definition, world = self.definition, self._world
        self._beat_watchdog()
        await self._peers.listen()
        if definition.lease:
            instance = f"{definition.service}-{definition.instance or definition.id}"
            self._lease, self._leads_until_s = await leadership.acquire(
                world.store,
                definition.lease,
                self.process.life(instance),
                world.clock,
                world.rng,
                limits.LEASE_S,
                lambda: self.process.notify.ready("standby"),
                partial(self.process.follows, instance),
            )
            self._spawn(self._keep_lease(self._lease), "lease")
        failpoint(f"{definition.service}.epoch.before")
        recovery = await self._buckets.take()
        failpoint(f"{definition.service}.epoch.after")
        self._epoch = recovery.epoch
        self._damaged = recovery.damaged
        await self._breaches.load(world.store)
        await self._buckets.open()
        if definition.on_start is not None:
            await definition.on_start(self)
        self._spawn(self._steps.run(), "outputs")
        first = Recovered(recovery.epoch, recovery.records, recovery.damaged)
        self._steps.begin(first, self._buckets.writers, recovery.epoch)
        for task in definition.tasks:
            self._spawn(task(self), getattr(task, "__name__", "task"))
        for pattern, kind in definition.subscriptions.items():
            self._subscriptions.append(
                await world.bus.subscribe(pattern, self._intake.subscriber(kind))
            )
        if definition.buckets:
            await world.bus.subscribe(BUS_STATES, self._store.hear)
            self._spawn(self._buckets.check(), "buckets")
        usual = limits.ENDPOINT_CONCURRENCY
        own = [
            self._intake.endpoint(verb, kind, definition.concurrency.get(verb, usual))
            for verb, kind in definition.endpoints.items()
        ]
        await world.bus.serve(
            self._facts.service_info(self._epoch), own + self._facts.endpoints(self._intake)
        )
        self._spawn(self._heartbeats(), "heartbeats")

    async def _keep_lease(self, lease: Lease) -> None:
        def held(until_s: float) -> None:
            self._leads_until_s = until_s

        key = self.definition.lease
        await leadership.keep(lease, key, self._world.clock, limits.LEASE_S, held)

    async def _forever(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def _drain(self) -> None:
        """Stop taking requests and facts, and finish begun work within DRAIN_S."""
        failpoint(f"{self.definition.service}.drain.before")
        self.process.notify.stopping()
        _log.info("draining", code=self._code)
        self._intake.draining = self._facts.draining = True
        self.stopping.set()
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        self.post(Draining())
        while not self._failure.done():
            passed_s = loop.time() - begun_s
            records = self._buckets.waiting
            asked = len(self._requester) if passed_s < limits.DRAIN_S / 4 else 0
            unfinished = self._steps.waiting or records or self._runner.running or asked
            if not (unfinished or len(self._intake)):
                return
            if passed_s > limits.DRAIN_S / 2:
                _log.warning("drain.unfinished", steps=self._steps.waiting, records=records)
                return
            await asyncio.sleep(0.005)
        self._failure.result()

    async def _close(self) -> None:
        """Leave nothing running, whatever happened before."""
        self._intake.draining = True
        if self._failed_by() is not None:  # Others may serve: no request comes here any more.
            await self._stop_serving()
        self.stopping.set()
        self._steps.halt()
        self._intake.refuse_all(f"{self._sender} ended")
        self._buckets.close()
        await self._runner.close()
        try:
            if self.definition.on_stop is not None:
                async with asyncio.timeout(limits.DRAIN_S / 4):
                    await self.definition.on_stop()
        finally:
            await self._leave_bus()
            if not self._failure.done():
                self._failure.cancel()

    async def _stop_serving(self) -> None:
        try:
            async with asyncio.timeout(limits.DRAIN_S / 8):
                await self._world.bus.stop_serving()
        except (Retryable, TimeoutError) as error:
            _log.warning("close.still-serving", reason=str(error))

    async def _leave_bus(self) -> None:
        try:
            async with asyncio.timeout(limits.DRAIN_S / 8):
                if self._lease is not None and self._failed_by() is None:
                    failpoint(f"{self.definition.service}.release.before")
                    await self._lease.release()
                await self._world.bus.flush()
        except (Retryable, TimeoutError) as error:
            _log.warning("close.unflushed", reason=str(error))
        try:
            async with asyncio.timeout(limits.DRAIN_S / 8):
                await self._world.bus.close()
        except TimeoutError:
            _log.warning("close.unfinished")

    def _failed_by(self) -> BaseException | None:
        done = self._failure.done() and not self._failure.cancelled()
        return self._failure.exception() if done else None

    # Heartbeats -----------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        clock, bus, definition = self._world.clock, self._world.bus, self.definition
        subject = subjects.telemetry(definition.service, definition.id, "heartbeat")
        due_s = clock.now_s()
        while True:
            now_s = clock.now_s()
            self._intake.expire()
            if bus.connected:
                await self._publish(Publish(subject, self._heartbeat(now_s)))
            due_s = max(due_s + limits.HEARTBEAT_S, now_s)
            await clock.sleep_until(due_s)

    def _heartbeat(self, now_s: float) -> Message:
        definition = self.definition
        if definition.heartbeat is not None:
            message = definition.heartbeat(now_s)
            if isinstance(message, Heartbeat):
                return msgspec.structs.replace(message, incarnation=self._epoch)
            return message
        return Heartbeat(
            service=definition.service, id=definition.id, incarnation=self._epoch, at_s=now_s
        )

    def _beat_watchdog(self) -> None:
        """Beat from the loop itself: a loop that hangs is killed and started anew."""
        notify = self.process.notify
        if notify.watchdog_s > 0:
            notify.watchdog()
            asyncio.get_running_loop().call_later(notify.watchdog_s / 3, self._beat_watchdog)

    # Effects --------------------------------------------------------------------------------------

    async def _publish(self, effect: Publish) -> None:
        try:
            await self._world.bus.publish(effect.subject, encode(self.stamp(effect.message)))
        except Retryable:
            self.counters.publish_failed += 1  # The bus may lose a fact: nobody builds on one.
        except Rejected as error:
            self.counters.publish_failed += 1
            _log.warning("publish.refused", subject=effect.subject, reason=str(error))
        else:
            self.counters.said(effect.subject)
            failpoint(self._publish_after)

    def _handlers(self) -> Handlers:
        return {
            Reply: self._intake.reply,
            Request: self._requester.send,
            Count: lambda effect: self.counters.count(effect.name),
            Stop: self._end,
        }

    def _end(self, effect: Stop) -> None:
        _log.info("stop", reason=effect.reason, code=effect.code)
        self._code = effect.code
        self._stop.set()

    # Health, statistics, gauges -------------------------------------------------------------------

    def samples(self) -> Iterator[Level]:
        """For the metrics, from the loop's own thread: the core's state is read."""
        yield from metrics.of_shell(self.counters, self.shell_gauges(), self._world.bus)
        if self.definition.lease:
            yield Level("leading", {}, float(self._lease is not None))
        yield from self.definition.service_gauges()

    def shell_gauges(self) -> dict[str, float]:
        """Return the gauges that every service has: its queues, timers, open requests."""
        return {
            "steps_waiting": float(self._steps.waiting),
            "records_waiting": float(self._buckets.waiting),
            "requests_open": float(len(self._requester)),
            "requests_unanswered": float(len(self._intake)),
            "actions": float(self._runner.running),
            "timers": float(len(self._runner.timers)),
            "step_s_sum": self.counters.step_s.sum,
            "step_s_max": self.counters.step_s_max,
            "epoch": float(self._epoch),
            "breaches": float(len(self._breaches.kept)),
            "records_damaged": float(sum(map(len, self._damaged.values()))),
        }

    def _doubts(self) -> str:
        doubts = self._store.doubts()
        for bucket, keys in self._damaged.items():
            named = ", ".join(sorted(keys)[:10])
            doubts.append(f"bucket {bucket}: {len(keys)} records are damaged, set aside: {named}")
        return "; ".join(doubts)
