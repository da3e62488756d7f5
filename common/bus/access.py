"""The bus's address, as whom it is used, and which servers to trust: for services, commands, and
Agents that are started by hand.

Named as the NATS CLI names them: a service has them in its configuration (`[credentials]` and
`[tls]`), a command as options, and everybody else in the environment. Programs of jobs have none
(relay.py).
"""

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.transport.tls import TlsEnds
from slackwater.schemas.subjects import inbox_prefix

VARIABLES = {
    "user": "NATS_USER",
    "password": "NATS_PASSWORD",
    "token": "NATS_TOKEN",
    "creds": "NATS_CREDS",
    "nkey": "NATS_NKEY",
    "ca": "NATS_CA",
    "certificate": "NATS_CERT",
    "key": "NATS_KEY",
}
DEFAULT_CLUSTER = "default"
"""The name of a cluster that is given none."""
_FILES = ("creds", "nkey")
_CARRIED = re.compile(r"//[^/@]*@")
_SCHEMES = ("nats", "tls")


class Tls(msgspec.Struct, kw_only=True, frozen=True):
    """Files in PEM for encrypted connections. Any of them: a bus in clear text is refused, as it is
    with a URL `tls://`."""

    ca: str = ""
    """Certificates of the authorities to trust; empty: those of the system."""
    certificate: str = ""
    """Our own certificate, with `key`: for servers that ask for one, and for those that connect
    over tls."""
    key: str = ""
    """The private key of that certificate."""

    def __bool__(self) -> bool:
        return bool(self.ca or self.certificate or self.key)

    def context(self) -> ssl.SSLContext:
        """Read the files. Raises ConfigRejected, naming the one that cannot be used."""
        if bool(self.certificate) != bool(self.key):
            one, other = ("certificate", "key") if self.certificate else ("key", "certificate")
            raise ConfigRejected(f"tls: {_named(one)} is given without {_named(other)}; give both")
        for name in ("ca", "certificate", "key"):
            if getattr(self, name):
                _check_readable("tls", name, getattr(self, name))
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except (ssl.SSLError, OSError) as error:
            raise ConfigRejected(
                f"tls: {_named('ca')} = {self.ca!r} holds no certificate in PEM: {error}"
            ) from error
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
            except (ssl.SSLError, OSError) as error:
                raise ConfigRejected(
                    f"tls: {_named('certificate')} = {self.certificate!r} and {_named('key')} = "
                    f"{self.key!r} are not a certificate in PEM and its key: {error}"
                ) from error
        return context

    def ends(self) -> TlsEnds:
        """Make contexts for connections between hosts: accept with `certificate`, connect where
        `ca` says whom to trust. Raises ConfigRejected."""
        connects = self.context()  # Its complaints name the file.
        accepts = None
        if self.certificate:
            accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            accepts.minimum_version = ssl.TLSVersion.TLSv1_3
            accepts.num_tickets = 0
            accepts.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
        return TlsEnds(accepts, connects if self.ca else None)


def ends_of(credentials: "Credentials | None") -> TlsEnds | None:
    """Return by which certificates somebody with these connects to other hosts; None: by none.
    Raises ConfigRejected."""
    return credentials.tls.ends() if isinstance(credentials, Identity) and credentials.tls else None


def _no_passphrase() -> str:
    raise ConfigRejected(f"tls: {_named('key')} asks for a passphrase; give a key without one")


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

    def trusting(self, tls: Tls) -> "Identity":
        """Return these with the files of encrypted connections."""
        return Identity(**{name: getattr(self, name) for name in _WHO}, tls=tls)

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "Identity":
        return Identity.of({name: environment.get(of, "") for name, of in VARIABLES.items()})

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

    def inbox_prefix(self, url: str = "") -> str:
        """Return how the subjects begin where this user's answers arrive. Nobody else may listen
        there, where the bus has accounts. `url` may carry a user. Raises ConfigRejected."""
        carried = _CARRIED.search(url)
        if carried is not None:
            user, _, password = carried[0][2:-1].partition(":")
            return inbox_prefix(user) if password else inbox_prefix("")
        if self.nkey:
            return inbox_prefix(public_key(Path(self.nkey)))
        return inbox_prefix(self.user)

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
            if path := getattr(self, name):
                _check_readable("credentials", name, path)

    def __str__(self) -> str:
        """Name the user, without a secret."""
        if self.user:
            return f"user {self.user!r} with this password"
        if self.token:
            return "this token"
        name = next((name for name in _FILES if getattr(self, name)), "")
        return f"the identity in {getattr(self, name)}" if name else "a client without credentials"


_WHO: Final = tuple(field.name for field in msgspec.structs.fields(Credentials))


class Identity(Credentials, kw_only=True, frozen=True):
    """Credentials, and the servers to trust."""

    tls: Tls = Tls()

    @classmethod
    def of(cls, values: Mapping[str, str]) -> "Identity":
        """Make one of strings by the names in VARIABLES."""
        files = {name: value for name, value in values.items() if name not in _WHO}
        return cls(**{name: values[name] for name in _WHO}, tls=Tls(**files))


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


def servers_of(url: str) -> list[str]:
    """Split the comma-separated servers of a bus. What one of them says of its user (and its scheme
    `tls`) goes for those that say nothing. Raises ConfigRejected."""
    servers = [each.strip() for each in url.split(",") if each.strip()]
    if not servers:
        raise ConfigRejected(f"url = {url!r} names no server; give nats://HOST:PORT")
    parts = [each.partition("://") if "://" in each else ("", "", each) for each in servers]
    for scheme, _, _ in parts:
        if scheme and scheme not in _SCHEMES:
            raise ConfigRejected(
                f"url = {shown(url)!r}: a server begins with nats:// or tls://, not {scheme}://"
            )
    secured = any(scheme == "tls" for scheme, _, _ in parts)
    users = [place.rpartition("@")[0] for _, _, place in parts if "@" in place]
    made = []
    for _, _, place in parts:
        who = f"{users[0]}@" if users and "@" not in place else ""
        made.append(f"{'tls' if secured else 'nats'}://{who}{place}")
    return made


def public_key(seed_file: Path) -> str:
    """Return the public key of the nkey seed in a file. Raises ConfigRejected."""
    import nkeys  # Needed by few, and slow to load.

    try:
        pair = nkeys.from_seed(bytearray(seed_file.read_bytes().strip()))
        return str(pair.public_key.decode())
    except (OSError, nkeys.NkeysError, ValueError) as error:
        raise ConfigRejected(
            f"credentials: {_named('nkey')} = {str(seed_file)!r} holds no nkey seed: {error!r}"
        ) from error


def _check_readable(table: str, name: str, path: str) -> None:
    if not os.access(path, os.R_OK):
        what = "be read" if os.path.exists(path) else "be found"
        raise ConfigRejected(f"{table}: {_named(name)} = {path!r} cannot {what}; correct the path")


def carries_identity(url: str) -> bool:
    """Say whether the URL says itself as whom the bus is used: that counts then, and nothing
    else."""
    return _CARRIED.search(url) is not None


def _named(name: str) -> str:
    return f"{name} ({VARIABLES[name]})"
