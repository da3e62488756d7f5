"""Questions to JetStream's API, and the one place where its errors become ours."""

from typing import Any, Final, TypeVar

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, SlackwaterError, Unavailable
from slackwater.common.bus.nats import NatsBus

A = TypeVar("A")

NO_MESSAGE: Final = 10037
NO_STREAM: Final = 10059
NAME_IN_USE: Final = 10058
SUBJECTS_OVERLAP: Final = 10065
EXPECTED_LAST: Final = "Nats-Expected-Last-Sequence"
NEVER: Final = 2**53
"""Expected as the last sequence, it is refused with what the last one is."""


class ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct):
    seq: int = 0
    error: ApiError | None = None


async def ask(bus: NatsBus, verb: str, question: Any, kind: type[A]) -> A:
    payload = b"" if question is None else msgspec.json.encode(question)
    answer = await bus.call(f"$JS.API.{verb}", payload, timeout_s=limits.STORE_TIMEOUT_S)
    return parse(answer.data, kind, verb)


def parse(payload: bytes, kind: type[A], where: str) -> A:
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise Unavailable(f"{where}: the server's answer is not understood: {error}") from error


def mapped(where: str, error: ApiError) -> SlackwaterError:
    text = f"{where}: {error.description} (JetStream error {error.err_code})"
    if error.err_code == NO_STREAM:
        return Rejected(f"{text}; it was removed: restore it, or start with an empty one")
    if error.code >= 500:
        return Unavailable(text)  # Not led, not in time, out of space: the write is not done.
    return Rejected(text)


def sequence_in(description: str) -> int | None:
    last = description.rsplit(" ", 1)[-1]
    return int(last) if last.isdigit() else None
