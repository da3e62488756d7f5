"""Contexts: clusters that a person works with, by name, each with its address and credentials.

They lie in one file of the account, readable by it alone, as the NATS CLI and kubectl keep theirs.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.base.private_files import private_folder, write_private
from slackwater.common.bus.access import Identity, Tls
from slackwater.schemas.base import ID_PATTERN

LOCAL: Final = "local"
"""Stands for the clusters that `slackwater up` starts on this machine."""
VARIABLE: Final = "SLACKWATER_CONTEXT"
_ELSEWHERE: Final = ("SLACKWATER_URL", "SLACKWATER_CLUSTER")


class Context(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A cluster's address, and the user there. Files are named by their absolute paths."""

    url: str
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    description: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(
            user=self.user, password=self.password, token=self.token, creds=self.creds,
            nkey=self.nkey, tls=Tls(ca=self.ca, certificate=self.certificate, key=self.key),
        )  # fmt: skip


class Contexts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All contexts of an account. `selected`: the one in use; empty: none."""

    selected: str = ""
    contexts: dict[str, Context] = {}

    def find(self, name: str) -> Context:
        """Raises Rejected."""
        if name not in self.contexts:
            those = f"those are: {', '.join(self.contexts)}" if self.contexts else "there is none"
            raise Rejected(
                f"no context {name!r}; {those}; `slackwater context add {name} --url URL` makes it"
            )
        return self.contexts[name]


def file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "slackwater" / "contexts.json"


def read() -> Contexts:
    """Raises ConfigRejected where the file cannot be used."""
    path = file()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigRejected(f"{path}: {error}; mend it, or remove it") from error


def write(contexts: Contexts) -> None:
    path = file()
    private_folder(path.parent)
    text = msgspec.json.format(msgspec.json.encode(contexts), indent=2).decode()
    write_private(path, text + "\n")


def check_name(name: str) -> None:
    """Raises Rejected."""
    if re.fullmatch(ID_PATTERN, name) is None or name == LOCAL:
        raise Rejected(
            f"context {name!r}: choose a name of letters, digits and -, beginning with a letter or "
            f"digit, other than {LOCAL!r}"
        )


def chosen(name: str, environment: Mapping[str, str]) -> Context | None:
    """Return the context named, else that of SLACKWATER_CONTEXT, else the selected one unless the
    environment names a cluster otherwise. None: no context is in use. Raises Rejected,
    ConfigRejected."""
    name = name or environment.get(VARIABLE, "")
    if not name:
        if any(environment.get(each) for each in _ELSEWHERE):
            return None
        name = read().selected
    return read().find(name) if name and name != LOCAL else None
