"""`slackwater drain`: empty an aggregator before its machine goes."""

import asyncio
import secrets
from typing import Annotated

import typer
from rich.table import Table

from slackwater.cli.options import Json, Url
from slackwater.cli.outcome import FAILED, err, out, print_json, reported
from slackwater.cli.show import with_client
from slackwater.common.client import Client
from slackwater.common.errors import Rejected
from slackwater.schemas.cluster import DrainProgress

POLL_S = 0.5
GRACE_S = 2.0
"""Beyond the deadline: until the controller has said that it passed."""


def drain(
    aggregator: Annotated[str, typer.Argument(help="As `slackwater aggregators` names it.")],
    within: Annotated[float, typer.Option(help="Seconds until its machine goes.")] = 60.0,
    request: Annotated[
        str, typer.Option("--id", help="Of the order; given again, it is the same order.")
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Until it is empty, or time is up.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Take the order back.")] = False,
    lost: Annotated[
        bool, typer.Option("--lost", help="Its machine is gone: do not wait for its return.")
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Empty an aggregator within a deadline, and keep it empty."""
    if cancel:
        with_client(url, lambda client: client.restore(aggregator))
        out.print(f"{aggregator} serves again")
        return
    if lost:
        with_client(url, lambda client: client.lost(aggregator))
        out.print(f"{aggregator} is not waited for: what was there begins anew elsewhere")
        return
    with reported():
        if not 1.0 <= within <= 86_400.0:
            raise Rejected(f"--within {within:g}: give 1 second to a day")
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
    table = Table()
    for column in ("job", "buckets", "bytes", "optimiser state", "phase", "waits"):
        table.add_column(column)
    for job in progress.left:
        table.add_row(
            job.job, str(job.buckets), f"{job.nbytes / 1e6:,.1f} MB",
            "yes" if job.keeps_state else "none", job.phase, job.reason or "-",
        )  # fmt: skip
    out.print(table)
    if progress.needed_s > left_s and drain.state != "drained":
        err.print(
            f"{progress.left_bytes / 1e6:,.0f} MB take {progress.needed_s:.0f} s at its cap "
            "(migration_bytes_s), if they are copied to another host: raise it, or give more time"
        )
    if drain.state == "late":
        err.print(
            "what is left goes on leaving; when the machine goes it begins anew elsewhere from the "
            "workers' parameters, without optimiser state"
        )
