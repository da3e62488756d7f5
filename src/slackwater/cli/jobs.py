"""`slackwater jobs`: what runs, how far it is, and what the others wait for."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from slackwater.cli.show import with_client
from slackwater.common.shell.client import Client
from slackwater.console import documents, figures, gpus, tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import err, out, print_json
from slackwater.console.tables import Row
from slackwater.schemas.base import JobId
from slackwater.schemas.job_states import TERMINAL_STATES, JobState
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.progress import JobProgress

ENDED_SHOWN: Final = 10
"""Ended jobs that are listed unless all are asked for."""
HEADS: Final = ("JOB", "STATE", "AGE", "PROGRESS", "SPEED", "LOSS", "ETA", "GPUS", "AGGREGATORS")
WIDE: Final = (
    *HEADS, "MODEL", "MODE", "SHAPE", "TENANT", "PRIORITY", "NODE", "CLUSTER", "PHASE", "MOVES",
)  # fmt: skip
Sort = Literal["active", "id", "state", "age", "progress", "speed", "loss", "eta"]
Output = Literal["table", "wide", "name", "json"]


class Job(msgspec.Struct, frozen=True):
    """One job as the master tells of it."""

    record: JobRecord
    progress: JobProgress | None

    @property
    def id(self) -> str:
        return self.record.spec.id

    @property
    def ended(self) -> bool:
        return self.record.state in TERMINAL_STATES

    def age_s(self, now_s: float) -> float:
        """Since it was submitted; of one that ended, since then."""
        return now_s - (self.record.finished_s if self.ended else self.record.submitted_s)


class Listed(msgspec.Struct, frozen=True):
    """Jobs in the order in which they are shown, and how many more there are."""

    jobs: tuple[Job, ...]
    hidden: int
    """Jobs that match and are left out."""
    counts: dict[JobState, int]
    at_s: float


def jobs(
    state: Annotated[JobState | None, typer.Option(help="List only jobs in this state.")] = None,
    tenant: Annotated[str | None, typer.Option(help="List only this tenant's jobs.")] = None,
    sort: Annotated[Sort, typer.Option(help="Sort by this; active is the order above.")] = (
        "active"
    ),
    limit: Annotated[int, typer.Option(min=0, help="Show at most this many jobs (0: all).")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show all ended jobs, not only the last {ENDED_SHOWN}.")
    ] = False,
    output: Annotated[
        Output,
        typer.Option("--output", "-o", help="List as a table, a wider one, ids alone, or JSON."),
    ] = "table",
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs: those that run, those that wait, then the last that ended.

    AGE: since its submission; since the end of a job that ended.
    PROGRESS: the last iteration that ended on every rank, of how many;
    a program that counts for itself has no total.
    SPEED, ETA: of its slowest rank, over the last seconds.
    GPUS: those that it holds, of those that it asked for.
    LOSS: the part of its profiled speed that it lost by sharing.
    WHY: what it waits for, or why it failed.

    On a pipe nothing is cut, and every job is one line.
    """
    every = everything or json or output == "json" or (state in TERMINAL_STATES)
    shape: Output = "json" if json else output

    async def listed(client: Client) -> Listed:
        return await read(client, state, tenant, whole=shape == "json", every=every)

    found = arranged(with_client(url, listed), sort, limit)
    if shape == "json":
        print_json([documents.job(job.record, job.progress) for job in found.jobs])
    elif shape == "name":
        tables.show([job.id for job in found.jobs])
    else:
        width = out.width if out.is_terminal else None
        tables.show(table(found, wide=shape == "wide", width=width))
        if note := ending(found, state, tenant):
            _beside(note)


async def read(
    client: Client,
    state: JobState | None = None,
    tenant: str | None = None,
    *,
    whole: bool = False,
    every: bool = False,
) -> Listed:
    """Read all active jobs and the last that ended (`every`: all of them), page by page."""
    found: dict[str, Job] = {}
    offset, ended = 0, 0
    while True:
        page = await client.job_page(state, tenant, offset, whole)
        for record in page.jobs:
            job = Job(record, page.progress.get(JobId(record.spec.id)))
            ended += job.ended
            if every or not job.ended or ended <= ENDED_SHOWN:
                found[job.id] = job
        offset += len(page.jobs)
        enough = not every and ended >= ENDED_SHOWN
        if not page.jobs or offset >= page.total or enough:
            return Listed(
                tuple(found.values()), page.total - len(found), page.counts, client.clock.now_s()
            )


def arranged(listed: Listed, order: Sort, limit: int = 0) -> Listed:
    """Sort the jobs, equal ones by their ids, a2 before a10, and keep no more than `limit`."""
    key = _KEYS.get(order)
    jobs: Sequence[Job] = listed.jobs
    if key is not None:
        jobs = sorted(jobs, key=lambda job: (key(job, listed.at_s), tables.natural(job.id)))
    shown = jobs[:limit] if limit else jobs
    return msgspec.structs.replace(
        listed, jobs=tuple(shown), hidden=listed.hidden + len(jobs) - len(shown)
    )


def table(listed: Listed, *, wide: bool, width: int | None) -> list[str]:
    """Lay out the jobs; empty where there are none. `width`: columns of the terminal."""
    if not listed.jobs:
        return []
    rows = [row(job, listed.at_s, wide) for job in listed.jobs]
    return tables.lines(WIDE if wide else HEADS, rows, width, note="WHY")


def row(job: Job, now_s: float, wide: bool = False) -> Row:
    record, progress = job.record, job.progress
    cells = [
        job.id,
        record.state,
        figures.lasted(job.age_s(now_s)),
        figures.done(progress),
        figures.speed(progress.speed) if progress else "",
        figures.loss(progress.loss) if progress else "",
        figures.eta(progress),
        gpus.gpus_held(record),
        ",".join(sorted(progress.aggregators, key=tables.natural)) if progress else "",
    ]
    if wide:
        spec = record.spec
        cells += [
            spec.model, figures.mode(spec), f"{spec.servers}s-{spec.workers}w", spec.tenant,
            str(spec.priority or ""), gpus.place(record), record.cluster or "",
            progress.phase if progress else "", str(progress.moves) if progress else "",
        ]  # fmt: skip
    return Row(tuple(cells), record.reason)


def ending(listed: Listed, state: JobState | None, tenant: str | None) -> str:
    """Say what the table does not show; empty: it shows all."""
    of = f" {state}" if state else ""
    whose = f" of tenant {tenant}" if tenant else ""
    if not listed.jobs and not listed.hidden:
        return f"There are no{of} jobs{whose}; `slackwater submit` starts one."
    if not listed.hidden:
        return ""
    return f"{listed.hidden:,} more{of} jobs{whose} are not shown; --all shows those that ended."


def _beside(note: str) -> None:
    """Print for a person: on a pipe this line would be taken for a row of the table."""
    err.print(note, markup=False)


def _ratio(job: Job, now_s: float) -> float:
    progress = job.progress
    if progress is None:
        return 0.0
    if progress.epochs is not None:
        return -(progress.epochs / progress.epochs_target if progress.epochs_target else 0.0)
    return -(progress.iteration / progress.iterations if progress.iterations else 0.0)


_KEYS: Final[dict[Sort, Callable[[Job, float], Any]]] = {
    "id": lambda job, now_s: 0,
    "state": lambda job, now_s: job.record.state,
    "age": lambda job, now_s: job.age_s(now_s),
    "progress": _ratio,
    "speed": lambda job, now_s: -(job.progress.speed if job.progress else 0.0),
    "loss": lambda job, now_s: -(job.progress.loss or 0.0 if job.progress else 0.0),
    "eta": lambda job, now_s: (
        inf if job.progress is None or job.progress.eta_s is None else job.progress.eta_s
    ),
}
