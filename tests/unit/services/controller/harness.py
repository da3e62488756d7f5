"""A controller's core with a master and aggregators that do at once what they are told."""

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from slackwater.common.base.effects import (
    Answered,
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
from slackwater.schemas.base import (
    AggregatorId,
    ClusterId,
    JobId,
    Message,
    NodeId,
    Ok,
    Record,
    Refused,
)
from slackwater.schemas.cluster import (
    AggregatorFact,
    AggregatorHeartbeat,
    AggregatorInfo,
    AggregatorList,
    AggregatorRecord,
    AggregatorsAllocated,
    AllocateAggregators,
    ClusterReport,
    DeallocateAggregators,
    ListAggregators,
    WorkersAt,
)
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import (
    BucketHeld,
    BucketsHeld,
    DropJob,
    HostBuckets,
    JobPlacement,
    ListBuckets,
    PlaceJob,
    Profile,
    TensorCopyDone,
    WorkerDone,
)
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.core import Controller
from slackwater.services.controller.invariants import check_invariants
from slackwater.services.controller.keys import ServeDue, TickDue

T = TypeVar("T")
SHARE = 0.1


class Pool:
    """A master and aggregators that do at once what they are told; `lie` may answer instead."""

    def __init__(self, aggregators: int, room: int = 99, memory_bytes: int = 0) -> None:
        self.memory_bytes = memory_bytes
        """Memory of each aggregator; 0: they do not say."""
        self.node_memory_bytes = 0
        """Memory of all of them together; 0: each for itself."""
        self.nodes: dict[str, str] = {}
        """Aggregator -> its machine; one that is not named is on machine n."""
        self.network_budget_bytes_s = 0
        self.carried_bytes_s: dict[str, int] = {}
        """Machine -> the load of its link."""
        self.all = [AggregatorId(f"a{n}") for n in range(aggregators)]
        self.records: dict[AggregatorId, AggregatorRecord] = {}
        self.held: dict[AggregatorId, dict[tuple[JobId, int], int]] = {a: {} for a in self.all}
        self.incarnations = dict.fromkeys(self.all, 1)
        self.room = room
        self.dead: set[AggregatorId] = set()
        """They cannot be emptied; the master does when they come back."""
        self.lie: Callable[[Request], Message | None] = lambda request: None

    def answer(self, request: Request) -> Message:
        told = self.lie(request)
        if told is not None:
            return told
        message = request.message
        at = AggregatorId(request.subject.split(".")[4])
        match message:
            case AllocateAggregators():
                return self._allocate(message)
            case DeallocateAggregators():
                for id in message.aggregators:
                    assert not self.held[id] or id in self.dead, "given back with buckets on it"
                    del self.records[id]
            case ListAggregators():
                infos = tuple(AggregatorInfo(record=r, alive=True) for r in self.records.values())
                return AggregatorList(aggregators=infos)
            case ListBuckets():
                held = tuple(
                    BucketHeld(job=j, bucket=b, layout_epoch=1, location_epoch=e, version=1)
                    for (j, b), e in self.held[at].items()
                )
                return BucketsHeld(aggregator=at, incarnation=self.incarnations[at], held=held)
            case HostBuckets():
                for layout, epoch in zip(message.buckets, message.at_epochs, strict=True):
                    self.held[at][message.plan.job, layout.index] = epoch
            case DropJob():
                for key in [k for k in self.held[at] if k[0] == message.job]:
                    del self.held[at][key]
        return Ok()

    def _allocate(self, message: AllocateAggregators) -> Message:
        free = [a for a in self.all if a not in self.records][: self.room - len(self.records)]
        if len(free) < (message.at_least or message.count):
            return Refused(reason=f"{len(free)} are free", retry_after_s=1.0)
        given = tuple(free[: message.count])
        for id in given:
            self.records[id] = AggregatorRecord(
                id=id, cluster=ClusterId("c0"), request=message.request
            )
        return AggregatorsAllocated(request=message.request, aggregators=given)


class Crashed(Exception):
    """kill -9 after a step's records were stored, before anything of it was said."""


class Harness:
    def __init__(self, pool: Pool, **config: Any) -> None:
        self.pool = pool
        # Tests expect the scheme of the paper, unless they say otherwise.
        self.config = ControllerConfig(id="c0", **{"policy": "cyclic", **config})
        self.stored: dict[str, JobPlacement] = {}
        self.drains: dict[str, Record] = {}
        self.now_s = 1000.0
        self.epoch = 0
        self.sent: list[Message] = []
        self.facts: list[JobEvent] = []
        self.told: list[AggregatorFact] = []
        self.held_back: list[Request] = []
        self.hold: tuple[type[Message], ...] = ()
        self.crash_at = 0
        """Counts down by steps that store something."""
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.core = Controller(self.config, Random(7))
        self.held_back.clear()
        found: dict[str, dict[str, Record]] = {
            "placements_c0": dict(self.stored), "drains_c0": dict(self.drains)
        }  # fmt: skip
        self.step(Recovered(self.epoch, found))
        self.beat()
        self.tick()

    def step(self, event: Any) -> list[Effect]:
        """The event, and all that follows from answered requests."""
        all_effects: list[Effect] = []
        open_events = [event]
        while open_events:
            effects = self.core.step(open_events.pop(0), self.now_s)
            all_effects += effects
            check_invariants(self.core.state)
            for effect in effects:  # Records first, as the shell does.
                if isinstance(effect, Persist):
                    records: Any = self.drains if effect.bucket == "drains_c0" else self.stored
                    if effect.record is not None:
                        records[effect.key] = effect.record
                    else:
                        del records[effect.key]
            if any(isinstance(effect, Persist) for effect in effects) and self.crash_at:
                self.crash_at -= 1
                if not self.crash_at:
                    raise Crashed
            for effect in effects:
                if isinstance(effect, Publish) and isinstance(effect.message, JobEvent):
                    self.facts.append(effect.message)
                if isinstance(effect, Publish) and isinstance(effect.message, AggregatorFact):
                    self.told.append(effect.message)
                if isinstance(effect, StartTimer) and effect.key == ServeDue():
                    open_events.append(TimerFired(ServeDue()))
                if isinstance(effect, Request):
                    self.sent.append(effect.message)
                    if isinstance(effect.message, self.hold):
                        self.held_back.append(effect)
                        continue
                    answer = self.pool.answer(effect)
                    open_events.append(Answered(effect.key, answer))
        return all_effects

    def see(self, message: Message) -> list[Effect]:
        return self.step(Observed("", message))

    def ask(self, message: Message) -> Message:
        effects = self.step(Requested(1, message))
        (reply,) = [effect for effect in effects if isinstance(effect, Reply)]
        return reply.message

    def tick(self, after_s: float = 1.0) -> list[Effect]:
        self.now_s += after_s
        return self.step(TimerFired(TickDue()))

    def beat(self, *ids: str, arrived: tuple[WorkersAt, ...] = ()) -> None:
        for id in ids or self.pool.all:
            node = self.pool.nodes.get(id, "n")
            self.see(
                AggregatorHeartbeat(
                    service="aggregator", id=id,
                    incarnation=self.pool.incarnations[AggregatorId(id)], at_s=self.now_s,
                    node=NodeId(node), cpu_share=SHARE, addresses=(("shm", id),), buckets=0,
                    jobs=0, held_bytes=0, busy_s=0.0, bytes_in=0, bytes_out=0, arrived=arrived,
                    memory_bytes=self.pool.memory_bytes,
                    node_memory_bytes=self.pool.node_memory_bytes,
                    network_budget_bytes_s=self.pool.network_budget_bytes_s,
                    network_load_bytes_s=self.pool.carried_bytes_s.get(node, 0),
                )
            )  # fmt: skip

    def pass_time(self, seconds: int, *but: str) -> None:
        """Everybody's heart beats, but those that are named."""
        for _ in range(seconds):
            self.beat(*(id for id in self.pool.all if id not in but))
            self.tick()

    def place(
        self, id: str, costs_s: list[float], iteration_s: float = 1.0, network_bytes: int = 0
    ) -> None:
        """A new job, up to the assignment that follows its profile."""
        assert self.ask(placed(id, len(costs_s))) == Ok()
        self.profile(id, costs_s, iteration_s, network_bytes)
        self.migrated(id)

    def profile(
        self, id: str, costs_s: list[float], iteration_s: float = 1.0, network_bytes: int = 0
    ) -> None:
        profile = Profile(
            iteration_s=iteration_s,
            task_cpu_s=tuple(costs_s),
            iterations=5,
            network_bytes=network_bytes,
        )
        epoch = sum(place.location_epoch for place in self.stored[id].places)
        self.see(JobProfiled(job=JobId(id), location_epoch=epoch, profile=profile))

    def migrated(self, id: str, worker_done: bool = True) -> None:
        """The buckets travel; both aggregators tell."""
        record = self.stored[id]
        for bucket, target in enumerate(record.target):
            source = record.places[bucket]
            if source == target:
                continue
            key = (JobId(id), bucket)
            self.pool.held[source.aggregator].pop(key)
            self.pool.held[target.aggregator][key] = target.location_epoch
            self.see(
                TensorCopyDone(
                    migration=record.migration, job=JobId(id), bucket=bucket,
                    location_epoch=target.location_epoch, version=1, source=source.aggregator,
                    target=target.aggregator, nbytes=1, copy_s=0.1,
                )
            )  # fmt: skip
            if worker_done:
                self.see(
                    WorkerDone(
                        job=JobId(id),
                        bucket=bucket,
                        location_epoch=target.location_epoch,
                        target=target.aggregator,
                    )
                )

    def window(
        self, id: str, iteration_s: float, iterations: int = 20, times: int = 2, **used: Any
    ) -> None:
        """Two in succession: the second confirms the first."""
        epoch = sum(place.location_epoch for place in self.stored[id].places)
        for _ in range(times):
            self.see(
                WindowMeasured(
                    job=JobId(id),
                    location_epoch=epoch,
                    last_iteration=100,
                    iterations=iterations,
                    iteration_s=iteration_s,
                    **used,
                )
            )

    def homes(self, id: str) -> list[str]:
        return [place.aggregator for place in self.stored[id].places]

    def report(self) -> ClusterReport:
        """The next one."""
        effects = [effect for effect in self.tick() if isinstance(effect, Publish)]
        (report,) = [e.message for e in effects if isinstance(e.message, ClusterReport)]
        return report

    def waiting(self) -> dict[str, str]:
        """Return what the next report says of jobs that wait."""
        return dict(self.report().waiting)

    def said(self, id: str) -> list[str]:
        return [fact.fact for fact in self.facts if fact.job == id]


def placed(id: str, buckets: int, servers: int = 2) -> PlaceJob:
    tensors = tuple(TensorSpec(name=f"t{n}", shape=(262144,)) for n in range(buckets))
    return PlaceJob(spec=JobSpec(id=id, servers=servers, workers=2), tensors=tensors)


def last(messages: list[Message], kind: type[T]) -> T:
    return [message for message in messages if isinstance(message, kind)][-1]
