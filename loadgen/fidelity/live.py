"""One trace on one live cluster: submit on time, tell how far the programs are, kill the master if
asked to, and return the records and facts."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import ceil
from typing import Final

import structlog

from slackwater.common.base import codec
from slackwater.common.base.errors import DeadlineExceeded, Retryable
from slackwater.common.embedded import EmbeddedCluster
from slackwater.common.shell.client import Client
from slackwater.loadgen.fidelity.foretold import Foretold
from slackwater.loadgen.fidelity.jobs import LiveJob, progress
from slackwater.loadgen.fidelity.training import Training
from slackwater.schemas import subjects
from slackwater.schemas.base import JobId
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.telemetry import IterationsObserved

log = structlog.get_logger()
LOOK_S: Final = 1.0
TELL_S: Final = 0.25
BEGIN_S: Final = 1.0
"""Seconds until the trace's second 0."""
NODES_S: Final = 20.0
PATIENCE: Final = 3.0
"""A run is given up after so many times as long as the simulator says."""
MASTER: Final = "master-m1"
LIFE: Final = frozenset({"starting", "stopping", "resized", "paused", *TERMINAL_STATES})
"""Facts that tell what a job holds."""

OnLook = Callable[[Mapping[str, JobRecord], float], None]


@dataclass
class LiveRun:
    """A finished live run; in seconds since the trace's second 0 where not said otherwise."""

    origin_s: float
    """The trace's second 0, since 1970."""
    records: dict[str, JobRecord] = field(default_factory=dict)
    facts: dict[str, list[JobEvent]] = field(default_factory=dict)
    """Facts of each job, in their order."""
    kills: int = 0


async def nodes_there(client: Client, nodes: int) -> None:
    """Wait until the master has heard all nodes. Raises DeadlineExceeded."""
    give_up_s = client.clock.now_s() + NODES_S
    while len([node for node in await client.nodes() if node.alive]) < nodes:
        if client.clock.now_s() > give_up_s:
            raise DeadlineExceeded(f"not all of {nodes} worker nodes are heard; see their logs")
        await client.clock.sleep_until(client.clock.now_s() + LOOK_S / 4)


async def play(
    client: Client,
    jobs: Sequence[LiveJob],
    within_s: float,
    on_look: OnLook,
    kills_s: Sequence[float] = (),
    cluster: EmbeddedCluster | None = None,
    beside: Sequence["asyncio.Future[None]"] = (),
    foretold: Foretold | None = None,
    training: Training | None = None,
) -> LiveRun:
    """The trace begins at a whole second, as rounds do.

    Raises DeadlineExceeded where not all have ended `within_s` of the trace's begin, and what a
    task `beside` it raises.
    """
    run = LiveRun(ceil(client.clock.now_s() + BEGIN_S))
    if training is not None:
        training.origin_s = run.origin_s
    patient = client.patient()
    tasks = [asyncio.ensure_future(_submit(patient, jobs, run))]
    if kills_s:
        assert cluster is not None, "only a cluster of its own is killed"
        tasks.append(asyncio.ensure_future(_kill(cluster, kills_s, run, client)))
    teller = _Teller(client, jobs)
    tasks.append(asyncio.ensure_future(teller.tell()))
    try:
        await _until_ended(
            patient,
            jobs,
            run,
            within_s,
            _watched(on_look, training),
            [*tasks, *beside],
            foretold,
            teller,
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for job in jobs:
        run.records[job.spec.id] = await patient.job(job.spec.id)
    run.facts = await facts_of(patient, jobs)
    return run


def _watched(on_look: OnLook, training: Training | None) -> OnLook:
    def look(records: Mapping[str, JobRecord], at_s: float) -> None:
        if training is not None:
            training.raise_failures()
        on_look(records, at_s)

    return look


async def facts_of(client: Client, jobs: Sequence[LiveJob]) -> dict[str, list[JobEvent]]:
    """Read what the bus kept of the jobs' lives."""
    found: dict[str, list[JobEvent]] = {job.spec.id: [] for job in jobs}
    async with aclosing(client.history.read((subjects.events("job"),))) as kept:
        async for each in kept:
            _, id, fact = each.subject.rsplit(".", 2)
            if id in found and fact in LIFE:
                found[id].append(codec.decode(each.payload, JobEvent))
    return found


async def _submit(client: Client, jobs: Sequence[LiveJob], run: LiveRun) -> None:
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        await client.clock.sleep_until(run.origin_s + job.submission.submit_s)
        await client.submit(job.spec)


async def _kill(
    cluster: EmbeddedCluster, kills_s: Sequence[float], run: LiveRun, client: Client
) -> None:
    for at_s in kills_s:
        await client.clock.sleep_until(run.origin_s + at_s)
        cluster.supervisor.kill(MASTER, signal.SIGKILL)
        run.kills += 1
        log.info("master.killed", at_s=round(at_s, 1))


async def _until_ended(
    client: Client,
    jobs: Sequence[LiveJob],
    run: LiveRun,
    within_s: float,
    on_look: OnLook,
    tasks: Sequence["asyncio.Future[None]"],
    foretold: Foretold | None,
    teller: "_Teller",
) -> None:
    clock, ids = client.clock, {job.spec.id for job in jobs}
    while True:
        for task in tasks:
            if task.done():
                task.result()
        now_s = clock.now_s()
        try:
            every, known = await client.all_jobs()
            records = {id: record for id, record in every.items() if id in ids}
            if foretold is not None:
                await foretold.look(client, records, known)
        except Retryable as error:
            log.info("look.failed", reason=str(error))  # Jobs go on while the master is down.
            records = {}
        teller.records = records
        on_look(records, now_s - run.origin_s)
        ended = sum(each.state in TERMINAL_STATES for each in records.values())
        if tasks[0].done() and ended >= len(jobs):
            return
        if now_s - run.origin_s > within_s:
            left = [id for id, each in records.items() if each.state not in TERMINAL_STATES]
            raise DeadlineExceeded(
                f"{', '.join(left) or 'jobs'} did not end within {within_s:.0f} s; see the "
                "services' logs"
            )
        await clock.sleep_until(now_s + LOOK_S)


class _Teller:
    """Tells the cluster how far each job's program is, as Agents do of jobs that have some: the
    program itself is too light to speak on the bus."""

    def __init__(self, client: Client, jobs: Sequence[LiveJob]) -> None:
        self._client, self._jobs = client, jobs
        self._told: dict[str, int] = {}
        self.records: Mapping[str, JobRecord] = {}

    async def tell(self) -> None:
        while True:
            await self._tell()
            await self._client.clock.sleep_until(self._client.clock.now_s() + TELL_S)

    async def _tell(self) -> None:
        for job in self._jobs:
            record = self.records.get(job.spec.id)
            if record is None or record.state not in ("starting", "running"):
                continue
            done, before = progress(job), self._told.get(job.spec.id, 0)
            if done <= before:
                continue
            self._told[job.spec.id] = done
            each = (job.iteration_s,) * min(done - before, 4096)
            for rank in range(job.spec.workers):
                message = IterationsObserved(
                    job=JobId(record.spec.id), rank=rank, first_iteration=done - len(each) + 1,
                    durations_s=each, location_epoch=0, bytes_pushed=0, bytes_pulled=0,
                )  # fmt: skip
                subject = subjects.telemetry("job", job.spec.id, "iterations")
                await self._client.bus.publish(subject, codec.encode(message))
