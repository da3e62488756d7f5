"""`slackwater scale`: another number of workers for a job, while it trains where it can."""

import asyncio
from typing import Annotated, Final

import msgspec
import typer

from slackwater.cli.job_ids import JobId
from slackwater.cli.show import with_client
from slackwater.common.base.errors import Retryable
from slackwater.common.base.words import number_of
from slackwater.common.shell.client import Client
from slackwater.console.options import Json, Url
from slackwater.console.outcome import FAILED, TRY_LATER, err, out, print_json
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.job_states import STATE_SAID, WAITING_STATES, JobState
from slackwater.schemas.jobs import JobRecord

POLL_S: Final = 0.2


class Scaled(msgspec.Struct, frozen=True):
    """Say what became of a job: its state, how many workers were asked for, whether that is so
    already, since which iteration, and what it lacks or before whom it is."""

    job: str
    state: JobState
    workers: int
    reached: bool
    since: int
    reason: str = ""


def scale(
    id: JobId,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            "--hosts",
            min=1,
            max=WORKERS_MAX,
            help="Workers that it is to have; of an elastic program, hosts.",
        ),
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once it trains with so many.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that --wait waits (0: without limit).")
    ] = 0.0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Give a job another number of workers, within the bounds that it was submitted with.

    A job that trains by slackwater.Agent goes on meanwhile: those that stay keep their process,
    and no iteration is lost. Another one saves, ends and starts anew. A job that waits starts so.
    More workers take idle GPUs or slots at once, before jobs that wait: the answer names those.
    Where too few are idle they are waited for, and the job trains on.
    Exits with 75 if --wait's time is over before, or if it is in the middle of another change; with
    1 if the job ended before.
    """

    async def scaled(client: Client) -> tuple[JobRecord, str]:
        record = await client.scale(id, workers)
        told = record.reason
        return await _until(client, record, workers, timeout) if wait else record, told

    record, told = with_client(url, scaled)
    reached = _reached(record, workers)
    if json:
        print_json(Scaled(id, record.state, workers, reached, record.size_since, told))
    else:
        out.print(_said(record, workers, told), markup=False, highlight=False, soft_wrap=True)
    if wait and not reached:
        if record.finished_s:
            raise typer.Exit(FAILED)
        if timeout:
            err.print(f"not reached within {timeout:g} s", markup=False)
        raise typer.Exit(TRY_LATER)


async def _until(client: Client, record: JobRecord, workers: int, timeout_s: float) -> JobRecord:
    """Look until it trains with so many, cannot any more, or the time is over (0: no limit)."""
    clock = client.clock
    until_s = clock.now_s() + timeout_s if timeout_s else None
    id = record.spec.id
    while not _reached(record, workers) and _asked(record, workers) and not record.finished_s:
        if until_s is not None and clock.now_s() >= until_s:
            break
        await asyncio.sleep(POLL_S)
        try:
            record = await client.job(id)
        except Retryable:  # No master answers: the job goes on meanwhile.
            continue
    return record


def _asked(record: JobRecord, workers: int) -> bool:
    return workers == (record.workers or record.spec.workers)


def _reached(record: JobRecord, workers: int) -> bool:
    held = sum(number for _, number in record.allocation)
    now = held // (record.spec.gpus_each or 1)
    return record.state == "running" and not record.resizing and now == workers


def _said(record: JobRecord, workers: int, told: str = "") -> str:
    id, so_many = record.spec.id, number_of(workers, "worker")
    if _reached(record, workers):
        return f"job {id} trains with {so_many}"
    if record.finished_s:
        return f"job {id} {STATE_SAID[record.state]}; it never had {so_many}"
    if record.state in WAITING_STATES:
        return f"job {id} {STATE_SAID[record.state]}; it starts with {so_many}"
    before = f"; {told}" if told else ""
    if record.resizing == "joining":
        return f"job {id} trains on; it has {so_many} once the new ones are ready{before}"
    if record.resizing:
        return f"job {id} trains on; it has {so_many} from one of its next iterations on"
    if record.planned:
        return f"job {id} saves and ends its processes, and starts with {so_many}{before}"
    if not _asked(record, workers):
        return f"job {id} trains on without; `slackwater events` says why it does not get {so_many}"
    return f"job {id} {told or f'trains on; it has {so_many} once so many fit on the nodes'}"
