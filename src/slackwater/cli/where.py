"""Which cluster a command talks to, and as whom: --url, else SLACKWATER_URL, NATS_URL, or the one
`slackwater up` left its address of; --user and the like, else the NATS CLI's variables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

import typer

from slackwater.cli import usage
from slackwater.common.bus.access import VARIABLES, Credentials, address_file, shown
from slackwater.common.errors import Unavailable
from slackwater.common.holding import Holding
from slackwater.common.private_files import write_private

_identity: ContextVar[Credentials | None] = ContextVar("identity", default=None)


@contextmanager
def remembered(url: str) -> Iterator[str]:
    """Commands of this account find the cluster at `url` without being told, as long as this
    lasts. Yields the pid of the process whose cluster they go on finding instead, or nothing."""
    path = address_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    holding = Holding(path.with_name("lock"))
    holder = holding.take()
    if holder:
        yield holder
        return
    try:
        write_private(path, url + "\n")
        yield ""
    finally:
        path.unlink(missing_ok=True)
        holding.release()


def resolve(url: str | None) -> str:
    """The URL with the token, if this account's `slackwater up` left one for it. Raises
    Unavailable when no cluster is known."""
    given = url or os.environ.get("SLACKWATER_URL") or os.environ.get("NATS_URL")
    known = address_file().read_text().strip() if address_file().is_file() else ""
    if given and given.rstrip("/") != shown(known):
        return given
    if not known:
        raise Unavailable(
            "no cluster is known: start one with `slackwater up`, or give --url or SLACKWATER_URL"
        )
    return known


def identify(
    user: Annotated[
        str, typer.Option(envvar=VARIABLES["user"], help="Talk to the bus as this user.")
    ] = "",
    password: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["password"],
            help="Give that user's password; others cannot see it in the variable.",
        ),
    ] = "",
    token: Annotated[
        str, typer.Option(envvar=VARIABLES["token"], help="Give a token instead of a user.")
    ] = "",
    creds: Annotated[
        str, typer.Option(envvar=VARIABLES["creds"], help="Use a .creds file of NATS.")
    ] = "",
    nkey: Annotated[
        str, typer.Option(envvar=VARIABLES["nkey"], help="Use an nkey seed file of NATS.")
    ] = "",
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=usage.version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options before a command: as whom it talks to the bus, as the NATS CLI names it."""
    _identity.set(Credentials(user=user, password=password, token=token, creds=creds, nkey=nkey))


def credentials() -> Credentials:
    """Those of the command that runs."""
    return _identity.get() or Credentials()
