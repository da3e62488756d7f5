"""The connection policy of the client library, and its errors in our words.

A daemon never gives up on its servers: it tries them every RECONNECT_WAIT_S for as long as it runs
(the client library would wait 2 s between tries and close for good after 60). Where encryption was
asked for, no credential is sent to a server that does not encrypt: the library alone would send it
in clear text.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import nats.errors
from nats.aio.client import Client

from slackwater.common.base import limits
from slackwater.common.base.errors import (
    AccessRefused,
    ConfigRejected,
    DeadlineExceeded,
    NobodyThere,
    Rejected,
    SlackwaterError,
    Unavailable,
)
from slackwater.common.bus.access import (
    Credentials,
    Identity,
    Tls,
    address_file,
    carries_identity,
    servers_of,
)

_OF_ANOTHER_TIME: Final = (9, 10)
"""OpenSSL's codes for certificates that are not yet valid, and that have ended."""
_FORBIDDEN: Final = re.compile(
    r"permissions violation for (publish|subscription) to \"?([^\s\"]+)", re.IGNORECASE
)


def _matters(record: logging.LogRecord) -> bool:
    return "returning true from eof_received()" not in record.getMessage()


# The client library's encrypted connections make asyncio warn of this, and it means nothing.
logging.getLogger("asyncio").addFilter(_matters)


class NotEncrypted(nats.errors.Error):
    """The server does not encrypt, and encryption was asked for."""

    def __str__(self) -> str:
        return "it does not encrypt, and tls:// or [tls] was asked for"


class Forbidden(nats.errors.Error):
    """The error of a request that this user may not make."""


class ConnectionLost(nats.errors.Error):
    """The error of a request that was under way when the connection was lost."""


class SecuredClient(Client):
    """A client that says who it is only over an encrypted connection, where that was asked for."""

    encrypted = False

    def _connect_command(self) -> bytes:
        if self.encrypted and not self._server_info.get("tls_required"):
            raise NotEncrypted
        return super()._connect_command()


def options(url: str, credentials: Credentials) -> tuple[list[str], dict[str, Any]]:
    """Return the servers, and what else the client library's `connect` is given. A user that `url`
    names counts before that of `credentials`. Raises ConfigRejected."""
    servers = servers_of(url)
    identity = {} if carries_identity(url) else credentials.options()
    tls = credentials.tls if isinstance(credentials, Identity) else Tls()
    secured = bool(tls) or servers[0].startswith("tls://")
    return servers, {
        **identity,
        **({"tls": tls.context()} if secured else {}),
        "inbox_prefix": credentials.inbox_prefix(servers[0]),
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": limits.RECONNECT_WAIT_S,
        "connect_timeout": 1,
        "ping_interval": round(limits.BUS_PING_S),
        "max_outstanding_pings": 2,
    }


def mapped(error: Exception, subject: str, url: str, timeout_s: float) -> SlackwaterError:
    """Map the client library's errors to ours, in this one place."""
    match error:
        case nats.errors.NoRespondersError():
            return NobodyThere(f"{subject}: nobody answers there", limits.RETRY_WAIT_S_MIN)
        case Forbidden():
            return AccessRefused(f"{subject}: this user of the bus may not ask there")
        case ConnectionLost():
            return DeadlineExceeded(
                f"{subject}: the connection to {url} was lost before the answer; it may "
                "still have been acted on",
                limits.RECONNECT_WAIT_S,
            )
        case nats.errors.TimeoutError():
            return DeadlineExceeded(
                f"{subject}: no answer within {timeout_s:g} s; it may still have been acted on",
                limits.RETRY_WAIT_S_MIN,
            )
        case nats.errors.MaxPayloadError():
            return Rejected(f"{subject}: the server takes no message of this size")
        case nats.errors.BadSubjectError() | nats.errors.BadHeaderError():
            return Rejected(f"{subject!r} is not a subject that can be used here: {error}")
        case _:
            return Unavailable(f"{subject}: {error}", limits.RECONNECT_WAIT_S)


def distrusts(error: Exception | None) -> bool:
    """Say whether the connection failed because the server's certificate is not trusted, or the
    server does not encrypt."""
    return isinstance(error, ssl.SSLError | NotEncrypted)


def forbidden(error: Exception) -> tuple[bool, str] | None:
    """Read what the server says this user may not do: whether it is to listen, not to publish, and
    the subject, which the client library puts into lower case; None: it says something else."""
    found = _FORBIDDEN.search(str(error))
    return None if found is None else (found[1].lower() == "subscription", found[2].lower())


def distrusted(url: str, why: Exception | None) -> SlackwaterError:
    """Make the error for a server that may be somebody else's. A certificate of another time is not
    a fault of our configuration: a service tries again."""
    said = f"the nats-server at {url} is not to be trusted: {why}"
    if getattr(why, "verify_code", None) in _OF_ANOTHER_TIME:
        return Unavailable(f"{said}; set this machine's clock, or renew the server's certificate")
    return ConfigRejected(
        f"{said}; give the certificate of its authority (`ca` in [tls], --tlsca or NATS_CA), or "
        "mend the server's"
    )


def refused(url: str, who: str, why: Exception | None) -> ConfigRejected:
    """Make the error for a server that will not have us."""
    return ConfigRejected(
        f"the nats-server at {url} refuses {who} ({why}); give other credentials: NATS_USER and "
        "NATS_PASSWORD, NATS_TOKEN, NATS_CREDS or NATS_NKEY, a command's options of these names, "
        "or [credentials] in a service's configuration; the secret of a cluster that "
        f"`slackwater up` started is in the URL in {address_file()}, or in nats/url of its "
        "--state-dir"
    )


def unanswered(url: str, why: Exception | None) -> Unavailable:
    """Make the error for servers that do not answer."""
    return Unavailable(
        f"no nats-server answers at {url} ({why or 'no answer'}); start one there "
        "(`slackwater up` starts one with a cluster), or give the right URL"
    )


@contextmanager
def cancellable() -> Iterator[None]:
    """Raise a cancellation that the client's flush has swallowed. It waits by `asyncio.wait_for`,
    which prefers a result or an error to a cancellation that comes with it; without this the
    cancelled task would go on."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
