"""Report a job in one value: times, places, speed, what it used and what befell it."""

from typing import Any, Final

import msgspec

from slackwater.client import happened
from slackwater.client.results import results
from slackwater.common.domains.facts.lives import Life, Lives
from slackwater.common.shell.client import Client
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.job_states import WAITING_STATES, JobState
from slackwater.schemas.usage import UsageSums

EVENTS_MAX: Final = 200


class Period(msgspec.Struct, frozen=True):
    """A time in one state. `to_s`: None while it lasts; times are seconds since 1970."""

    state: JobState
    from_s: float
    to_s: float | None
    allocation: NodeAllocation
    """(node, GPUs or slots) that the job held."""
    reason: str


class JobReport(msgspec.Struct, frozen=True):
    """A job as it went so far. Times are seconds since 1970, durations seconds.

    `speeds` are (second, speed over its speed alone) by monitor window; `results` the value that
    each rank closed with, by rank.
    """

    job: str
    state: JobState
    reason: str
    submitted_s: float
    started_s: float | None
    finished_s: float | None
    waited_s: float
    """Seconds that it waited, before its start and while it was paused."""
    ran_s: float
    """Seconds that all its processes ran."""
    held_s: float
    """GPUs, or slots of nodes, times seconds."""
    iterations: int
    loss: float | None
    """Part of its speed alone that it lost in its last monitor window; None: not measured."""
    alone_s: float | None
    """Seconds of an iteration alone, as profiled."""
    moves: int
    """Moves of its buckets between aggregators that finished."""
    preemptions: int
    reallocations: int
    restarts: int
    usage: UsageSums
    results: dict[str, Any]
    periods: tuple[Period, ...]
    speeds: tuple[tuple[float, float], ...]
    events: tuple[str, ...]
    """Sentences, the oldest first."""


async def read(client: Client, job: str) -> JobReport:
    """Read the job's record and the facts that are kept of it. Raises Rejected: there is no such
    job; NothingKept where no facts are kept."""
    info = await client.job_info(job)
    lives = Lives()
    sentences: list[str] = []
    async for told in happened.told(client, job, 0.0, 0, follow=False):
        if told.fact is not None:
            lives.tell(told.fact, told.kept.at_s)
        if getattr(told.fact, "fact", "") == "deleted":  # Another job had this id before.
            sentences.clear()
            lives = Lives()
        elif not told.routine:
            sentences.append(told.text)
    life = lives.jobs.get(job) or Life(job, info.job.submitted_s)
    return made(info, life, sentences[-EVENTS_MAX:], client.clock.now_s())


def made(info: JobInfo, life: Life, sentences: list[str], now_s: float) -> JobReport:
    """Put the record and the facts together."""
    record, progress = info.job, info.progress
    used = sum((day.sums for day in record.usage), UsageSums())
    return JobReport(
        job=record.spec.id,
        state=record.state,
        reason=record.reason,
        submitted_s=record.submitted_s,
        started_s=record.started_s or None,
        finished_s=record.finished_s or None,
        waited_s=life.spent_s(WAITING_STATES, now_s),
        ran_s=life.spent_s(("running",), now_s),
        held_s=life.held_s(now_s),
        iterations=progress.iteration if progress is not None else 0,
        loss=progress.loss if progress is not None else None,
        alone_s=life.alone_s,
        moves=sum(move.done for move in life.moves),
        preemptions=record.preemptions,
        reallocations=record.reallocations,
        restarts=sum(record.restarts.values()),
        usage=used,
        results=results(record),
        periods=tuple(
            Period(each.state, each.from_s, each.to_s, each.allocation, each.reason)
            for each in life.stretches
        ),
        speeds=tuple(life.speeds()),
        events=tuple(sentences),
    )
