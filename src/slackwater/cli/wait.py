"""`slackwater wait`: until jobs are what a script needs them to be."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Final, Literal

import msgspec
import typer

from slackwater.cli.job_ids import JobIds
from slackwater.cli.show import with_client
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client
from slackwater.console.options import Json, Url
from slackwater.console.outcome import FAILED, TRY_LATER, err, out, print_json
from slackwater.schemas import subjects
from slackwater.schemas.job_states import STATE_SAID, TERMINAL_STATES, JobState
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


def wait(
    jobs: JobIds,
    wanted: Annotated[
        Wanted, typer.Option("--for", help="The state that all jobs must reach.")
    ] = "ended",
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait (0: without limit).")
    ] = 0.0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Wait until jobs have reached a state.

    For example: `slackwater wait train-1 --for completed && python evaluate.py`.
    Exits with 0 once all have, with 75 when the time is over, and with 1
    as soon as one has ended in another state and can no longer reach it.
    A job that was started has reached `running`, though it may have ended.
    """

    async def waited(client: Client) -> list[Waited]:
        return await until(client, jobs, wanted, timeout)

    found = with_client(url, waited)
    if json:
        print_json(found)
    verdicts = {each.verdict for each in found}
    for each in found if not json else ():
        _say(each, wanted)
    if "never" in verdicts:
        raise typer.Exit(FAILED)
    if "waits" in verdicts:
        err.print(f"not reached within {timeout:g} s", markup=False)
        raise typer.Exit(TRY_LATER)


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


def _say(each: Waited, wanted: str) -> None:
    text = f"job {each.job} {STATE_SAID[each.state]}"
    if each.verdict == "never":
        text += f": it cannot become {wanted} any more"
    if each.reason and each.verdict != "reached":
        text += f" ({each.reason})"
    out.print(text, markup=False, highlight=False, soft_wrap=True)
