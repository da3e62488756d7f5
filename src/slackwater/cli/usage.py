"""`slackwater usage`: GPU hours, core hours and what sharing saved, by tenant, job or day."""

import csv
import sys
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import add
from typing import Annotated, Final

import typer

from slackwater.cli.show import with_client
from slackwater.common.shell.client import Client
from slackwater.console import durations, tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, err, out, print_json, reported
from slackwater.console.tables import Row
from slackwater.schemas.usage import DAY_S, GetUsage, UsageRow, UsageSums, UsedBy

_FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIGURES: Final = ("GPU-H", "CORE-H", "SERVER-H", "SHARED-H", "SAVED", "SUBMITTED", "ENDED")
_COLUMNS: Final = (
    "tenant", "job", "day", "gpu_hours", "core_hours", "standalone_core_hours",
    "aggregator_core_hours", "saved_core_hours", "submitted", "completed", "failed", "cancelled",
)  # fmt: skip


def usage(
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only this tenant's use.")
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            "--since",
            metavar="DATE",
            help="The first day, as 2026-11-02, or how long ago, as 7d; whole days in UTC.",
        ),
    ] = "",
    by: Annotated[
        UsedBy, typer.Option("--by", help="Add up by tenant, by job or by tenant and day.")
    ] = "tenant",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show what tenants and jobs used; jobs that run count up to now.

    GPU-H: hours of GPUs that jobs held.
    CORE-H: hours of cores that their processes asked for; a slot is one core.
    SERVER-H: core hours that parameter servers of their own would have held.
    SHARED-H: core hours of their parts of shared aggregators.
    SAVED: what sharing saved of SERVER-H.

    Tenants' days are kept when their jobs are forgotten; `--by job` lists those that are known.
    """

    async def read(client: Client) -> tuple[UsageRow, ...]:
        asked = GetUsage(by=by, tenant=tenant, since_day=first_day(since, client.clock.now_s()))
        return await client.usage(asked)

    with reported():
        first_day(since, 0.0)
        if json and as_csv:
            raise Usage("--json and --csv: choose one")
    rows = with_client(url, read)
    total = reduce(add, (row.sums for row in rows), UsageSums())
    if json:
        print_json({"by": by, "rows": [told(row) for row in rows], "total": figures(total)})
    elif as_csv:
        written = csv.DictWriter(sys.stdout, _COLUMNS, lineterminator="\n")
        written.writeheader()
        written.writerows(told(row) for row in rows)
    elif not rows:
        err.print("Nothing was used: no job ran in this time.", markup=False)
    else:
        tables.show(usage_table(rows, total, by, out.width if out.is_terminal else None))


def first_day(since: str, now_s: float) -> int:
    """Return the first day that counts. Raises Usage."""
    if not since:
        return 0
    try:
        return (datetime.strptime(since, "%Y-%m-%d").replace(tzinfo=UTC) - _FIRST).days
    except ValueError:
        pass
    try:
        return max(0, int((now_s - durations.seconds(since, "--since")) // DAY_S))
    except Usage as error:
        raise Usage(f"--since {since!r}: write a day, as 2026-11-02, or how long, as 7d") from error


def figures(sums: UsageSums) -> dict[str, float]:
    hours = {
        "gpu_hours": sums.gpu_s,
        "core_hours": sums.core_s,
        "standalone_core_hours": sums.standalone_core_s,
        "aggregator_core_hours": sums.aggregator_core_s,
        "saved_core_hours": sums.saved_core_s,
    }
    counts = ("submitted", "completed", "failed", "cancelled")
    found = {name: round(seconds / 3600, 6) for name, seconds in hours.items()}
    return found | {name: getattr(sums, name) for name in counts}


def told(row: UsageRow) -> dict[str, object]:
    """Lay a row out for programs: hours, and the day as a date."""
    return {"tenant": row.tenant, "job": row.job, "day": _date(row.day), **figures(row.sums)}


def usage_table(
    rows: tuple[UsageRow, ...], total: UsageSums, by: UsedBy, width: int | None
) -> list[str]:
    heads = {"tenant": ("TENANT",), "job": ("JOB", "TENANT"), "day": ("DAY", "TENANT")}[by]
    body = [
        Row((*{"tenant": (), "job": (row.job,), "day": (_date(row.day),)}[by],
             row.tenant, *_cells(row.sums)))
        for row in rows
    ]  # fmt: skip
    if len(rows) > 1:
        body.append(Row(("total", *[""] * (len(heads) - 1), *_cells(total))))
    return tables.lines((*heads, *_FIGURES), body, width)


def _cells(sums: UsageSums) -> tuple[str, ...]:
    saved = sums.saved_core_s / sums.standalone_core_s if sums.standalone_core_s else None
    hours = (sums.gpu_s, sums.core_s, sums.standalone_core_s, sums.aggregator_core_s)
    return (
        *(f"{seconds / 3600:,.2f}" for seconds in hours),
        "" if saved is None else f"{saved:.0%}",
        str(sums.submitted),
        str(sums.ended),
    )


def _date(day: int | None) -> str:
    return "" if day is None else f"{_FIRST + timedelta(days=day):%Y-%m-%d}"
