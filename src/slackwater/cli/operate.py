"""What changes the jobs of a cluster: cancel, rerun, delete."""

import typer

from slackwater.cli import figures
from slackwater.cli.job_ids import JobId
from slackwater.cli.options import Json, Url
from slackwater.cli.outcome import FAILED, err, out, print_json
from slackwater.cli.show import with_client
from slackwater.common.client import Client
from slackwater.schemas.jobs import TERMINAL_STATES, JobRecord


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


def _ago(record: JobRecord, now_s: float) -> str:
    return f"{figures.lasted(now_s - record.finished_s)} ago"


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
