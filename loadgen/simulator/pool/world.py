"""The master's and the controllers' own cores under one event heap, their aggregators played.

What the services' shells do is done here: a request of one core is a command to another, its reply
comes back as an answer, a fact goes to whoever observes it (common/base/effects.py). Messages take
no time and are never lost: that is the whole-system simulation's subject. Aggregators obey: they
host what they are told to host, and a migrated bucket arrives after `copy_s`.

Aggregators may be killed, with their memory or without, and come back. While one is away, and until
what follows from it is over, everybody ticks and every heart beats every other second.

A core's tick comes when something of it is due (a pending assignment, a migration, an aggregator to
give back) and at the end of every scaling period, not once a second: between these nothing changes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import msgspec

from slackwater.common.base.effects import (
    Answered,
    Effect,
    EffectKey,
    Observed,
    Publish,
    Recovered,
    Reply,
    Request,
    Requested,
    ShellEvent,
    StartTimer,
    TimerFired,
)
from slackwater.schemas.base import AggregatorId, JobId, Message, NodeId, Ok, Refused
from slackwater.schemas.cluster import (
    AggregatorHeartbeat,
    AggregatorsAllocated,
    AllocationEvent,
    ClusterReport,
)
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    HostBuckets,
    ListBuckets,
    MigrateInit,
    WorkerDone,
)
from slackwater.services.controller.core import Controller
from slackwater.services.controller.keys import ServeDue, TickDue
from slackwater.services.controller.state import ASK_BUDGET_S, Aggregator
from slackwater.services.master import keys as master_keys
from slackwater.services.master.core import Master

COPY_S = 1.0
"""From MIGRATE_INIT until every worker pushed to the new aggregator: an iteration or so."""
SETTLED_AFTER_S = 45.0
"""From an aggregator's return until all that followed from its absence is over."""
BEAT_S = 2.0
MASTER = "master"
Hear = Callable[[float, Message], None]


@dataclass(slots=True)
class _Played:
    """An aggregator: (job, bucket) -> location epoch."""

    held: dict[tuple[JobId, int], int] = field(default_factory=dict)
    owner: str = ""
    incarnation: int = 1
    up: bool = True


class World:
    """`hear` is told every fact that is published, with its instant."""

    def __init__(
        self,
        master: Master,
        controllers: dict[str, Controller],
        aggregators: int,
        cpu_share: float,
        hear: Hear,
    ) -> None:
        self.now_s = 0.0
        self.master = master
        self.controllers = controllers
        self.steps = 0
        self._hear = hear
        self._cpu_share = cpu_share
        self._played = {AggregatorId(f"a{n:04d}"): _Played() for n in range(aggregators)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._inbox: deque[tuple[str, ShellEvent]] = deque()
        self._tokens: dict[int, tuple[str, EffectKey]] = {}
        self._token = 0
        self._ticks_s: dict[str, float] = {}
        self._attended_s = -inf
        self._reports: dict[str, ClusterReport] = {}
        self._stepped: set[str] = set()
        """Controllers that did something since their last report."""
        for name in (MASTER, *controllers):
            self._give(name, Recovered(1, {}))
        for id in self._played:
            self._give(MASTER, Observed("", self._heartbeat(id)))
        for name in controllers:
            self.tick(name)

    # Time -----------------------------------------------------------------------------------------

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (at_s, self._number, do))

    def next_s(self) -> float:
        return self._events[0][0] if self._events else inf

    def run_next(self) -> None:
        at_s, _, do = heappop(self._events)
        self.now_s = at_s
        do()

    def tick(self, name: str) -> None:
        """The controller's timer, its aggregators' heartbeats just before it."""
        self._ticks_s.pop(name, None)
        for id, played in self._played.items():
            if played.owner == name and played.up:
                self._put(name, Observed("", self._heartbeat(id)))
        self._give(name, TimerFired(TickDue()))
        self._stepped.discard(name)
        self._plan_tick(name)

    def report(self, name: str) -> None:
        """Bring the controller's present report to the master; after no event its last one
        again."""
        last = self._reports.get(name)
        if last is None or name in self._stepped:
            self.tick(name)
        else:
            fresh = msgspec.structs.replace(last, at_s=self.now_s)
            self._give(MASTER, Observed("", fresh))

    def _plan_tick(self, name: str) -> None:
        due_s = max(self._due_s(name), self.now_s + 1.0)
        if due_s < self._ticks_s.get(name, inf):
            self._ticks_s[name] = due_s
            self.at(due_s, lambda: self.tick(name) if self._ticks_s.get(name) == due_s else None)

    def _due_s(self, name: str) -> float:
        """Return the controller's next tick; infinite: none."""
        state = self.controllers[name].state
        if state.recycle_due:
            return self.now_s
        due_s = state.line.next_s
        for job in state.jobs.values():
            if job.pending is not None:
                due_s = min(due_s, job.pending.next_s)
        if any(state.releasing or entry.temporary for entry in self._unused(name)):
            return self.now_s
        return due_s

    def _unused(self, name: str) -> list[Aggregator]:
        state = self.controllers[name].state
        used = {a for job in state.jobs.values() for a in job.involved()}
        return [e for e in state.aggregators.values() if e.ours and e.id not in used]

    def scaling_due(self, name: str) -> bool:
        """Say whether the end of a scaling period can change anything in the cluster."""
        state = self.controllers[name].state
        waiting = any(job.pending is not None for job in state.jobs.values())
        return state.job_ended or waiting or bool(self._unused(name))

    # Aggregators that die -------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        """Say whether the consequences of the last kill are over."""
        return self.now_s > self._attended_s

    def held(self) -> dict[tuple[JobId, int], list[tuple[AggregatorId, int]]]:
        """(job, bucket) -> each aggregator that holds it, with the location epoch."""
        found: dict[tuple[JobId, int], list[tuple[AggregatorId, int]]] = {}
        for id, played in self._played.items():
            for key, epoch in played.held.items():
                found.setdefault(key, []).append((id, epoch))
        return found

    def busy(self) -> list[AggregatorId]:
        """Return the aggregators that hold something, and live."""
        return [id for id, played in self._played.items() if played.held and played.up]

    def kill(self, id: AggregatorId, away_s: float, *, forget: bool) -> None:
        """`forget`: its memory is lost with it."""
        played = self._played[id]
        if not played.up:
            return
        played.up = False
        if forget:
            played.held.clear()

        def back() -> None:
            played.up, played.incarnation = True, played.incarnation + 1
            for name in filter(None, (MASTER, played.owner)):
                self._give(name, Observed("", self._heartbeat(id)))

        self.at(self.now_s + away_s, back)
        self._attend(self.now_s + away_s + SETTLED_AFTER_S)

    def _attend(self, until_s: float) -> None:
        if self._attended_s < self.now_s:
            self.at(self.now_s + BEAT_S, self._beat)
        self._attended_s = max(self._attended_s, until_s)

    def _beat(self) -> None:
        for id, played in self._played.items():
            if played.up:
                self._put(MASTER, Observed("", self._heartbeat(id)))
        self._give(MASTER, TimerFired(master_keys.TickDue()))
        for name in self.controllers:
            self.tick(name)
        if self.now_s + BEAT_S <= self._attended_s:
            self.at(self.now_s + BEAT_S, self._beat)

    # Messages -------------------------------------------------------------------------------------

    def command(self, service: str, message: Message) -> None:
        """From somebody whose answer nobody waits for."""
        self._token += 1
        self._give(service, Requested(self._token, message))

    def fact(self, service: str, message: Message) -> None:
        self._give(service, Observed("", message))

    def _put(self, service: str, event: ShellEvent) -> None:
        self._inbox.append((service, event))

    def _give(self, service: str, event: ShellEvent) -> None:
        """Step the core, and whoever its effects concern, until nobody has anything to say."""
        self._put(service, event)
        touched = set()
        while self._inbox:
            name, each = self._inbox.popleft()
            self.steps += 1
            core = self.master if name == MASTER else self.controllers[name]
            if name != MASTER:
                touched.add(name)
                self._stepped.add(name)
            for effect in core.step(each, self.now_s):
                self._carry(name, effect)
        for name in touched:
            if name in self.controllers:
                self._plan_tick(name)

    def _carry(self, sender: str, effect: Effect) -> None:
        match effect:
            case Request(subject=subject, message=message, key=key):
                _, _, _, service, id, _ = subject.split(".")
                if service == "aggregator" and self._played[AggregatorId(id)].up:
                    answer = self._obey(AggregatorId(id), message, sender)
                    self._put(sender, Answered(key, answer))
                elif service == "aggregator":
                    refused = Answered(key, Refused(reason="no answer", retry_after_s=1.0))
                    self.at(self.now_s + ASK_BUDGET_S, lambda: self._give(sender, refused))
                else:
                    self._token += 1
                    self._tokens[self._token] = (sender, key)
                    name = MASTER if service == "master" else id
                    self._put(name, Requested(self._token, message))
            case Reply(token=token, message=message):
                asked = self._tokens.pop(token, None)
                if asked is None:
                    return
                asker, key = asked
                if isinstance(message, AggregatorsAllocated):
                    for granted in message.aggregators:
                        self._put(asker, Observed("", self._heartbeat(granted)))
                self._put(asker, Answered(key, message))
            case StartTimer(key=ServeDue() as key):
                self._put(sender, TimerFired(key))
            case Publish(message=message):
                if isinstance(message, ClusterReport):
                    self._reports[sender] = message
                    self._put(MASTER, Observed("", message))
                elif isinstance(message, AllocationEvent):
                    self._played[message.aggregator].owner = (
                        str(message.cluster) if message.fact in ("allocated", "adopted") else ""
                    )
                    if message.fact == "released":
                        for name in self.controllers:
                            self._put(name, Observed("", message))
                self._hear(self.now_s, message)
            case _:
                pass  # Records are not read back, and logs not read; ticks come when due.

    # Aggregators ----------------------------------------------------------------------------------

    def _heartbeat(self, id: AggregatorId) -> AggregatorHeartbeat:
        return AggregatorHeartbeat(
            service="aggregator",
            id=id,
            incarnation=self._played[id].incarnation,
            at_s=self.now_s,
            node=NodeId("n"),
            cpu_share=self._cpu_share,
            addresses=(),
            buckets=len(self._played[id].held),
            jobs=0,
            held_bytes=0,
            busy_s=0.0,
            bytes_in=0,
            bytes_out=0,
        )

    def _obey(self, id: AggregatorId, message: Message, sender: str) -> Message:
        held = self._played[id].held
        before = bool(held)
        match message:
            case ListBuckets():
                return self._list(id)
            case HostBuckets(plan=plan, buckets=buckets, at_epochs=epochs):
                for layout, epoch in zip(buckets, epochs, strict=True):
                    key = (plan.job, layout.index)
                    held[key] = max(epoch, held.get(key, 0))
            case DropJob(job=job, buckets=chosen, up_to_epochs=epochs):
                upto = dict(zip(chosen or (), epochs or (), strict=False))
                for key in [k for k in held if k[0] == job]:
                    known = chosen is None or key[1] in chosen
                    if known and held[key] <= upto.get(key[1], held[key]):
                        del held[key]
            case MigrateInit():
                self.at(self.now_s + COPY_S, lambda: self._copy(id, message, sender))
        if bool(held) != before:
            self._put(MASTER, Observed("", self._heartbeat(id)))
        return Ok()

    def _list(self, id: AggregatorId) -> BucketsHeld:
        held = tuple(
            BucketHeld(job=job, bucket=bucket, layout_epoch=1, location_epoch=epoch, version=1)
            for (job, bucket), epoch in self._played[id].held.items()
        )
        return BucketsHeld(aggregator=id, incarnation=self._played[id].incarnation, held=held)

    def _copy(self, source: AggregatorId, order: MigrateInit, sender: str) -> None:
        """WORKER_DONE of the buckets that are still there: they were copied, too."""
        target, job = order.to.aggregator, JobId(order.job)
        if not (self._played[source].up and self._played[target].up):
            self.at(self.now_s + COPY_S, lambda: self._copy(source, order, sender))
            return
        leaving, arriving = self._played[source].held, self._played[target].held
        for bucket, epoch in zip(order.buckets, order.epochs, strict=True):
            if leaving.get((job, bucket), epoch) >= epoch:
                continue  # Gone, or told to stay since.
            del leaving[job, bucket]
            arriving[job, bucket] = epoch
            pushed = WorkerDone(job=job, bucket=bucket, location_epoch=epoch, target=target)
            self._put(sender, Observed("", pushed))
        self._put(MASTER, Observed("", self._heartbeat(source)))
        self._give(MASTER, Observed("", self._heartbeat(target)))
