"""The clusters of this account on this machine: which there are (`status`), and the end of one
(`down`)."""

import asyncio
import contextlib
import os
import signal
import time
from typing import Annotated, Final

import msgspec
import typer
from rich.markup import escape

from slackwater.client.address import CLUSTER
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import DeadlineExceeded, Retryable, SlackwaterError, Unavailable
from slackwater.common.base.words import number_of
from slackwater.common.bus import local_clusters
from slackwater.common.bus.access import address_file
from slackwater.common.embedded.leftovers import sweep
from slackwater.common.embedded.orphans import alive
from slackwater.common.shell.client import connect
from slackwater.console import tables
from slackwater.console.figures import lasted
from slackwater.console.options import Json
from slackwater.console.outcome import err, out, print_json, reported
from slackwater.console.where import named
from slackwater.schemas.machine import LocalCluster

HEADS: Final = ("CLUSTER", "STATE", "AGE", "SERVICES", "RESTARTS", "PID", "URL")
SERVICE_HEADS: Final = ("SERVICE", "STATE", "PID", "RESTARTS")
NAMED_MAX: Final = 5
"""Jobs that one line names; the others are only counted."""
_LOOK_S: Final = 0.05
_Which = Annotated[
    str,
    typer.Option(
        envvar=CLUSTER,
        help="The cluster's name; by default the only cluster, or `default`.",
        show_default=False,
    ),
]


def status(
    name: Annotated[str, typer.Option(help="Show the processes of this cluster.")] = "",
    json: Json = False,
) -> None:
    """List this account's clusters on this machine."""
    with reported():
        sweep()
        if name := named(name):
            _one(local_clusters.selected(name), json)
            return
        entries = local_clusters.known()
        if json:
            print_json([msgspec.to_builtins(entry) for entry in entries])
        elif entries:
            tables.show(_table(entries, LiveClock().now_s()))
        else:
            err.print("no cluster runs here; `slackwater up` starts one")


def down(
    name: _Which = "",
    force: Annotated[bool, typer.Option(help="End it even if jobs run on it; they fail.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait until it has ended.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """End a cluster that `slackwater up` started, and say which jobs ran."""
    with reported():
        sweep()
        entry = local_clusters.selected(named(name))
        if entry is None:
            raise Unavailable("no cluster of this account runs on this machine")
        jobs = _jobs_of(entry, force)
        if jobs and not force:
            run = _counted(jobs, "runs" if len(jobs) == 1 else "run")
            raise Retryable(
                f"cluster {entry.name}: {run}; wait for them (`slackwater jobs --state running`), "
                "cancel them, or end them with it: `slackwater down --force`"
            )
        _end(entry, timeout)
        sweep()
        if json:
            print_json({"name": entry.name, "pid": entry.pid, "failed_jobs": jobs})
            return
        failed = f"; {_counted(jobs, 'ran and failed with it')}" if jobs else ""
        kept = f"; its records stay in {entry.state_dir}" if entry.state_dir else ""
        out.print(
            f"cluster {entry.name} is down{failed}{kept}; its logs: {entry.log_dir}",
            markup=False,
            soft_wrap=True,
        )


async def running_jobs(url: str) -> list[str]:
    """List the ids of running jobs. Raises Retryable when the master does not answer."""
    async with connect(url, "slackwater-cli") as client:
        return sorted(record.spec.id for record in await client.jobs("running"))


def announce(entry: LocalCluster, json: bool) -> None:
    """Say where a cluster that is ready can be found."""
    if json:
        fields = ("name", "pid", "url", "address_file", "log_dir", "state_dir", "run_dir")
        print_json({field: getattr(entry, field) for field in fields})
        return
    out.print(
        f"cluster {entry.name} at [bold]{entry.url}[/bold], logs in {escape(entry.log_dir)}",
        soft_wrap=True,
    )
    out.print(
        f"its address with its owner's password: {escape(entry.address_file)}", soft_wrap=True
    )
    chosen = "" if len(local_clusters.known()) == 1 else f" --cluster {entry.name}"
    for words in ("submit --id j1 --model vgg19", "top"):
        out.print(f"try: slackwater{chosen} {words}", markup=False, highlight=False)


def _jobs_of(entry: LocalCluster, force: bool) -> list[str]:
    """List the jobs that run there. With `force`, a master that cannot say counts as none
    running."""
    if not entry.url:
        return []  # It still starts.
    try:
        return asyncio.run(running_jobs(address_file(entry.name).read_text().strip()))
    except (SlackwaterError, FileNotFoundError) as error:
        if force:
            return []
        raise Retryable(
            f"cluster {entry.name}: its master does not say which jobs run ({error}); end it all "
            "the same with `slackwater down --force`"
        ) from error


def _end(entry: LocalCluster, timeout_s: float) -> None:
    """End the cluster and wait until it is gone. Raises DeadlineExceeded."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(entry.pid, signal.SIGTERM)
    give_up_s = time.monotonic() + timeout_s
    while alive(entry.pid):
        if time.monotonic() > give_up_s:
            raise DeadlineExceeded(
                f"cluster {entry.name} (process {entry.pid}) has not ended within {timeout_s:g} s; "
                "`slackwater status` says what is left of it, a second `slackwater down --force` "
                "ends it at once"
            )
        time.sleep(_LOOK_S)


def _counted(jobs: list[str], what: str) -> str:
    """Say which jobs, as in `7 jobs run: a, b, c, d, e and 2 more`."""
    named = ", ".join(jobs[:NAMED_MAX])
    more = f" and {len(jobs) - NAMED_MAX} more" if len(jobs) > NAMED_MAX else ""
    return f"{number_of(len(jobs), 'job')} {what}: {named}{more}"


def _one(entry: LocalCluster | None, json: bool) -> None:
    assert entry is not None, "a name was given: it is there, or was refused"
    if json:
        print_json(msgspec.to_builtins(entry))
        return
    rows = [
        tables.Row((each.name, each.state, str(each.pid or ""), str(each.restarts)), each.text)
        for each in entry.services
    ]
    tables.show(tables.lines(SERVICE_HEADS, rows, _width(), note="SAYS"))


def _table(entries: list[LocalCluster], now_s: float) -> list[str]:
    rows = []
    for entry in entries:
        ready = sum(service.state == "ready" for service in entry.services)
        restarts = sum(service.restarts for service in entry.services)
        age = lasted(now_s - entry.started_s)
        services = f"{ready}/{len(entry.services)}"
        cells = (entry.name, entry.state, age, services, str(restarts), str(entry.pid), entry.url)
        rows.append(tables.Row(cells))
    return tables.lines(HEADS, rows, _width())


def _width() -> int | None:
    return out.width if out.is_terminal else None
