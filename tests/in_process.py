"""A cluster in this process: real Agents on a real aggregator's data plane, without loops, sockets
or a bus.

Everything that decides is the shipped code: the Agent with its buckets and its core, the
aggregator's plane with its buckets, regions and folds. What is left out is what takes time. A fold
is done as late as possible, when somebody waits. The parameters that the next fold will replace are
spoiled as early as possible. So a program that reads too early or too late is found out.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from slackwater.agent.effects import (
    Ring,
    WriteSeed,
)
from slackwater.agent.session import Session
from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.common.domains.slots import frames
from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.tokens import process_token
from slackwater.common.transport.region import Region
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import BucketPlace, Endpoint, JobPlan, Located
from slackwater.schemas.tensors import TensorSpec
from slackwater.services.aggregator.bucket import Bucket
from slackwater.services.aggregator.core import AggregatorCore
from slackwater.services.aggregator.executor import Task, at_once, execute
from slackwater.services.aggregator.plane import DataPlane
from slackwater.services.aggregator.regions import Held, Regions, region_name
from slackwater.services.aggregator.session import Session as Talk

T = TypeVar("T")
HERE = AggregatorId("here")


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result: here nothing is waited for."""
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        return stopped.value  # type: ignore[no-any-return]
    raise AssertionError(f"{coroutine} waits")


class InProcess:
    """Master, controller and one aggregator of every job of this process. `take_part` makes Agents
    use it."""

    def __init__(self, bucket_bytes: int = limits.BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.lock = threading.RLock()
        self.rule = ""
        """The update rule that jobs were submitted with, where that is not what their programs
        say."""
        self.workers_max = 0
        """Jobs are elastic, and can have so many workers; 0: they are not."""
        self.attempt = 0
        """The attempt that jobs of virtual ranks are in."""
        self.jobs: dict[str, _Job] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.waiting = 0
        self.doorbells: deque[tuple[Talk, bytes]] = deque()
        self._core = AggregatorCore(HERE, 1 << 40)
        self._regions = Regions(HERE, at_once)
        self._plane = DataPlane(self._core, self._regions, "")
        self._plane.begin(self)  # type: ignore[arg-type]
        self._plane.submit = self._fold
        self._talks = 0

    def take_part(self, monkeypatch: Any) -> None:
        import slackwater.agent.client as client

        monkeypatch.setattr(client, "Session", lambda *a, **k: LocalSession(self, *a, **k))
        monkeypatch.setitem(os.environ, "SLACKWATER_URL", "nats://in-this-process")

    # The shell's part -----------------------------------------------------------------------------

    def now_s(self) -> float:
        return time.monotonic()

    def post(self, event: Any) -> None: ...

    def count(self, name: str, by: int = 1) -> None: ...

    # Jobs -----------------------------------------------------------------------------------------

    def register(self, spec: JobSpec, tensors: tuple[TensorSpec, ...]) -> Located:
        job = self.jobs.get(spec.id)
        if job is None:
            update = spec.update
            plan = JobPlan(
                job=JobId(spec.id),
                workers=spec.virtual_ranks or self.workers_max or spec.workers,
                active=spec.workers if self.workers_max or spec.virtual_ranks else 0,
                virtual=spec.virtual_ranks > 0,
                gradient_dtype=spec.gradient_dtype,
                update=type(update)(name=self.rule) if self.rule else update,  # type: ignore[arg-type]
                consistency=spec.consistency,
                staleness=spec.staleness,
                noise=spec.noise,
                layout_epoch=1,
                token="",
            )
            job = self.jobs[spec.id] = _Job(plan, tensors, plan_buckets(tensors, self.bucket_bytes))
            self._host(job)
        fits = job.plan.active or spec.workers == job.plan.workers
        if tensors != job.tensors or not fits:
            raise Rejected(f"job {spec.id} exists with other tensors or workers")
        return Located(
            job=job.plan.job,
            plan=job.plan,
            buckets=job.layouts,
            places=(BucketPlace(aggregator=HERE),) * len(job.layouts),
            endpoints=(Endpoint(aggregator=HERE, addresses=(("shm", "here"),)),),
        )

    def _host(self, job: "_Job") -> None:
        for layout in job.layouts:
            nbytes = SlotRegion.nbytes_of(job.plan, layout, job.tensors)
            region = Region.create(nbytes, "in-process")
            slots = SlotRegion.format(region.buffer, job.plan, layout, job.tensors, 0, owner=HERE)
            self._regions.add(Held(region, slots, region_name(region, slots)))
            self._core.add(Bucket(job.plan, layout, self._core.next_handle(), nbytes, 0))

    def slots(self, job: str, bucket: int) -> SlotRegion:
        return self._regions.held[JobId(job), bucket].slots

    # Agents ---------------------------------------------------------------------------------------

    def connect(self, session: "LocalSession", hello: bytes) -> Talk:
        self._talks += 1
        channel = LocalChannel(session, hello)
        talk = _PromptTalk(self._plane, self._talks, channel, frames.decode_hello(hello))  # type: ignore[arg-type]
        self._plane._sessions[talk.number] = talk
        return talk

    def heard(self, talk: Talk, frame: bytes) -> None:
        """Doorbells wait until somebody waits for them."""
        if all(isinstance(said, frames.Ring) for said in frames.decode(frame)):
            self.doorbells.append((talk, frame))
            if self.waiting:
                self.deliver()
        else:
            self._take(talk, frame)

    def deliver(self) -> None:
        while self.doorbells:
            self._take(*self.doorbells.popleft())

    def _take(self, talk: Talk, frame: bytes) -> None:
        for said in frames.decode(frame):
            talk._take(said)

    def _fold(self, task: Task) -> None:
        outcome = execute(task, self._regions.me)
        if outcome.refused is None:
            ranks = range(task.slots.active) if task.alone is None else (task.alone,)
            for rank in ranks:
                task.slots.gradient(rank).fill(77)  # A slot's old content means nothing.
        self._plane.folded(task, outcome)


class _Job:
    def __init__(
        self, plan: JobPlan, tensors: tuple[TensorSpec, ...], layouts: tuple[Any, ...]
    ) -> None:
        self.plan, self.tensors, self.layouts = plan, tensors, layouts


class LocalChannel:
    """The aggregator's end of what in a cluster is a socket."""

    closed = False

    def __init__(self, session: "LocalSession", hello: bytes) -> None:
        self.session, self.hello = session, hello
        self._granted: dict[bytes, Region] = {}

    def grant(self, region: Region) -> bytes:
        key = len(self._granted).to_bytes(8, "little")
        self._granted[key] = region
        return key

    def revoke(self, key: bytes) -> None:
        del self._granted[key]

    async def open(self, key: bytes) -> Any:
        region = self._granted[key]
        return SimpleNamespace(nbytes=region.nbytes, view=region.buffer, close=lambda: None)

    def send(self, frame: bytes) -> None:
        self.session.hear(self, frame)


class _PromptTalk(Talk):
    """No turn of a loop is waited for."""

    def done(self, bucket: Bucket) -> None:
        entry = (bucket.handle, bucket.answered(self.rank), bucket.location_epoch)
        self.send(frames.encode_dones([entry]))


class _Monotonic:
    """The clock by which a local session calls its core."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(at_s - self.now_s())


class LocalSession(Session):
    """An Agent's shell without a loop: what it would wait for is done at once, under one lock."""

    def __init__(self, cluster: InProcess, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cluster = cluster
        self.attempt = cluster.attempt
        self.talk: Talk
        self._begin(_Monotonic())

    # The program's side ---------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with self.cluster.lock:
                self._located = self.cluster.register(self._spec, self._tensors)
                self._apply(self._core.start(time.monotonic()))
        except SlackwaterError as error:
            self._fail(error)

    def _call(self, function: Callable[[], None]) -> None:
        with self.cluster.lock:
            function()

    def wait(self, buckets: Any, deadline_s: float) -> None:
        with self.cluster.lock:
            self.cluster.waiting += 1
            self.cluster.deliver()
        try:
            super().wait(buckets, deadline_s)
        finally:
            with self.cluster.lock:
                self.cluster.waiting -= 1

    def close(self, finish: str | None) -> None:
        self._thread.join()
        with self.cluster.lock:
            self.cluster.deliver()
            if finish is not None:
                if self.failure is not None:
                    raise self.failure
                self.cluster.finished[self._spec.id, self.rank] = finish

    # The loop's part ------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        finish(work)

    async def _locate(self, at_s: float) -> None:
        self._take_plan(self._located)
        self._apply(self._core.located(self._located, at_s))

    async def _connect(self, endpoint: Endpoint, at_s: float) -> None:
        assert self.plan is not None
        token = process_token("", self.rank, 0)
        hello = frames.Hello(
            role="agent", job=self.job, rank=self.rank, layout_epoch=1, token=token
        )
        self.talk = self.cluster.connect(self, frames.encode_hello(hello))
        self._apply(self._core.connected(endpoint.aggregator, at_s))

    def _send(self, aggregator: AggregatorId, frame: bytes) -> None:
        self.cluster.heard(self.talk, frame)

    def hear(self, channel: LocalChannel, frame: bytes) -> None:
        for entry in frames.decode(frame):
            if isinstance(entry, frames.Granted):
                self._apply(finish(self._granted(HERE, channel, entry)))  # type: ignore[arg-type]
            else:
                self._apply(self._core.heard(HERE, entry, time.monotonic()))

    async def _seed(self, seed: WriteSeed) -> None:
        cell = self.buckets[seed.bucket]
        version = cell.updates(seed.version)
        tensors = [np.ravel(tensor) for tensor in cell.newest(self._initial)]
        self.cluster.slots(self.job, seed.bucket).parameters(version)[:] = np.concatenate(tensors)
        states, updates = cell.first_states(self._initial, version)
        for index, parts in enumerate(states):
            flat = np.concatenate([np.ravel(part) for part in parts])
            self.cluster.slots(self.job, seed.bucket).state(version, index)[:] = flat
        said = frames.Seed(handle=seed.handle, version=version, updates=updates)
        self._send(HERE, frames.encode_control(said))

    def _apply(self, effects: Any) -> None:
        effects = list(effects)
        super()._apply(effects)
        for effect in effects:
            if isinstance(effect, Ring) and self.plan.consistency == "synchronous":  # type: ignore[union-attr]
                self._spoil(effect)

    def _spoil(self, ring: Ring) -> None:
        """All workers' pushes may be in, and so the next version be written where the one before
        last is: the earliest moment that the protocol allows."""
        slots = self.cluster.slots(self.job, ring.bucket)
        pushed = slots.all_pushed()[: slots.active_now]
        if slots.version < ring.iteration and min(pushed) == ring.iteration:
            slots.parameters(ring.iteration).fill(np.nan)


__all__ = ["InProcess", "LocalSession"]
