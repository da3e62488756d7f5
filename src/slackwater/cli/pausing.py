"""Commands that keep jobs from running, and let them go on: pause, resume, hold, release."""

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from slackwater.cli.job_ids import JobIds
from slackwater.cli.show import with_client
from slackwater.client.waits import until
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.shell.client import Client
from slackwater.console.options import Json, Url
from slackwater.console.outcome import TRY_LATER, err, exit_code, out, print_json
from slackwater.schemas.job_states import STATE_SAID, WAITING_STATES, JobState
from slackwater.schemas.jobs import JobRecord

Change = Callable[[Client, str], Awaitable[JobRecord]]
Said = Callable[[JobRecord, bool], str]


class Changed(msgspec.Struct, frozen=True):
    """Say what became of one job: its state, whether it is held, and whether that is new."""

    job: str
    state: JobState | None
    held: bool
    changed: bool
    error: str = ""


def pause(
    ids: JobIds,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once no process of them is left.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that --wait waits (0: without limit).")
    ] = 0.0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Pause jobs: they save, end their processes and give up their GPUs or slots.

    They stay paused until `slackwater resume`. A job that does not run yet is held back.
    Exits with 75 if --wait's time is over before they have stopped.
    """

    _change(ids, lambda client, id: client.pause(id), _paused, url, json, timeout if wait else None)


def resume(ids: JobIds, url: Url = None, json: Json = False) -> None:
    """Let paused jobs go on where they were, as soon as the policy gives them room."""
    _change(ids, lambda client, id: client.resume(id), _resumed, url, json)


def hold(ids: JobIds, url: Url = None, json: Json = False) -> None:
    """Hold back jobs that do not run yet, until `slackwater release`."""
    _change(ids, lambda client, id: client.pause(id, waiting=True), _paused, url, json)


def release(ids: JobIds, url: Url = None, json: Json = False) -> None:
    """Let jobs start that were held back, as soon as the policy gives them room."""
    _change(ids, lambda client, id: client.resume(id), _resumed, url, json)


def _change(
    ids: list[str],
    change: Change,
    said: Said,
    url: str | None,
    json: bool,
    wait_s: float | None = None,
) -> None:
    """Change each job, also where another one was refused; exit as the last refusal says.

    `wait_s`: wait so long until those that are stopping have stopped; 0: without limit.
    """

    async def all_of(client: Client) -> list[tuple[Changed, str, SlackwaterError | None]]:
        found = [await _one(client, id, change, said) for id in dict.fromkeys(ids)]
        stopping = [one.job for one, _, _ in found if one.state == "stopping"]
        if wait_s is None or not stopping:
            return found
        for one, text, _ in found if not json else ():
            if one.job in stopping:
                _say(text)
        states = {each.job: each.state for each in await until(client, stopping, "paused", wait_s)}
        return [
            (replace(one, state=states[one.job]), _stopped(one.job, states[one.job]), error)
            if one.job in states
            else (one, text, error)
            for one, text, error in found
        ]

    found = with_client(url, all_of)
    if json:
        print_json([changed for changed, _, _ in found])
    for _, text, error in found:
        if error is not None:
            err.print(f"error: {error}", markup=False)
        elif not json:
            _say(text)
    refused = next((error for _, _, error in found if error is not None), None)
    if refused is not None:
        raise typer.Exit(exit_code(refused))
    if wait_s is not None and any(changed.state == "stopping" for changed, _, _ in found):
        raise typer.Exit(TRY_LATER)


def _stopped(id: str, state: JobState) -> str:
    if state == "stopping":
        return f"job {id} still saves and ends its processes"
    return f"job {id} {STATE_SAID[state]}"


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


async def _one(
    client: Client, id: str, change: Change, said: Said
) -> tuple[Changed, str, SlackwaterError | None]:
    try:
        before = await client.job(id)
        after = await change(client, id)
    except SlackwaterError as error:
        return Changed(id, None, False, False, str(error)), "", error
    changed = before.held != after.held
    return Changed(id, after.state, after.held, changed), said(after, changed), None


def _paused(record: JobRecord, changed: bool) -> str:
    id = record.spec.id
    if not changed:
        return f"job {id} {STATE_SAID[record.state]}, and was kept from running before"
    if record.state == "pending":
        return f"job {id} is held back; `slackwater release {id}` lets it start"
    then = f"stays paused until `slackwater resume {id}`"
    if record.state in WAITING_STATES:
        return f"job {id} {then}"
    return f"job {id} saves and ends its processes; then it {then}"


def _resumed(record: JobRecord, changed: bool) -> str:
    id = record.spec.id
    if not changed:
        return f"job {id} {STATE_SAID[record.state]}, and nobody keeps it from running"
    return (
        f"job {id} goes on as soon as there is room; `slackwater job {id}` says what it waits for"
    )
