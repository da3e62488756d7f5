"""Identify this process as a worker of a job, by the program's arguments, else by the environment.

A program that is started without either trains alone, in its own process (local.py), and is told in
one line how to submit it. One whose environment is damaged ends with one line that names the
variable, and exit code 78: a traceback through this library would only hide that line.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from slackwater.common.base.errors import Rejected
from slackwater.common.bus.access import Access, Credentials
from slackwater.common.bus.relay import Ticket, find_ticket
from slackwater.schemas.workers import USELESS_TO_RESTART

JOB: Final = "SLACKWATER_JOB"
RANK: Final = "SLACKWATER_RANK"
WORKERS: Final = "SLACKWATER_WORKERS"
URL: Final = "SLACKWATER_URL"
RESULT: Final = "SLACKWATER_RESULT"
LAUNCHERS: Final = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Variables in which torchrun and Slurm's srun give the number of this process, and of all."""


class Identity(NamedTuple):
    job: str
    """The job's id; empty: no job, the program trains alone."""
    rank: int
    workers: int
    result_path: str | None
    """Where the worker service wants the result; None: it did not start this process."""


def identify(
    job: str | None, rank: int | None, workers: int | None, url: str | None = None
) -> Identity:
    """Find out which job and rank this is; arguments that are None are taken from the environment.
    Raises Rejected."""
    environment = os.environ
    found = job if job is not None else environment.get(JOB)
    own_rank, own_workers = rank_of(rank), workers_of(workers)
    if not 0 <= own_rank < own_workers:
        raise plainly(
            f"rank {own_rank} of {own_workers} workers; ranks count from 0. Where the program "
            f"gives none, {RANK} and {WORKERS} say it, else {_launchers()}"
        )
    if found is None:
        if own_workers > 1 or url is not None:
            what = f"{own_workers} workers" if own_workers > 1 else f"url={url}"
            raise plainly(
                f"{what}, but no job: give job=, or set {JOB}, the same for all its workers; "
                f"or start it with `slackwater submit -- {_command()}`"
            )
        return Identity("", 0, 1, None)
    started_by_us = environment.get(JOB) == found
    return Identity(
        found, own_rank, own_workers, environment.get(RESULT) if started_by_us else None
    )


def rank_of(given: int | None = None) -> int:
    """Return the rank that the program gave, else SLACKWATER_RANK, else the launcher's, else 0.
    Raises Rejected."""
    return _number(RANK, _launched(0), 0, given)


def workers_of(given: int | None = None) -> int:
    """Return the number of workers, found in the same way as `rank_of`, else 1."""
    return _number(WORKERS, _launched(1), 1, given)


def _launched(which: int) -> str | None:
    """Name the variable of the launcher that started this process; None: no launcher did, or the
    worker service."""
    environment = os.environ
    if RANK in environment or WORKERS in environment:
        return None
    return next((v[which] for v in LAUNCHERS if all(name in environment for name in v)), None)


def _number(variable: str, launcher: str | None, default: int, given: int | None) -> int:
    if given is not None:
        return int(given)
    name = launcher or variable
    said = os.environ.get(name)
    if said is None:
        return default
    try:
        return int(said)
    except ValueError:
        raise plainly(
            f"{name} is {said!r}: it must be a whole number; whoever starts the job's processes "
            "sets it, unset it where you start the program yourself"
        ) from None


def _launchers() -> str:
    return " or ".join(f"{rank} and {workers}" for rank, workers in LAUNCHERS)


def way(job: str, url: str | None, credentials: Credentials | None) -> Access | Ticket:
    """Return the way to the bus: the program's arguments count before the ticket of the worker
    service that started it for this job, and that before the rest of the environment. Raises
    Rejected."""
    environment: Mapping[str, str] = os.environ
    ticket = find_ticket(environment) if url is None and credentials is None else None
    if ticket is not None and ticket.hello.job == job:
        return ticket
    found = url if url is not None else environment.get(URL)
    if found is None:
        raise plainly(
            f"no cluster is named: give url=, or set {URL}; a program that "
            "`slackwater submit` starts needs neither for its own job"
        )
    return Access(found, credentials or Credentials.from_environment(environment))


def tell_how_to_submit() -> None:
    """Say in one line on stderr that this program trains alone."""
    sys.stderr.write(
        "slackwater: no job is named, so this process trains alone; to train on a cluster: "
        f"`slackwater submit -- {_command()}`\n"
    )


def _command() -> str:
    """Return the command that started the program, where that can be seen."""
    words = sys.argv if sys.argv and sys.argv[0].endswith(".py") else ["train.py"]
    return shlex.join(["python", *words])


def plainly(why: str) -> Rejected:
    """Make an error that, if nobody catches it, ends the program with this line, no traceback, and
    exit code 78."""
    error = Rejected(why)
    previous = sys.excepthook

    def say(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error:
            sys.stderr.write(f"slackwater: {raised}\n")
            raise SystemExit(USELESS_TO_RESTART)
        previous(kind, raised, trace)

    sys.excepthook = say
    return error


def write_result(path: Path, text: str) -> None:
    """Leave the rank's result whole or not at all. What is not a file, /dev/null for instance, is
    written to and never replaced: for root, a rename would put a file in the device's place."""
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)
