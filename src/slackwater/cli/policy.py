"""`slackwater policy`: which policy gives GPUs to jobs, and another one from now on."""

from inspect import getdoc
from typing import Annotated, Any

import msgspec
import typer

from slackwater.cli.show import with_client
from slackwater.common.shell.client import Client
from slackwater.console import figures, tables
from slackwater.console.options import Json, Url
from slackwater.console.outcome import Usage, out, print_json
from slackwater.console.program import group
from slackwater.console.tables import Row
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo, SetPolicy

app = group("Show, list or set the policies that give GPUs to jobs.")

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING",
        help="An option of the policy, as limits=3600,7200; repeatable.",
    ),
]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A policy, as JSON shows it."""

    policy: str
    does: str
    options: dict[str, Any]
    """Name -> default."""


@app.command()
def show(url: Url = None, json: Json = False) -> None:
    """Show which policy gives GPUs to jobs, and how it fares."""
    _tell(with_client(url, lambda client: client.master("policy", GetPolicy(), PolicyInfo)), json)


@app.command("set")
def set_policy(
    policy: Annotated[str, typer.Argument(help="A name that `slackwater policy list` shows.")],
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


@app.command("list")
def list_policies(json: Json = False) -> None:
    """List the policies that a running cluster can give GPUs by, each with its options."""
    from slackwater.services.master.gpu_policy import live_policies  # They load numpy.
    from slackwater.services.master.scheduling.registry import POLICIES, options_of

    found = [
        Listed(policy=name, options=options_of(name), does=_first_line(POLICIES.find(name)))
        for name in live_policies()
    ]
    if json:
        print_json(found)
        return
    rows = [
        Row((each.policy, each.does), " ".join(f"{k}={v}" for k, v in each.options.items()))
        for each in found
    ]
    width = out.width if out.is_terminal else None
    tables.show(tables.lines(("POLICY", "IT DOES"), rows, width, note="OPTIONS"))


def _first_line(factory: object) -> str:
    return (getdoc(factory) or "").partition("\n")[0]


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
    if info.machines:
        rows["Machines"] = info.machines
    if info.reason:
        rows["Failed"] = info.reason
    for label, text in rows.items():
        out.print(f"{label + ':':<11}{text}", markup=False, highlight=False)
