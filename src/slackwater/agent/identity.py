"""Which worker of which job this process is: what the program gives, else the environment.

A program that is started without either is told in one line how to start it. So is one whose
environment is damaged: a traceback through this library would only hide that line.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Final, NamedTuple

from slackwater.common.bus.access import Access, Credentials
from slackwater.common.errors import Rejected

JOB: Final = "SLACKWATER_JOB"
RANK: Final = "SLACKWATER_RANK"
WORKERS: Final = "SLACKWATER_WORKERS"
URL: Final = "SLACKWATER_URL"
RESULT: Final = "SLACKWATER_RESULT"


class Identity(NamedTuple):
    job: str
    rank: int
    workers: int
    result_path: str | None
    """Where the worker service wants the result; None: it did not start this process."""


def identify(job: str | None, rank: int | None, workers: int | None) -> Identity:
    """What is None is taken from the environment. Raises Rejected."""
    environment = os.environ
    found = job if job is not None else environment.get(JOB)
    if found is None:
        raise plainly(
            f"this process is not a worker of a job: {JOB} is not set. Start it with "
            f"`slackwater submit --id NAME -- {_command()}`; or start each worker yourself, and "
            "give job=, rank=, workers= and url="
        )
    own_rank = number(RANK, 0, rank)
    own_workers = number(WORKERS, 1, workers)
    if not 0 <= own_rank < own_workers:
        raise Rejected(f"rank {own_rank} of {own_workers} workers; ranks count from 0")
    started_by_us = environment.get(JOB) == found
    return Identity(
        found, own_rank, own_workers, environment.get(RESULT) if started_by_us else None
    )


def number(variable: str, default: int, given: int | None = None) -> int:
    """What the program gave, else the variable, else the default. Raises Rejected."""
    said = given if given is not None else os.environ.get(variable, default)
    try:
        return int(said)
    except ValueError:
        raise plainly(
            f"{variable} is {said!r}: it must be a whole number; the worker service sets it, "
            "unset it where you start the program yourself"
        ) from None


def access(url: str | None, credentials: Credentials | None) -> Access:
    """What the program gives counts before the environment. Raises Rejected."""
    environment: Mapping[str, str] = os.environ
    found = url if url is not None else environment.get(URL)
    if found is None:
        raise plainly(
            f"no cluster is named: give url=, or set {URL}; `slackwater submit` sets it for the "
            "programs that it starts"
        )
    return Access(found, credentials or Credentials.from_environment(environment))


def _command() -> str:
    """As the program was started, where that can be seen."""
    words = sys.argv if sys.argv and sys.argv[0].endswith(".py") else ["train.py"]
    return shlex.join(["python", *words])


def plainly(why: str) -> Rejected:
    """An error that, if nobody catches it, ends the program with this line and no traceback."""
    error = Rejected(why)
    previous = sys.excepthook

    def say(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error:
            sys.stderr.write(f"slackwater: {raised}\n")
        else:
            previous(kind, raised, trace)

    sys.excepthook = say
    return error
