"""Jobs of a live cluster that train as measured profiles say, in real time.

The processes of such a job wait (waiting_program.py); the experiment's own process reckons their
progress with the simulator's `ProfileRun`, from the GPUs that they tell it they hold. It publishes
what the job's agent learns, as the reporter of a real program does, and tells the processes when
they are done. So a live policy sees agents that learn from real attempts on real placements.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from slackwater.common.base import codec
from slackwater.common.base.errors import Retryable
from slackwater.common.shell.client import Client
from slackwater.loadgen.fidelity.jobs import Attempt
from slackwater.loadgen.simulator.gpu.jobmodels.base import Conditions
from slackwater.loadgen.simulator.gpu.jobmodels.profiles import ProfileRun
from slackwater.schemas import subjects
from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.view import NOTHING, Allocation

log = structlog.get_logger()
LINE_BYTES_MAX: Final = 4096
DONE: Final = b"done"


@dataclass
class _Job:
    run: ProfileRun
    attempt: int = -1
    ranks: dict[int, asyncio.StreamWriter] = field(default_factory=dict)
    """Ranks of the attempt that wait for it to be over."""
    trains: "asyncio.Task[None] | None" = None
    began_s: float = 0.0
    before: float = 0.0
    written: dict[int, Attempt] = field(default_factory=dict)
    told: object = None
    """The agent's model and sizes seen, as last published."""


class Training:
    """Use: `async with training.listening(path)`; `origin_s` is to be set before the first job
    starts: the trace's second 0, since 1970."""

    def __init__(self, client: Client, runs: Mapping[str, ProfileRun]) -> None:
        self._client, self._jobs = client, {id: _Job(run) for id, run in runs.items()}
        self.origin_s = 0.0

    @property
    def written(self) -> dict[str, dict[int, Attempt]]:
        """Return what each job's attempts did: work is progress in iterations of M0."""
        return {id: job.written for id, job in self._jobs.items()}

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, path, limit=LINE_BYTES_MAX)
        try:
            yield
        finally:
            server.close()
            tasks = [job.trains for job in self._jobs.values() if job.trains is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for job in self._jobs.values():
                for writer in job.ranks.values():
                    writer.close()

    def raise_failures(self) -> None:
        """Raise what a job's training raised."""
        for job in self._jobs.values():
            if job.trains is not None and job.trains.done() and not job.trains.cancelled():
                job.trains.result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = (await reader.readline()).decode().split()
        if len(words) != 4 or words[0] not in self._jobs:
            writer.close()  # It was stopped before it had said a word.
            return
        id, attempt, rank = words[0], int(words[1]), int(words[2])
        job = self._jobs[id]
        if attempt != job.attempt:
            self._stop(job)
            job.attempt, job.ranks = attempt, {}
        job.ranks[rank] = writer
        allocation = placed(words[3])
        if len(job.ranks) == sum(gpus for _, gpus in allocation) and job.trains is None:
            job.trains = asyncio.ensure_future(self._train(id, job, allocation))
        await reader.readline()  # It saves and ends, or has ended.
        if attempt == job.attempt and job.ranks.get(rank) is writer:
            self._stop(job)
        writer.close()

    def _now_s(self) -> float:
        return self._client.clock.now_s() - self.origin_s

    async def _train(self, id: str, job: _Job, allocation: Allocation) -> None:
        run = job.run
        job.began_s, job.before = self._now_s(), run.work_done
        run.resume(job.began_s, allocation, Conditions())
        while not run.done:
            due_s = run.next_s()
            await self._client.clock.sleep_until(self.origin_s + due_s)
            run.advance(due_s)
            known = run.model, run.gpus_seen
            if known != job.told and run.model is not None:
                job.told = known
                await self._publish(id, job)
        self._note(job)
        for writer in job.ranks.values():
            writer.write(DONE)

    async def _publish(self, id: str, job: _Job) -> None:
        report = job.run.agent.report(JobId(id), job.attempt)
        try:
            subject = subjects.telemetry("job", id, "goodput")
            await self._client.bus.publish(subject, codec.encode(report))
        except Retryable as error:
            log.info("goodput.not-reported", job=id, reason=str(error))

    def _stop(self, job: _Job) -> None:
        """End the attempt's training, if it has not ended; its work is kept, as it is saved."""
        if job.trains is None:
            return
        if not job.trains.done():
            job.trains.cancel()
            now_s = self._now_s()
            job.run.advance(now_s)
            self._note(job)
        job.run.resume(self._now_s(), NOTHING, Conditions())
        job.trains = None

    def _note(self, job: _Job) -> None:
        job.written[job.attempt] = Attempt(
            job.attempt, self.origin_s + job.began_s, self._client.clock.now_s(),
            job.before, job.run.work_done,
        )  # fmt: skip


def placed(described: str) -> Allocation:
    """Read the GPUs that a worker service tells a rank of: NODE:GPUS,... Nodes are alike here, so
    that their order stands for their names."""
    parts = [part.rpartition(":") for part in described.split(",") if part]
    return tuple((place, int(gpus)) for place, (_, _, gpus) in enumerate(parts))
