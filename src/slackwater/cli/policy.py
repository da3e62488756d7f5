"""`slackwater policy`: which policy gives GPUs to jobs, and another one from now on."""

from typing import Annotated

import typer

from slackwater.cli.show import with_client
from slackwater.common.shell.client import Client
from slackwater.console import figures
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, out, print_json
from slackwater.console.program import group
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo, SetPolicy

app = group("Show or set the policy that gives GPUs to jobs.")

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING",
        help="An option of the policy, as limits=3600,7200; repeatable.",
    ),
]


@app.command()
def show(url: Url = None, json: Json = False) -> None:
    """Show which policy gives GPUs to jobs, and how it fares."""
    _tell(with_client(url, lambda client: client.master("policy", GetPolicy(), PolicyInfo)), json)


@app.command("set")
def set_policy(
    policy: Annotated[str, typer.Argument(help="For example fifo, sf, tiresias-las or pollux.")],
    settings: Settings = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Give GPUs by another policy from now on, also after a restart of the master.

    Jobs that hold GPUs keep them until the new policy decides otherwise.
    """
    asked = SetPolicy(policy=policy, settings=parsed(settings))

    async def send(client: Client) -> PolicyInfo:
        return await client.master("set-policy", asked, PolicyInfo)

    _tell(with_client(url, send), json)


def parsed(settings: list[str] | None) -> dict[str, str]:
    """Split NAME=VALUE. Raises Usage."""
    found = {}
    for each in settings or ():
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise Usage(f"--set {each!r}: write NAME=VALUE, as in --set limits=3600,7200")
        found[key] = value
    return found


def _tell(info: PolicyInfo, json: bool) -> None:
    if json:
        print_json(info)
        return
    chosen = "".join(f" {key}={value}" for key, value in sorted(info.settings.items()))
    since = f"set {figures.at(info.set_s)}" if info.chosen else "by the master's configuration"
    rows = {
        "Policy": f"{info.policy}{chosen} ({since})",
        "GPUs": f"{info.gpus_used} of {info.gpus} held",
        "Jobs": f"{info.running} running, {info.waiting} waiting",
        "Decisions": f"{info.decisions}, {info.failures} failed",
    }
    if info.reason:
        rows["Failed"] = info.reason
    for label, text in rows.items():
        out.print(f"{label + ':':<11}{text}", markup=False, highlight=False)
