"""Configuration files: TOML into one frozen struct per service, refused in one line when wrong.

An unknown key is an error that names the nearest known one: a misspelt limit that is silently
ignored is a limit that does not exist.
"""

import hmac
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from slackwater.common.base import fields
from slackwater.common.base.codec import unknown_key
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.private_files import write_private
from slackwater.common.bus.access import Credentials, Tls
from slackwater.common.transport.tls import TlsEnds
from slackwater.schemas.base import IdText

C = TypeVar("C", bound=msgspec.Struct)

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
DEFAULT_METRICS_ADDRESS: Final = "127.0.0.1"


class ServiceConfig(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of every service's configuration; each service adds its own."""

    id: IdText
    """The instance's id: a token of its subjects, unique among its kind."""
    url: str = DEFAULT_URL
    """The bus: one server, or several with commas between them; `tls://` for encrypted ones."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    """Servers of the bus that keep each record; 3 of a cluster of three lose nothing with one."""
    state_dir: str = ""
    """A folder of this instance's own for files and sockets; empty: it needs none."""
    metrics_port: Annotated[int, msgspec.Meta(ge=-1, le=65_535)] = 0
    """Prometheus metrics on this port; 0: none, -1: any free port (it is logged)."""
    metrics_address: str = DEFAULT_METRICS_ADDRESS
    """Address on this machine where that port listens; loopback: for this machine alone."""
    credentials: Credentials = Credentials()
    """The user of the bus: `user` and `password`, or `token`, or `creds`, or `nkey`."""
    tls: Tls = Tls()
    """Files in PEM for an encrypted bus: `ca`; where it asks for one, `certificate` and `key`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log what is at least so important."""

    def faults(self) -> list[str]:
        """Find combinations of valid keys that do not fit together, as sentences with the
        remedy."""
        return []


class SharedSecret(ServiceConfig, kw_only=True, frozen=True):
    """The configuration of services that peers on other hosts connect to."""

    cluster_token: str = ""
    """The secret that such peers show. Required where other hosts can connect."""
    cluster_token_also: str = ""
    """Another one that is let in: the next or the former one while the token is changed."""

    @property
    def cluster_tokens(self) -> tuple[str, ...]:
        """Return all that are let in."""
        also = (self.cluster_token_also,) if self.cluster_token_also else ()
        return (self.cluster_token, *also)

    def tls_ends(self) -> TlsEnds | None:
        """Return by which certificates it meets peers on other hosts. Raises ConfigRejected."""
        return self.tls.ends() if self.tls else None

    def tls_faults(self, address: str) -> list[str]:
        """Say why it cannot listen over tls at this address; empty: nowhere."""
        if address and not self.tls.certificate:
            return ["tls_address needs this host's `certificate` and `key` in [tls]"]
        return []


def is_one_of(shown: str, tokens: tuple[str, ...]) -> bool:
    """Compare a token with those that are let in, in a time that says nothing about them."""
    return any([hmac.compare_digest(shown.encode(), each.encode()) for each in tokens])


def load_config(path: Path | str, kind: type[C]) -> C:
    """Raises ConfigRejected: no file, no TOML, an unknown key, a value that cannot be."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigRejected(f"{path}: {error.strerror}; is the path right?") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigRejected(f"{path}: not TOML: {error}") from error
    return parse_config(data, kind, str(path))


def parse_config(data: Mapping[str, Any], kind: type[C], source: str) -> C:
    """`source` names where the data are from, for the error."""
    _check_keys(data, kind, source, "")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigRejected(f"{source}: {explained(str(error), data, kind)}") from error


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """The file that `load_config` reads back, its owner's alone: it may hold a token. Fields that
    are None are left out."""
    plain: list[str] = []
    tables: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows = [f"{toml(k)} = {toml(v)}" for k, v in value.items() if v is not None]
            tables.append("\n".join(["", f"[{toml(key)}]", *rows]))
        elif value is not None:
            plain.append(f"{toml(key)} = {toml(value)}")
    write_private(path, "\n".join([*plain, *tables]) + "\n")


def toml(value: Any) -> str:
    """JSON's strings, numbers, booleans and arrays are TOML's too (DEL must be escaped)."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, Mapping):
        rows = ", ".join(f"{toml(k)} = {toml(v)}" for k, v in value.items() if v is not None)
        return f"{{ {rows} }}" if rows else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_keys(data: Mapping[str, Any], kind: type[msgspec.Struct], source: str, at: str) -> None:
    known = fields.fields_of(kind)
    for key, value in data.items():
        if key not in known:
            raise ConfigRejected(f"{source}: {unknown_key(at, key, known)}")
        inner = known[key].type
        if isinstance(inner, msgspec.inspect.StructType) and isinstance(value, Mapping):
            _check_keys(value, inner.cls, source, f"{at}{key}.")


def explained(text: str, data: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """msgspec's message about `data` with the field's name, the value that is there, and what to
    give instead."""
    found = re.search(r"^(.*) - at `\$\.?(.*)`$", text)
    if missing := re.search(r"missing required field `(.*?)`", text):
        return f"key {found[2] + '.' if found else ''}{missing[1]} is missing; add it"
    if found is None:
        return text[:1].lower() + text[1:]
    path = re.findall(r"[^.\[\]]+", found[2])
    value: Any = data
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, (list, tuple)) and part.isdigit():
            value = value[int(part)]
    expected = fields.type_at(kind, path)
    if expected is None or "contains unknown" in found[1]:
        why = f"{found[1][:1].lower()}{found[1][1:]}"
    else:
        why = f"give {fields.wanted(expected)}"
    return f"{found[2]} = {fields.shown(value)}: {why}"
