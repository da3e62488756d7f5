"""The Agent's side of the control plane: registers, asks where, reports, says that it is done.

Rare messages on the bus, none of them per push or iteration. What is only measured may be lost.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from slackwater.agent.line import Line
from slackwater.agent.link_times import Links
from slackwater.agent.permits import NodePermits
from slackwater.agent.sizing import Sizing
from slackwater.common.base import codec, limits
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.shell.client import Client
from slackwater.schemas import subjects
from slackwater.schemas.base import ClusterId, JobId, Ok
from slackwater.schemas.checkpoints import CheckpointProgress, MarkJob
from slackwater.schemas.job_requests import (
    AskMissing,
    AskSize,
    FinishJob,
    JobRegistered,
    JoinJob,
    KeepMark,
    Meet,
    Meeting,
    MissingRanks,
    RegisterJob,
    SizeWanted,
    UseHosts,
)
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import Located, LocateJob
from slackwater.schemas.progress import ProgramProgress
from slackwater.schemas.telemetry import IterationsObserved, SubtaskTimes
from slackwater.schemas.tensors import TensorSpec

_log = logging.getLogger("slackwater.agent")
OBSERVED_S: Final = 1.0
QUIET_S: Final = 2.0
"""Seconds between two signs of life, with or without iterations: others who wait for this rank
learn within five seconds when it is gone."""
SIZE_S: Final = 0.25
"""Seconds after which an elastic job's rank 0 asks again how many workers are wanted, and a rank
that joins says again that it is ready."""
MARK_BUDGET_S: Final = 10.0
"""Seconds that an order about a mark is tried: its program holds still meanwhile."""
GAPS_UNTIL: Final = 256
"""The iteration after which nobody asks any more when buckets are needed."""
DURATIONS_MAX: Final = 4096
"""Durations that one report carries; beyond it the oldest are lost."""


@dataclass(slots=True)
class Progress:
    """Progress that the program's thread counts and this one reports."""

    first_iteration: int = 1
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=DURATIONS_MAX))
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    permits: NodePermits | None = None
    """The node's, of a job that takes turns."""
    links: Links = field(init=False)
    gaps_s: dict[int, float] = field(default_factory=dict)
    """The shortest time of each bucket from its push to the program's next wait for it."""

    def __post_init__(self) -> None:
        permits = self.permits
        self.links = Links() if permits is None else Links(permits.move, permits.receive)

    def needed(self, bucket: int, gap_s: float) -> None:
        """The program waits for what it pushed `gap_s` ago."""
        known_s = self.gaps_s.get(bucket)
        if known_s is None or gap_s < known_s:
            self.gaps_s[bucket] = gap_s

    def take_gaps(self, buckets: int) -> tuple[float, ...]:
        """Return the gaps of the first iterations, which a profile is made of; empty: not every
        bucket has one yet."""
        if self.first_iteration > GAPS_UNTIL or len(self.gaps_s) < buckets:
            return ()
        gaps_s, self.gaps_s = self.gaps_s, {}
        return tuple(max(0.0, gaps_s[bucket]) for bucket in range(buckets))


class Control:
    def __init__(
        self,
        line: Line,
        spec: JobSpec,
        rank: int,
        attempt: int,
        deadline_s: float,
        location_epoch: Callable[[], int],
        workers: Callable[[], int],
    ) -> None:
        """`attempt`: the number of the rank's process; `location_epoch`: of the placement that the
        program runs under; `workers`: how many count at present."""
        self._location_epoch, self._workers = location_epoch, workers
        self._line, self._spec, self._rank, self._attempt = line, spec, rank, attempt
        self._deadline_s = deadline_s
        self._job = JobId(spec.id)
        self.cluster: ClusterId | None = None
        self._buckets = 0  # Taken from the controller's answer.
        self._look = asyncio.Event()
        self.joining = False
        """This rank was one of those that join others."""

    def _client(self, budget_s: float) -> Client:
        line = self._line
        return Client(line.bus, line.clock, budget_s=budget_s, rng=line.rng)

    async def register(self, tensors: tuple[TensorSpec, ...], submitted: bool) -> None:
        """Raises Retryable when no master answers in time, Rejected when it will not have us."""
        message = RegisterJob(
            job=self._job,
            rank=self._rank,
            tensors=tensors,
            spec=None if submitted else self._spec,
            update=self._spec.update if submitted else None,
            noise=self._spec.noise,
            virtual_ranks=self._spec.virtual_ranks,
            gradient_dtype=self._spec.gradient_dtype if submitted else None,
        )
        client = self._client(self._deadline_s)
        self.cluster = (await client.master("register", message, JobRegistered)).cluster

    async def locate(self) -> Located:
        """One attempt. Raises Retryable (ask again), Rejected (it never will be)."""
        assert self.cluster is not None
        subject = subjects.command("controller", self.cluster, "locate")
        message = LocateJob(job=self._job, rank=self._rank, attempt=self._attempt)
        located = await self._client(budget_s=0.0).ask(subject, message, Located)
        self._buckets = len(located.buckets)
        return located

    async def missing(
        self, iteration: int, waited_s: float, pushed: dict[int, int]
    ) -> MissingRanks:
        """Ask once where these ranks are; the newest push of each is known. Raises Retryable,
        Rejected."""
        message = AskMissing(
            job=self._job,
            rank=self._rank,
            iteration=iteration,
            waited_s=waited_s,
            behind=tuple(pushed.items()),
        )
        return await self._client(budget_s=0.0).master("missing", message, MissingRanks)

    async def follow_size(self, sizing: Sizing) -> None:
        """In rank 0, until cancelled: learn how many workers are wanted; tell at once when they
        count."""
        while True:
            if sizing.opened:
                size = sizing.applied
                message = AskSize(job=self._job)
                if size is not None:
                    message = AskSize(job=self._job, workers=size.workers, since=size.since)
                try:
                    client = self._client(budget_s=0.0)
                    sizing.wanted = (await client.master("size", message, SizeWanted)).workers
                except (Retryable, Rejected) as error:  # It is asked again.
                    _log.info("job %s: how many workers are wanted: %s", self._job, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), SIZE_S)
            self._look.clear()

    def look_at_size(self) -> None:
        """Ask at once how many workers are wanted, and tell how many count."""
        self._look.set()

    async def join(self, counted: Callable[[], bool]) -> None:
        """Tell the master that this rank is ready, until it counts."""
        if self.joining:
            return
        self.joining = True
        message = JoinJob(job=self._job, rank=self._rank)
        while not counted():
            try:
                await self._client(budget_s=0.0).master("join", message, Ok)
            except (Retryable, Rejected) as error:
                _log.info("job %s, rank %d: joining: %s", self._job, self._rank, error)
            await asyncio.sleep(SIZE_S)

    async def meet(
        self, address: str = "", secret: str = "", progress: ProgramProgress | None = None
    ) -> Meeting:
        """Tell, in rank 0, where the job's driver listens, and how far it is; or ask once. Raises
        Retryable, Rejected."""
        message = Meet(
            job=self._job, rank=self._rank, address=address, secret=secret, progress=progress
        )
        return await self._client(budget_s=0.0).master("meet", message, Meeting)

    async def use(self, hosts: int) -> None:
        """Ask for another number of workers on the program's behalf. Raises Retryable, Rejected."""
        message = UseHosts(job=self._job, attempt=self._attempt, hosts=hosts)
        try:
            await self._client(budget_s=0.0).master("use", message, Ok)
        except Retryable:
            await asyncio.sleep(SIZE_S)  # It is asked for again.
            raise

    async def mark(self, name: str) -> CheckpointProgress:
        """Have the tables saved as a mark, or ask how far that is. Raises Retryable, Rejected."""
        assert self.cluster is not None
        subject = subjects.command("controller", self.cluster, "mark")
        message = MarkJob(job=self._job, mark=name)
        return await self._client(MARK_BUDGET_S).ask(subject, message, CheckpointProgress)

    async def keep_mark(self, name: str) -> None:
        """Let the job go back to this mark from now on. Raises Retryable, Rejected."""
        message = KeepMark(job=self._job, attempt=self._attempt, mark=name)
        await self._client(MARK_BUDGET_S).master("mark", message, Ok)

    async def finish(self, result: str) -> None:
        """Raises Retryable when no master stores it in time."""
        message = FinishJob(job=self._job, rank=self._rank, result=result)
        await self._client(self._deadline_s).master("finish", message, Ok)

    async def observe(self, progress: Progress) -> None:
        """Until cancelled."""
        quiet_s = QUIET_S
        while True:
            if progress.durations_s or quiet_s >= QUIET_S:
                await self.publish(progress)
                quiet_s = 0.0
            await asyncio.sleep(OBSERVED_S)
            quiet_s += OBSERVED_S

    async def repeat(self, say_again: Callable[[float], None]) -> None:
        """Until cancelled."""
        clock = self._line.clock
        while True:
            await clock.sleep_until(clock.now_s() + limits.REPEAT_S)
            say_again(clock.now_s())

    async def publish(self, progress: Progress) -> None:
        """The durations since the last time. Lost when the bus is away: they are a measurement."""
        durations_s = progress.durations_s
        taken = tuple(durations_s.popleft() for _ in range(len(durations_s)))
        observed = IterationsObserved(
            job=self._job,
            rank=self._rank,
            first_iteration=progress.first_iteration,
            durations_s=taken,
            location_epoch=self._location_epoch(),
            bytes_pushed=progress.bytes_pushed,
            bytes_pulled=progress.bytes_pulled,
            workers=self._workers(),
            buckets=self._buckets,
            links=progress.links.take(),
            turns=progress.links.turns.take(),
            gaps_s=progress.take_gaps(self._buckets),
            subtasks=progress.permits.take_times() if progress.permits else SubtaskTimes(),
            sender=f"agent.{self._job}.{self._rank}",
        )
        progress.first_iteration += len(taken)
        try:
            subject = subjects.telemetry("job", self._job, "iterations")
            await self._line.bus.publish(subject, codec.encode(observed))
        except Retryable as error:
            _log.info("job %s: %d iterations not reported: %s", self._job, len(taken), error)
