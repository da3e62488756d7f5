"""Wait until jobs are what a script needs them to be."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, Literal

import msgspec

from slackwater.common.base.errors import Retryable
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client
from slackwater.schemas import subjects
from slackwater.schemas.job_states import TERMINAL_STATES, JobState
from slackwater.schemas.jobs import JobRecord

POLL_S: Final = 2.0
"""Seconds between two looks at the records, since the bus may lose a fact."""
Wanted = Literal["ended", "running", "paused", "completed", "failed", "cancelled"]
Verdict = Literal["reached", "never", "waits"]


class Waited(msgspec.Struct, frozen=True):
    """Says how waiting for one job ended."""

    job: str
    state: JobState
    verdict: Verdict
    reason: str


async def until(
    client: Client, jobs: Sequence[str], wanted: Wanted, timeout_s: float
) -> list[Waited]:
    """Wait until all jobs have reached it, one never can, or the time is over (0: no limit). Return
    what became of each. Raises Rejected: there is no such job."""
    ids = list(dict.fromkeys(jobs))
    news = asyncio.Event()

    async def heard(_: Delivery) -> None:
        news.set()

    async with AsyncExitStack() as stack:
        for id in ids:
            subscription = await client.bus.subscribe(subjects.events("job", id), heard)
            stack.push_async_callback(subscription.unsubscribe)
        await client.flush()
        deadline_s = client.clock.now_s() + timeout_s if timeout_s else None
        records = {id: await client.job(id) for id in ids}
        while True:
            found = [_waited(records[id], wanted) for id in ids]
            left_s = POLL_S if deadline_s is None else deadline_s - client.clock.now_s()
            verdicts = {each.verdict for each in found}
            if "waits" not in verdicts or "never" in verdicts or left_s <= 0:
                return found
            await _news(news, min(POLL_S, left_s))
            for each in found:
                if each.verdict == "waits":
                    records[each.job] = await _looked(client, records[each.job])


async def _looked(client: Client, before: JobRecord) -> JobRecord:
    """Return the record, or the former one while no master answers: jobs go on meanwhile."""
    try:
        return await client.job(before.spec.id)
    except Retryable:
        return before


async def _news(news: asyncio.Event, within_s: float) -> None:
    try:
        await asyncio.wait_for(news.wait(), within_s)
    except TimeoutError:
        return
    news.clear()


def _waited(record: JobRecord, wanted: Wanted) -> Waited:
    return Waited(record.spec.id, record.state, verdict(record, wanted), record.reason)


def verdict(record: JobRecord, wanted: Wanted) -> Verdict:
    ended = record.state in TERMINAL_STATES
    if wanted == "ended":
        return "reached" if ended else "waits"
    if wanted == "running" and record.started_s:
        return "reached"
    if record.state == wanted:
        return "reached"
    return "never" if ended else "waits"
