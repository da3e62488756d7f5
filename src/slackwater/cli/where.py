"""Which cluster a command talks to, and as whom: --url, else SLACKWATER_URL, NATS_URL, or the one
`slackwater up` left its address of; --user and the like, else the NATS CLI's variables."""

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from slackwater.common.bus.access import VARIABLES, Credentials
from slackwater.common.errors import Unavailable

_identity: ContextVar[Credentials | None] = ContextVar("identity", default=None)


def address_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "slackwater" / "url"


def remember(url: str) -> None:
    path = address_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(url)


def forget(url: str) -> None:
    """Only our own address: another `up` may have come since."""
    path = address_file()
    if path.is_file() and path.read_text() == url:
        path.unlink()


def resolve(url: str | None) -> str:
    """Raises Unavailable when no cluster is known."""
    found = url or os.environ.get("SLACKWATER_URL") or os.environ.get("NATS_URL")
    if not found and address_file().is_file():
        found = address_file().read_text().strip()
    if not found:
        raise Unavailable(
            "no cluster is known: start one with `slackwater up`, or give --url or SLACKWATER_URL"
        )
    return found


def identify(
    user: Annotated[str, typer.Option(envvar=VARIABLES["user"], help="Of the bus.")] = "",
    password: Annotated[
        str,
        typer.Option(envvar=VARIABLES["password"], help="Of that user; better in the variable."),
    ] = "",
    token: Annotated[str, typer.Option(envvar=VARIABLES["token"], help="Instead of a user.")] = "",
    creds: Annotated[str, typer.Option(envvar=VARIABLES["creds"], help="A .creds file.")] = "",
    nkey: Annotated[str, typer.Option(envvar=VARIABLES["nkey"], help="An nkey seed file.")] = "",
) -> None:
    """The options before a command: as whom it talks to the bus, as the NATS CLI names it."""
    _identity.set(Credentials(user=user, password=password, token=token, creds=creds, nkey=nkey))


def credentials() -> Credentials:
    """Those of the command that runs."""
    return _identity.get() or Credentials()
