"""Questions to JetStream's API, and the one place where its errors become ours."""

from typing import Any, Final, TypeVar

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, Removed, SlackwaterError, Unavailable
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


class StreamInfo(msgspec.Struct):
    """The server's answer about a stream, as it came, whatever its version knows."""

    config: dict[str, Any] = {}
    state: dict[str, Any] = {}
    cluster: dict[str, Any] = {}
    """Its leader, and how far the copies are."""
    error: ApiError | None = None

    @property
    def last_seq(self) -> int:
        return int(self.state.get("last_seq", 0))


async def ask(bus: NatsBus, verb: str, question: Any, kind: type[A]) -> A:
    payload = b"" if question is None else msgspec.json.encode(question)
    answer = await bus.call(f"$JS.API.{verb}", payload, timeout_s=limits.STORE_TIMEOUT_S)
    return parse(answer.data, kind, verb)


async def make_stream(bus: NatsBus, config: dict[str, Any]) -> None:
    """Make a stream. One that exists keeps its options (an operator's choice), but is copied to
    more servers where `num_replicas` says so.

    Raises:
        Unavailable: the servers that are there cannot keep so many copies, or do not answer.
    """
    name = config["name"]
    made = await ask(bus, f"STREAM.CREATE.{name}", config, StreamInfo)
    if made.error is None:
        return
    if made.error.err_code != NAME_IN_USE:
        raise mapped(name, made.error)
    found = await ask(bus, f"STREAM.INFO.{name}", None, StreamInfo)
    if found.error is not None:
        raise mapped(name, found.error)
    if found.config["num_replicas"] < config["num_replicas"]:
        more = found.config | {"num_replicas": config["num_replicas"]}
        raised = await ask(bus, f"STREAM.UPDATE.{name}", more, StreamInfo)
        if raised.error is not None:
            raise mapped(f"{name}, {config['num_replicas']} copies", raised.error)


def parse(payload: bytes, kind: type[A], where: str) -> A:
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise Unavailable(f"{where}: the server's answer is not understood: {error}") from error


def mapped(where: str, error: ApiError) -> SlackwaterError:
    text = f"{where}: {error.description} (JetStream error {error.err_code})"
    if error.err_code == NO_STREAM:
        return Removed(f"{text}; it was removed: restore it, or start with an empty one")
    if error.code >= 500:
        return Unavailable(text)  # Not led, not in time, out of space: the write is not done.
    return Rejected(text)


def sequence_in(description: str) -> int | None:
    last = description.rsplit(" ", 1)[-1]
    return int(last) if last.isdigit() else None
