"""Every subject is built here, and reads as a sentence.

    sw.v1.cmd.<service>.<id>.<verb>           a request
    sw.v1.own.<tenant>.<service>.<id>.<verb>  a request of a user who may act for that tenant alone
    sw.v1.evt.<noun>.<id>.<past-tense>        a fact
    sw.v1.tel.<service>.<id>.<what>           telemetry

Tokens are wide to narrow, so that the wildcards an operator types are useful: all facts of jobs are
`sw.v1.evt.job.>`, all telemetry of one aggregator `sw.v1.tel.aggregator.a1.>`.
"""

import re
from typing import NamedTuple

from slackwater.schemas.base import ID_PATTERN

PREFIX = "sw.v1"
_ID = re.compile(ID_PATTERN)


def _token(text: str) -> str:
    if not _ID.fullmatch(text):
        raise ValueError(f"{text!r} cannot be part of a subject: letters, digits, '-' and '_' only")
    return text


def command(service: str, id: str, verb: str) -> str:
    """The subject that `id` (an instance of `service`) answers `verb` on."""
    return f"{PREFIX}.cmd.{_token(service)}.{_token(id)}.{_token(verb)}"


def owned(tenant: str, service: str, id: str, verb: str) -> str:
    """The subject that `id` answers `verb` on for the users of one tenant; `*`: of all."""
    who = tenant if tenant == "*" else _token(tenant)
    return f"{PREFIX}.own.{who}.{_token(service)}.{_token(id)}.{_token(verb)}"


def tenant_of(subject: str) -> str:
    """Return the tenant that a request was made for; empty: its sender is not held to one."""
    prefix, _, rest = subject.partition(f"{PREFIX}.own.")
    return rest.partition(".")[0] if not prefix else ""


def event(noun: str, id: str, fact: str) -> str:
    return f"{PREFIX}.evt.{_token(noun)}.{_token(id)}.{_token(fact)}"


def telemetry(service: str, id: str, what: str) -> str:
    return f"{PREFIX}.tel.{_token(service)}.{_token(id)}.{_token(what)}"


def events(noun: str = "*", id: str = "*", fact: str = "*") -> str:
    """A pattern over facts."""
    return f"{PREFIX}.evt.{noun}.{id}.{fact}"


def facts() -> str:
    """The pattern of all facts."""
    return f"{PREFIX}.evt.>"


def telemetries(service: str = "*", id: str = "*", what: str = "*") -> str:
    """A pattern over telemetry."""
    return f"{PREFIX}.tel.{service}.{id}.{what}"


class Words(NamedTuple):
    """The four words of a subject that name something; `kind` is cmd, evt or tel."""

    kind: str
    noun: str
    id: str
    what: str


def parsed(subject: str) -> Words | None:
    """Take a subject apart; None: it is not one of ours, or a pattern."""
    kind, *words = subject.removeprefix(f"{PREFIX}.").split(".")
    known = subject.startswith(f"{PREFIX}.") and kind in ("cmd", "evt", "tel") and len(words) == 3
    if not known or not all(_ID.fullmatch(word) for word in words):
        return None
    return Words(kind, *words)


def inbox_prefix(user: str) -> str:
    """Return how the subjects begin where answers to `user` (a name, or a public key) arrive. Users
    whose name cannot be part of a subject share one."""
    return f"_INBOX_{user}" if _ID.fullmatch(user) else "_INBOX"


MASTER = "main"
"""The id under which the leading master answers."""
