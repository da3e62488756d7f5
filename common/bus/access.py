"""Credentials for the bus: one set for services, commands, and Agents that are started by hand.

Named as the NATS CLI names them: a service has them in its configuration (`[credentials]`), a
command as options, and everybody else in the environment. Programs of jobs have none (relay.py).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slackwater.common.base.errors import ConfigRejected

VARIABLES = {
    "user": "NATS_USER",
    "password": "NATS_PASSWORD",
    "token": "NATS_TOKEN",
    "creds": "NATS_CREDS",
    "nkey": "NATS_NKEY",
}
DEFAULT_CLUSTER = "default"
"""The name of a cluster that is given none."""
_FILES = ("creds", "nkey")
_CARRIED = re.compile(r"//[^/@]*@")


class Credentials(msgspec.Struct, kw_only=True, frozen=True):
    """One of: user and password, a token, a .creds file, an nkey seed file; none of it: nobody."""

    user: str = ""
    """The user's name; with `password`."""
    password: str = ""
    """The password of that user."""
    token: str = ""
    """A token, instead of a user."""
    creds: str = ""
    """A .creds file (JWT and seed)."""
    nkey: str = ""
    """A file that holds an nkey seed."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Credentials":
        return cls(**{name: environment.get(of, "") for name, of in VARIABLES.items()})

    def options(self) -> dict[str, Any]:
        """Return the credentials as the client library takes them. Raises ConfigRejected when they
        cannot be used."""
        self._check()
        named = {
            "user": self.user,
            "password": self.password,
            "token": self.token,
            "user_credentials": self.creds,
            "nkeys_seed": self.nkey,
        }
        return {name: value for name, value in named.items() if value}

    def _check(self) -> None:
        if bool(self.user) != bool(self.password):
            given, missing = ("user", "password") if self.user else ("password", "user")
            raise ConfigRejected(
                f"credentials: {_named(given)} is given without {_named(missing)}; give both"
            )
        ways = [name for name in ("user", "token", *_FILES) if getattr(self, name)]
        if len(ways) > 1:
            both = " and ".join(map(_named, ways))
            raise ConfigRejected(f"credentials: {both} are given; one of them is enough")
        for name in _FILES:
            path = getattr(self, name)
            if path and not os.access(path, os.R_OK):
                what = "be read" if os.path.exists(path) else "be found"
                raise ConfigRejected(
                    f"credentials: {_named(name)} = {path!r} cannot {what}; correct the path"
                )

    def __str__(self) -> str:
        """Name the user, without a secret."""
        if self.user:
            return f"user {self.user!r} with this password"
        if self.token:
            return "this token"
        name = next((name for name in _FILES if getattr(self, name)), "")
        return f"the identity in {getattr(self, name)}" if name else "a client without credentials"


@dataclass(frozen=True, slots=True)
class Access:
    """Where the bus is, and as whom it is used."""

    url: str
    credentials: Credentials = Credentials()  # noqa: RUF009 (frozen)

    def __str__(self) -> str:
        return shown(self.url)


def clusters_folder() -> Path:
    """Return this account's folder with one subfolder for each cluster that `slackwater up` starts,
    by its name."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "slackwater" / "clusters"


def address_file(name: str = DEFAULT_CLUSTER) -> Path:
    """Where `slackwater up` leaves the address of its cluster, token and all, for this account's
    commands."""
    return clusters_folder() / name / "url"


def shown(url: str) -> str:
    """The URL without a password or token that it may carry, for messages and reports."""
    return _CARRIED.sub("//", url)


def carries_identity(url: str) -> bool:
    """Say whether the URL says itself as whom the bus is used: that counts then, and nothing
    else."""
    return _CARRIED.search(url) is not None


def _named(name: str) -> str:
    return f"{name} ({VARIABLES[name]})"
