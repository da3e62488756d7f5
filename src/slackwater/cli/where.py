"""Which cluster a command talks to: --url, else SLACKWATER_URL, else the one `slackwater up` left
its address of."""

import os
from pathlib import Path

from slackwater.common.errors import Unavailable


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
    found = url or os.environ.get("SLACKWATER_URL")
    if not found and address_file().is_file():
        found = address_file().read_text().strip()
    if not found:
        raise Unavailable(
            "no cluster is known: start one with `slackwater up`, or give --url or SLACKWATER_URL"
        )
    return found
