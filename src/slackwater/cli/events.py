"""`slackwater events`: what happened, in sentences with clock times."""

import sys
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
import typer

from slackwater.cli.job_ids import MaybeJobId
from slackwater.cli.show import with_client
from slackwater.client import AsyncClient
from slackwater.client.happened import Told, recent
from slackwater.common.base import limits
from slackwater.common.shell.client import Client
from slackwater.console import durations, figures
from slackwater.console.documents import whole
from slackwater.console.options import Json, Url
from slackwater.console.outcome import err, out, reported

LIMIT: Final = 100
Since = Annotated[str, typer.Option(help="Show what happened in the last 90s, 10m, 1h30m or 2d.")]


def events(
    job: MaybeJobId = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new facts.")
    ] = False,
    since: Since = "",
    limit: Annotated[
        int, typer.Option(min=0, help="Show this many of the newest facts (0: all).")
    ] = LIMIT,
    all: Annotated[
        bool, typer.Option("--all", help="Show routine facts, too: windows, copies.")
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Tell what happened: jobs and aggregators, moves, losses, remote memory.

    The bus keeps facts for a week by default. `slackwater tap` prints them as they are.
    """
    with reported():
        since_s = durations.seconds(since, "--since") if since else 0.0

    async def tell(client: AsyncClient) -> None:
        from_s = client.clock.now_s() - since_s if since else 0.0
        most, none = limit or limits.FACTS_SHOWN_MAX, True
        facts = client.events(job, since_s=from_s, limit=most, follow=follow, routine=all)
        async with aclosing(facts) as told:
            async for each in told:
                none = False
                show(each, client.clock.now_s(), json)
        if none and not json:
            err.print("nothing happened" + (f" to {job}" if job else ""), markup=False)

    with_client(url, tell)


async def recent_events(client: Client, job: str, count: int) -> list[str]:
    """Return the newest so many sentences about a job, with their clock times; about one that had
    its id before and was deleted, none."""
    now_s = client.clock.now_s()
    found = await recent(client, job, count)
    gone = [at for at, each in enumerate(found) if getattr(each.fact, "fact", "") == "deleted"]
    return [line(each, now_s) for each in found[gone[-1] + 1 if gone else 0 :]]


def line(told: Told, now_s: float) -> str:
    return f"{durations.clock(told.kept.at_s, now_s)} {told.text}"


def show(told: Told, now_s: float, json: bool) -> None:
    """Prints one line."""
    if json:
        sys.stdout.write(msgspec.json.encode(_document(told)).decode() + "\n")
        sys.stdout.flush()
    else:
        out.print(line(told, now_s), markup=False, highlight=False, soft_wrap=True)


def _document(told: Told) -> dict[str, Any]:
    kept = told.kept
    return {
        "at_s": kept.at_s,
        "at": figures.at(kept.at_s),
        "sequence": kept.sequence,
        "subject": kept.subject,
        "text": told.text,
        "fact": None if told.fact is None else whole(told.fact),
    }
