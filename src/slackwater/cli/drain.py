"""`slackwater drain`: empty an aggregator before its machine goes."""

import asyncio
import secrets
from typing import Annotated, Any

import typer

from slackwater.cli.show import with_client
from slackwater.common.shell.client import Client
from slackwater.console import tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import FAILED, Usage, err, out, print_json, reported
from slackwater.console.tables import Row
from slackwater.console.usage import an_id, typed
from slackwater.schemas.cluster import DrainProgress

POLL_S = 0.5
GRACE_S = 2.0
"""Beyond the deadline: until the controller has said that it passed."""


def drain(
    context: typer.Context,
    aggregator: Annotated[str, typer.Argument(help="One that `slackwater aggregators` lists.")],
    within: Annotated[
        float,
        typer.Option(
            min=1,
            max=86_400,
            metavar="SECONDS",
            help="Seconds until its machine goes, at most a day.",
        ),
    ] = 60.0,
    request: Annotated[
        str,
        typer.Option(
            "--id",
            metavar="ID",
            help="Name the order, to repeat it safely.",
        ),
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is empty, or time is up.")
    ] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the order to empty it.")] = False,
    lost: Annotated[
        bool,
        typer.Option("--lost", help="Give it up: its machine is gone for good."),
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Empty an aggregator within a deadline, and keep it empty."""
    with reported():
        _check(context, aggregator, request)
    if cancel:
        changed = with_client(url, lambda client: client.restore(aggregator))
        done = "serves again" if changed else "was not being drained: nothing changed"
        _say({"aggregator": aggregator, "restored": changed}, f"{aggregator} {done}", json)
        return
    if lost:
        with_client(url, lambda client: client.lost(aggregator))
        done = "is not waited for: what was there begins anew elsewhere"
        _say({"aggregator": aggregator, "lost": True}, f"{aggregator} {done}", json)
        return
    order = request or f"{aggregator[:40]}-{secrets.token_hex(4)}"

    async def follow(client: Client) -> DrainProgress:
        progress = await client.drain(aggregator, order, within)
        while wait and _goes_on(progress):
            await asyncio.sleep(POLL_S)
            progress = await client.drain(aggregator, order, within)
        return progress

    progress = with_client(url, follow)
    if json:
        print_json(progress)
    else:
        _show(progress)
    if wait and progress.drain.state != "drained":
        raise typer.Exit(FAILED)


def _check(context: typer.Context, aggregator: str, request: str) -> None:
    """Refuse an id that cannot be one, and options of which some would do nothing. Raises Usage."""
    an_id("AGGREGATOR", aggregator)
    if request:
        an_id("--id", request)
    kinds = [name for name in ("cancel", "lost") if context.params[name]]
    others = [name for name in ("within", "request", "wait") if typed(context, name)]
    if len(kinds) + (len(others) if kinds else 0) > 1:
        said = ", ".join(f"--{'id' if name == 'request' else name}" for name in [*kinds, *others])
        raise Usage(f"{said}: they exclude each other; give one")


def _say(document: dict[str, Any], sentence: str, json: bool) -> None:
    if json:
        print_json(document)
    else:
        out.print(sentence, markup=False)


def _goes_on(progress: DrainProgress) -> bool:
    drain = progress.drain
    return drain.state == "draining" and progress.at_s < drain.deadline_s + GRACE_S


def _show(progress: DrainProgress) -> None:
    drain = progress.drain
    left_s = max(0.0, drain.deadline_s - progress.at_s)
    out.print(
        f"{drain.aggregator}: {drain.state}, {left_s:.0f} s to its deadline ({drain.request})"
    )
    if not progress.left:
        return
    rows = [
        Row(
            (
                job.job, str(job.buckets), f"{job.nbytes / 1e6:,.1f} MB",
                "yes" if job.keeps_state else "none", job.phase,
            ),
            job.reason,
        )
        for job in progress.left
    ]  # fmt: skip
    heads = ("JOB", "BUCKETS", "BYTES", "OPTIMISER STATE", "PHASE")
    tables.show(tables.lines(heads, rows, out.width if out.is_terminal else None, note="WAITS"))
    if progress.needed_s > left_s and drain.state != "drained":
        err.print(
            f"{progress.left_bytes / 1e6:,.0f} MB take {progress.needed_s:.0f} s at its cap "
            "(migration_bytes_s), if they are copied to another host: raise it, or give more time"
        )
    if drain.state == "late":
        err.print(
            "what is left goes on leaving; when the machine goes it begins anew elsewhere from "
            "what its workers, and its checkpoint if it is saved, have"
        )
