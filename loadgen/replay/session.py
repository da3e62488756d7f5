"""One workload on one live cluster: submit on time, watch the bus, return the timeline."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import (
    DeadlineExceeded,
    DecodeRejected,
    Retryable,
    SlackwaterError,
)
from slackwater.common.bus.base import Delivery
from slackwater.common.domains.facts.timeline import Observed, Timeline
from slackwater.common.shell.client import Client
from slackwater.loadgen.replay.workload import Workload
from slackwater.schemas import subjects
from slackwater.schemas.jobs import JobSpec

log = structlog.get_logger()
PATTERNS = (
    subjects.events("job"),
    subjects.events("aggregator"),
    subjects.events("migration"),
    subjects.telemetries("job", "*", "iterations"),
    subjects.telemetries("aggregator", "*", "heartbeat"),
    subjects.telemetries("aggregator", "*", "tasks"),
)
TICK_S = 0.25
START_S = 30.0
"""Seconds that starting a job may take, on top of its computing."""
RUNNING_S = 60.0
"""Seconds for a job's first iterations beside other jobs."""
SLOWDOWN_MAX = 6.0
"""A job that computes for C seconds alone is given up after SLOWDOWN_MAX x C + START_S."""
SETTLE_S = 15.0

OnTick = Callable[[Timeline, float], None]
Failure = Callable[[], SlackwaterError | None]
"""Why the cluster under the replay cannot go on, once it cannot."""


def unwatched() -> SlackwaterError | None:
    """A cluster that somebody else looks after."""
    return None


def deadline_s(workload: Workload) -> float:
    """Return the seconds after which the replay is given up."""
    return max(
        job.at_s + START_S + SLOWDOWN_MAX * job.compute_s * job.spec.iterations
        for job in workload.jobs
    )


async def replay(
    client: Client, workload: Workload, on_tick: OnTick, failure: Failure = unwatched
) -> Timeline:
    """Raises DeadlineExceeded naming the jobs that have not ended (they are cancelled first), or
    the cluster's `failure`."""
    async with observed(client) as timeline:
        submitting = asyncio.ensure_future(_submit_on_time(client, workload, timeline))
        try:
            await _until_ended(client, workload, timeline, submitting, on_tick, failure)
            await _until_released(client, timeline, on_tick)
            on_tick(timeline, client.clock.now_s())  # Shows the last events, too.
        except BaseException:
            submitting.cancel()
            await asyncio.shield(_cancel_all(client, timeline))
            raise
    return timeline


@asynccontextmanager
async def endless(client: Client, jobs: Sequence[JobSpec]) -> AsyncIterator[Timeline]:
    """Run jobs until the block ends, which cancels them. It begins when each has iterated."""
    async with observed(client) as timeline:
        give_up_s = client.clock.now_s() + START_S + RUNNING_S
        try:
            for spec in jobs:
                timeline.expect(spec, client.clock.now_s())
                await client.submit(spec)
            while not all(track.iterations for track in timeline.tracks.values()):
                if client.clock.now_s() > give_up_s:
                    left = [id for id, track in timeline.tracks.items() if not track.iterations]
                    raise DeadlineExceeded(
                        f"{', '.join(left)} did not iterate within {START_S + RUNNING_S:.0f} s; "
                        "give the cluster more CPU"
                    )
                await client.clock.sleep_until(client.clock.now_s() + TICK_S)
            yield timeline
        finally:
            await asyncio.shield(_cancel_all(client, timeline))


@asynccontextmanager
async def observed(client: Client) -> AsyncIterator[Timeline]:
    """Yield a timeline of all that the bus tells while the block runs."""
    clock = client.clock
    timeline = Timeline(started_s=clock.now_s())

    async def observe(delivery: Delivery) -> None:
        try:
            message = codec.decode(delivery.payload, Observed)
        except DecodeRejected:
            return  # Facts of other kinds pass by on the same patterns; codec counts them.
        timeline.observe(message, clock.now_s())

    subscriptions = [await client.bus.subscribe(pattern, observe) for pattern in PATTERNS]
    await client.flush()
    try:
        yield timeline
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()


async def _submit_on_time(client: Client, workload: Workload, timeline: Timeline) -> None:
    patient = client.patient()
    for job in workload.jobs:
        await client.clock.sleep_until(timeline.started_s + job.at_s)
        timeline.expect(job.spec, client.clock.now_s())
        await patient.submit(job.spec)


async def _until_ended(
    client: Client,
    workload: Workload,
    timeline: Timeline,
    submitting: "asyncio.Future[None]",
    on_tick: OnTick,
    failure: Failure,
) -> None:
    give_up_s = timeline.started_s + deadline_s(workload)
    polled_s = 0.0
    while not (submitting.done() and timeline.ended()):
        if submitting.done():
            submitting.result()  # A refused submission ends the replay.
        now_s = client.clock.now_s()
        on_tick(timeline, now_s)
        if (broken := failure()) is not None:
            raise broken
        if now_s > give_up_s:
            left = [id for id, track in timeline.tracks.items() if track.ended_s is None]
            raise DeadlineExceeded(
                f"{', '.join(left)} did not end within {deadline_s(workload):.0f} s; see the "
                "services' logs, or give the cluster more CPU"
            )
        if now_s - polled_s > limits.HEARTBEAT_S * 2:
            polled_s = now_s
            await _poll(client, timeline)
        await client.clock.sleep_until(now_s + TICK_S)
    submitting.result()  # The record of another job may have ended under a refused one's id.


async def _poll(client: Client, timeline: Timeline) -> None:
    """Read the jobs' ends from the master's records: the bus may lose a fact."""
    try:
        records = await client.jobs()
    except Retryable as error:
        log.info("poll.failed", reason=str(error))  # Jobs go on while the master is down.
        return
    for record in records:
        track = timeline.tracks.get(record.spec.id)
        if track is not None and track.ended_s is None and record.finished_s > 0:
            timeline.end(record.spec.id, record.state, record.reason, client.clock.now_s())


async def _until_released(client: Client, timeline: Timeline, on_tick: OnTick) -> None:
    """Wait until the last job's aggregators are given back."""
    give_up_s = client.clock.now_s() + SETTLE_S
    while timeline.in_use > 0 and client.clock.now_s() < give_up_s:
        now_s = client.clock.now_s()
        on_tick(timeline, now_s)
        await client.clock.sleep_until(now_s + TICK_S)


async def _cancel_all(client: Client, timeline: Timeline) -> None:
    for id, track in timeline.tracks.items():
        if track.ended_s is None:
            try:
                await client.cancel(id)
            except SlackwaterError as error:
                log.warning("cancel-failed", job=id, error=str(error))
