"""The accounts of jobs: a range of user ids that nothing else on the machine uses."""

from pathlib import Path
from typing import Annotated

import msgspec

from slackwater.common.base.errors import ConfigRejected

LOWEST = 1000
"""Lower ids are the system's own."""
AccountRange = Annotated[str, msgspec.Meta(pattern=r"^([0-9]{1,9}-[0-9]{1,9})?\Z")]


def account_ids(text: str) -> range:
    """Read `60000-60999`; empty: there are none. Raises ConfigRejected."""
    if not text:
        return range(0)
    first, last = (int(number) for number in text.split("-"))
    if not LOWEST <= first <= last:
        raise ConfigRejected(
            f"accounts {text!r}: give FIRST-LAST, both at least {LOWEST} and not descending, of "
            "user ids that nobody else has, for example 60000-60999"
        )
    return range(first, last + 1)


def check_passable(field: str, folder: Path) -> None:
    """Raises ConfigRejected, naming the field, where other accounts cannot pass through `folder`
    and those above it."""
    for each in (folder.absolute(), *folder.absolute().parents):
        if not each.stat().st_mode & 0o001:
            raise ConfigRejected(
                f"{field}: jobs' accounts cannot pass through {each} to what is theirs in "
                f"{folder}: `chmod o+x {each}`, or choose another folder"
            )
