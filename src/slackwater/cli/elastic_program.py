"""`slackwater launch` of an elastic program: a job whose workers are its hosts."""

import re
import shlex
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import typer

from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.console.names import stem_of
from slackwater.console.outcome import Usage
from slackwater.console.usage import shown
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec

HOSTS: Final = (2, 8)
"""The number of hosts that a program begins with, and the most that it may have."""
RESTARTS: Final = 100
GRACE_S: Final = 30.0
"""Seconds that a host has to give its executors away."""

Hosts = Annotated[
    str,
    typer.Option(
        metavar="N:MAX",
        help="Hosts that an elastic program begins with, and the most that it may be scaled to.",
        show_default=f"{HOSTS[0]}:{HOSTS[1]}",
    ),
]
ChooseHosts = Annotated[
    bool,
    typer.Option(
        "--choose-hosts",
        help="Let an elastic program measure its tasks and transfers, and use as many hosts, up to "
        "MAX, as shorten an iteration most.",
    ),
]


Recover = Annotated[
    Literal["partial", "rollback"],
    typer.Option(
        help="Where an aggregator's memory is lost, partial: what was there comes from the newest "
        "copy, and training goes on; rollback: the elastic program, which is saved whole in "
        "--save-to, goes back to that.",
    ),
]


def program_of(words: list[str], hosts: str) -> tuple[str, ...] | None:
    """Return the command of an elastic program, where one is named. Raises Usage."""
    if len(words) != 1 or not words[0].endswith(".py"):
        return None
    if not Path(words[0]).is_file():
        raise Usage(f"{shown(words[0])} is not a file: name the program, for example app.py")
    text = Path(words[0]).read_text(errors="replace")
    if "elastic" not in text:
        raise Usage(
            f"{shown(words[0])} is not an elastic program, it does not import slackwater.elastic: "
            f"a command comes after --: slackwater launch -- {shlex.join(['python', words[0]])}"
        )
    try:
        compile(text, words[0], "exec")
    except SyntaxError as error:  # It would be started again and again: it never comes to us.
        raise Usage(f"{shown(words[0])}, line {error.lineno}: {error.msg}") from error
    bounds(hosts)
    return "python", words[0]


def bounds(hosts: str) -> tuple[int, int]:
    """Parse --hosts. Raises Usage."""
    if not hosts:
        return HOSTS
    match = re.fullmatch(r"(\d+)(?::(\d+))?", hosts)
    first = int(match[1]) if match else 0
    most = int(match[2] or max(first, HOSTS[1])) if match else 0
    if not 1 <= first <= most <= WORKERS_MAX:
        raise Usage(
            f"--hosts {shown(hosts)}: give the number to begin with, and the most, for example "
            f"2:8; at most {WORKERS_MAX}"
        )
    return first, most


async def named_after_its_file(client: Client, spec: JobSpec) -> JobSpec:
    """Number the id where a job that has ended, or another program's, has it. A job of the same
    program that has not ended keeps it: that one is meant."""
    for number in count(1):
        id = spec.id if number == 1 else f"{spec.id}-{number}"
        try:
            known = await client.job(id)
        except Rejected:  # There is none.
            return msgspec.structs.replace(spec, id=id)
        same = (known.spec.program, known.spec.folder) == (spec.program, spec.folder)
        if same and known.state not in TERMINAL_STATES:
            return known.spec
    raise AssertionError("numbers have no end")


def elastic_fields(options: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Return a job's fields that an elastic program has; `env`: what it was given. Raises Usage."""
    if options["workers"] or options["gpus"]:
        raise Usage("--workers, --gpus: an elastic program has --hosts; give that")
    first, most = bounds(options["hosts"])
    if options["memory"]:  # Else memory of arrays that are put aside is kept for the next ones.
        env = {"MALLOC_MMAP_THRESHOLD_": "131072", **env}
    if options["choose_hosts"] and most == 1:
        raise Usage(f"--choose-hosts: --hosts {options['hosts']} leaves no choice; give more")
    if options["recover"] == "rollback" and options["save_to"] is None:
        raise Usage("--recover rollback: the program goes back to what is saved: add --save-to")
    return {
        "env": env,
        "recover": options["recover"],
        "choose_hosts": options["choose_hosts"],
        "id": options["id"] or stem_of(options["words"][0]),
        "workers": first,
        "workers_min": 1,
        "workers_max": most,
        "consistency": "asynchronous",
        "restarts": options["restarts"] or RESTARTS,
        "grace_s": GRACE_S,
    }
