"""The argument that names a job: what cannot be an id is refused, and a shell completes those that
the cluster has."""

import asyncio
import os
import re
from typing import Annotated, Final

import typer

from slackwater.console.usage import shown
from slackwater.schemas.base import AN_ID, ID_PATTERN

DEADLINE_S: Final = 1.0
"""Seconds that a shell's completion waits for a cluster: a longer wait feels like a hanging
terminal."""
JOBS_COMPLETED_MAX: Final = 100


def _checked(value: str | list[str]) -> str | list[str]:
    for word in [value] if isinstance(value, str) else value:
        if re.fullmatch(ID_PATTERN, word) is None:
            raise typer.BadParameter(f"JOB {shown(word)}: give {AN_ID}")
    return value


def known(incomplete: str) -> list[str]:
    """Ids of jobs that begin so; none where no cluster answers in time."""
    from slackwater.common.base.errors import SlackwaterError
    from slackwater.common.bus.access import Credentials
    from slackwater.common.shell.client import connect
    from slackwater.console.where import resolve

    async def ask() -> list[str]:
        async with asyncio.timeout(DEADLINE_S):
            credentials = Credentials.from_environment(os.environ)
            async with connect(resolve(None), "completion", credentials) as client:
                return [record.spec.id for record in await client.jobs()]

    try:
        found = asyncio.run(ask())
    except (SlackwaterError, TimeoutError):
        return []
    return [id for id in found if id.startswith(incomplete)][:JOBS_COMPLETED_MAX]


def _checked_if_given(value: str) -> str:
    if value:
        _checked(value)
    return value


_HELP: Final = "A job's id, as `slackwater jobs` lists it."
JobId = Annotated[
    str, typer.Argument(metavar="JOB", help=_HELP, callback=_checked, autocompletion=known)
]
JobIds = Annotated[
    list[str], typer.Argument(metavar="JOB", help=_HELP, callback=_checked, autocompletion=known)
]
MaybeJobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="A job's id; without one, everything in the cluster.",
        callback=_checked_if_given, autocompletion=known,
    ),
]  # fmt: skip
