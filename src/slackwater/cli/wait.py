"""`slackwater wait`: until jobs are what a script needs them to be."""

from typing import Annotated

import typer

from slackwater.cli.job_ids import JobIds
from slackwater.cli.show import with_client
from slackwater.client import AsyncClient
from slackwater.client.waits import Waited, Wanted
from slackwater.console.options import Json, Url
from slackwater.console.outcome import FAILED, TRY_LATER, err, out, print_json
from slackwater.schemas.job_states import STATE_SAID


def wait(
    jobs: JobIds,
    wanted: Annotated[
        Wanted, typer.Option("--for", help="The state that all jobs must reach.")
    ] = "ended",
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait (0: without limit).")
    ] = 0.0,
    url: Url = None,
    json: Json = False,
) -> None:
    """Wait until jobs have reached a state.

    For example: `slackwater wait train-1 --for completed && python evaluate.py`.
    Exits with 0 once all have, with 75 when the time is over, and with 1
    as soon as one has ended in another state and can no longer reach it.
    A job that was started has reached `running`, though it may have ended.
    """

    async def waited(client: AsyncClient) -> list[Waited]:
        return await client.wait(*jobs, wanted=wanted, timeout_s=timeout)

    found = with_client(url, waited)
    if json:
        print_json(found)
    verdicts = {each.verdict for each in found}
    for each in found if not json else ():
        _say(each, wanted)
    if "never" in verdicts:
        raise typer.Exit(FAILED)
    if "waits" in verdicts:
        err.print(f"not reached within {timeout:g} s", markup=False)
        raise typer.Exit(TRY_LATER)


def _say(each: Waited, wanted: str) -> None:
    text = f"job {each.job} {STATE_SAID[each.state]}"
    if each.verdict == "never":
        text += f": it cannot become {wanted} any more"
    if each.reason and each.verdict != "reached":
        text += f" ({each.reason})"
    out.print(text, markup=False, highlight=False, soft_wrap=True)
