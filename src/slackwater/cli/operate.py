"""Commands that change the jobs of a cluster: cancel, rerun, delete."""

from typing import Annotated

import msgspec
import typer

from slackwater.cli.job_ids import JobId, JobIds
from slackwater.cli.show import with_client
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.shell.client import Client
from slackwater.console import figures
from slackwater.console.names import said
from slackwater.console.options import Json, Url
from slackwater.console.outcome import FAILED, err, exit_code, out, print_json, reported
from slackwater.console.usage import an_id
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord


def cancel(id: JobId, url: Url = None, json: Json = False) -> None:
    """Cancel a job: its processes end, its tensors are dropped.

    Exits with 1 where the job has completed or failed before.
    """

    async def ended(client: Client) -> tuple[JobRecord, JobRecord, float]:
        before = await client.job(id)
        if before.state not in TERMINAL_STATES:
            await client.cancel(id)
        return before, await client.job(id), client.clock.now_s()

    before, after, now_s = with_client(url, ended)
    cancelled = after.state == "cancelled"
    if json:
        changed = cancelled and before.state not in TERMINAL_STATES
        print_json({"job": id, "cancelled": changed, "state": after.state})
    elif cancelled and before.state == "cancelled":
        _say(f"job {id} was cancelled {_ago(after, now_s)}")
    elif cancelled:
        _say(f"job {id} is cancelled")
    else:
        err.print(f"job {id} {after.state} {_ago(after, now_s)}; nothing to cancel", markup=False)
    if not cancelled:
        raise typer.Exit(FAILED)


def rerun(
    id: JobId,
    new: Annotated[
        str, typer.Option("--id", help="Run a copy under this id; the job itself stays.")
    ] = "",
    url: Url = None,
    json: Json = False,
) -> None:
    """Run an ended job again as it was submitted, under its id or another one."""

    async def again(client: Client) -> tuple[JobRecord, str]:
        if new:
            spec = msgspec.structs.replace((await client.job(id)).spec, id=new)
            known = await client.submit(spec)
            return await client.job(new), said(spec, known)
        patient = client.patient()
        record = await patient.run_again(id)
        return record, f"job {id} runs again: this is its run {record.run + 1}"

    with reported():
        if new:
            an_id("--id", new)
    record, text = with_client(url, again)
    if json:
        print_json(record)
    else:
        _say(text)


def delete(
    ids: JobIds,
    force: Annotated[
        bool, typer.Option("--force", help="First cancel jobs that have not ended.")
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Forget jobs that ended: they are not listed any more, and their ids are free."""

    async def gone(client: Client) -> list[tuple[str, SlackwaterError | None]]:
        return [(id, await _deleted(client, id, force)) for id in dict.fromkeys(ids)]

    found = with_client(url, gone)
    if json:
        print_json([{"job": id, "deleted": error is None} for id, error in found])
    for id, error in found:
        if error is not None:
            err.print(f"error: {error}", markup=False)
        elif not json:
            _say(f"job {id} is deleted")
    worst = next((error for _, error in found if error is not None), None)
    if worst is not None:
        raise typer.Exit(exit_code(worst))


async def _deleted(client: Client, id: str, force: bool) -> SlackwaterError | None:
    """Delete a job; say why it was not deleted, so that the others are deleted nevertheless."""
    try:
        if force:
            await client.cancel(id)
        await client.delete(id)
    except SlackwaterError as error:
        return error
    return None


def _ago(record: JobRecord, now_s: float) -> str:
    return f"{figures.lasted(now_s - record.finished_s)} ago"


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
