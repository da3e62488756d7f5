"""Find the cluster that a command talks to, and the user it talks as.

The first that is given: `--url`, `--cluster NAME` (one that `slackwater up --name NAME` started
here), `--context`, SLACKWATER_CONTEXT, SLACKWATER_URL, SLACKWATER_CLUSTER, the context in use,
NATS_URL. Else the only cluster of this account on this machine, or the one named `default`. As
whom: --user and the like, else the NATS CLI's variables, else the context's user.
"""

import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any, TypeVar, cast

import typer

from slackwater.client import contexts
from slackwater.client.address import CLUSTER, address
from slackwater.client.contexts import VARIABLE, Context
from slackwater.common.base.errors import Rejected
from slackwater.common.bus import local_clusters
from slackwater.common.bus.access import DEFAULT_CLUSTER, VARIABLES, Credentials, Identity
from slackwater.console import usage

_HELP = f"The cluster, by the name that `slackwater up` gave it; else ${CLUSTER}."
Cluster = Annotated[str, typer.Option(metavar="NAME", help=_HELP)]
F = TypeVar("F", bound=Callable[..., Any])
_identity: ContextVar[Credentials | None] = ContextVar("identity", default=None)
_cluster: ContextVar[str] = ContextVar("cluster", default="")
_context: ContextVar[str] = ContextVar("context", default="")
_used: ContextVar[Context | None] = ContextVar("used", default=None)


class Commands(typer.Typer):
    """Registers commands, with --cluster where they take --url."""

    def command(self, *words: Any, **options: Any) -> Callable[[F], F]:
        register = super().command(*words, **options)

        def taken(function: F) -> F:
            register(_choosing(function))
            return function

        return taken


def _choosing(function: F) -> F:
    """Return the command with an option --cluster, if it has --url."""
    parameters = dict(inspect.signature(function).parameters)
    if "url" not in parameters:
        return function

    @wraps(function)
    def command(*given: Any, cluster: str, **options: Any) -> Any:
        if cluster:
            _cluster.set(cluster)
        return function(*given, **options)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    more = inspect.Parameter("cluster", kind, default="", annotation=Cluster)
    signature = inspect.Signature([*parameters.values(), more])
    return cast(F, _declared(command, signature))


def _declared(command: Any, signature: inspect.Signature) -> Any:
    """Set both that Typer reads: the signature for the options, the annotations for their types."""
    command.__signature__ = signature
    command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return command


def named(name: str) -> str:
    """The cluster that --name names, or --cluster before the command. Raises Rejected where they
    differ."""
    before = _cluster.get()
    if before and name not in ("", before, os.environ.get(CLUSTER, DEFAULT_CLUSTER)):
        raise Rejected(f"--cluster {before} and --name {name}: give one of them")
    return before or name


def given(url: str | None) -> str | None:
    """Return the address that --url or --cluster names, with the token of this account's cluster
    there; None without either. Raises Rejected."""
    name = _cluster.get()
    if url and name:
        raise Rejected(f"--url {url} and --cluster {name}: give one of them")
    if name:
        return local_clusters.chosen(name)
    return local_clusters.carrying(url) if url else None


def resolve(url: str | None) -> str:
    """Return the URL, with the token. Raises Unavailable when no cluster is known, Rejected when it
    is not clear which one is meant."""
    if found := given(url):
        return found
    context = contexts.chosen(_context.get(), os.environ)
    _used.set(context)
    if context is not None:
        return local_clusters.carrying(context.url)
    return address("", "", os.environ)


def identify(
    user: Annotated[
        str, typer.Option(envvar=VARIABLES["user"], help="Talk to the bus as this user.")
    ] = "",
    password: Annotated[
        str,
        typer.Option(
            envvar=VARIABLES["password"],
            help="The user's password; the variable hides it from other accounts.",
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
    ca: Annotated[
        str,
        typer.Option(
            "--tlsca", envvar=VARIABLES["ca"], help="Trust the authorities in this file (PEM)."
        ),
    ] = "",
    certificate: Annotated[
        str,
        typer.Option(
            "--tlscert", envvar=VARIABLES["certificate"], help="Show the bus this certificate."
        ),
    ] = "",
    key: Annotated[
        str, typer.Option("--tlskey", envvar=VARIABLES["key"], help="The certificate's key.")
    ] = "",
    cluster: Cluster = "",
    context: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"Use this context (`slackwater context ls`); else ${VARIABLE}."
        ),
    ] = "",
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=usage.version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options before a command: which cluster it talks to, and as whom, as the NATS CLI
    names it."""
    _cluster.set(cluster)
    _context.set(context)
    if cluster and context:
        raise Rejected(f"--cluster {cluster} and --context {context}: give one of them")
    names = (user, password, token, creds, nkey, ca, certificate, key)
    _identity.set(Identity.of(dict(zip(VARIABLES, names, strict=True))))


def credentials() -> Credentials:
    """Return the credentials of the command that runs; without any, those of the context that
    `resolve` found."""
    identity, context = _identity.get() or Credentials(), _used.get()
    if context is not None and identity in (Credentials(), Identity()):
        return context.identity
    return identity
