"""The users of a bus with accounts, as its servers' configuration names them.

A user is known by a password, or by an nkey: then the servers hold the public key alone, and the
seed never leaves the user's host. What each may do is in schemas/permissions.py.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slackwater.common.bus.access import public_key
from slackwater.schemas.permissions import (
    SERVICES,
    Grants,
    Service,
    of_operator,
    of_owner,
    of_service,
    of_tenant,
)
from slackwater.schemas.subjects import inbox_prefix

OWNER: Final = "owner"
OPERATOR: Final = "operator"
BUS_WATCH: Final = "bus-nats"
"""Says what the server of an embedded cluster cannot write."""
TENANT: Final = "tenant-"
_ANSWER_S: Final = 120
"""Seconds in which a service may publish its one answer to a request's inbox."""


@dataclass(frozen=True, slots=True)
class BusUser:
    """One user: with `password`, or with `nkey`, the public key."""

    name: str
    password: str = ""
    nkey: str = ""

    @classmethod
    def of_seed(cls, name: str, seed_file: Path) -> "BusUser":
        """Make the user who has the nkey seed in a file. Raises ConfigRejected."""
        return cls(name, nkey=public_key(seed_file))

    @property
    def serves(self) -> bool:
        """Say whether it answers requests."""
        return self.name == OWNER or _service_of(self.name) is not None

    def grants(self) -> Grants:
        """Return what it may do: its name says as what it acts. Raises ValueError."""
        found = _service_of(self.name)
        if found is not None:
            return of_service(*found)
        if self.name == OWNER:
            return of_owner()
        if self.name == OPERATOR or self.name.startswith(f"{OPERATOR}-"):
            return of_operator()
        if self.name.startswith(TENANT):
            return of_tenant(self.name.removeprefix(TENANT))
        raise ValueError(
            f"user {self.name!r}: a name is SERVICE-ID (services: {', '.join(SERVICES)}), "
            f"{OPERATOR}, {OPERATOR}-NAME or {TENANT}NAME"
        )


def _service_of(name: str) -> tuple[Service, str] | None:
    for service in SERVICES:
        if name.startswith(f"{service}-") and len(name) > len(service) + 1:
            return service, name.removeprefix(f"{service}-")
    return None


def new_seed() -> str:
    """Make the seed of an nkey of a user."""
    import nkeys

    return bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)).decode()


def derived_password(secret: str, user: str) -> str:
    """Make the password of a user of a cluster that keeps one secret."""
    return hmac.new(secret.encode(), user.encode(), hashlib.sha256).hexdigest()


def users_of(secret: str, names: Iterable[str]) -> list[BusUser]:
    """Make users with passwords that are derived from one secret."""
    return [BusUser(name, password=derived_password(secret, name)) for name in names]


def authorization(users: Sequence[BusUser]) -> str:
    """Return the block of a nats-server's configuration that lets these users in, and nobody
    else."""
    entries = ",\n".join(f"    {_entry(user)}" for user in users)
    return f"authorization {{\n  users = [\n{entries}\n  ]\n}}\n"


def _entry(user: BusUser) -> str:
    grants = user.grants()
    listen = (*grants.listen, f"{inbox_prefix(user.nkey or user.name)}.>")
    who = f"nkey: {user.nkey}" if user.nkey else (
        f"user: {json.dumps(user.name)}, password: {json.dumps(user.password)}"
    )  # fmt: skip
    answers = f', allow_responses: {{ max: 1, expires: "{_ANSWER_S}s" }}' if user.serves else ""
    return (
        f"{{ {who}, permissions: {{ publish: {{ allow: {_listed(grants.publish)} }}, "
        f"subscribe: {{ allow: {_listed(listen)} }}{answers} }} }}"
    )


def _listed(patterns: Iterable[str]) -> str:
    return json.dumps(list(dict.fromkeys(patterns)))
