"""Facts kept in one bounded JetStream stream, readable by `nats stream view facts`.

The stream captures what the services publish anyway: no publisher waits for it, and where it is
missing or has no room, facts pass as before and are not kept.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

from nats.aio.msg import Msg

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, Retryable
from slackwater.common.bus.nats import NatsBus
from slackwater.common.store.history import STREAM, SUBJECTS, Keeping, Kept, NothingKept
from slackwater.common.store.jetstream import (
    EXPECTED_LAST,
    NAME_IN_USE,
    NEVER,
    NO_STREAM,
    SUBJECTS_OVERLAP,
    ApiError,
    PubAck,
    StreamInfo,
    ask,
    mapped,
    parse,
    sequence_in,
)
from slackwater.common.store.pull import StreamReader
from slackwater.schemas import subjects

_WHERE: Final = f"stream {STREAM}"
_PROBE: Final = f"{subjects.PREFIX}.facts.probe"
"""A subject of the stream whose messages are always refused: the refusal says how the stream is."""
_FIXED: Final[dict[str, Any]] = {
    "name": STREAM,
    "subjects": [SUBJECTS, _PROBE],
    "storage": "file",
    "retention": "limits",
    "discard": "old",
}


class NatsHistory:
    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    async def keep(self, keeping: Keeping) -> bool:
        wanted = _FIXED | {
            "max_bytes": keeping.nbytes,
            "max_age": int(keeping.seconds * 1e9),
            "max_msgs_per_subject": keeping.per_subject,
            "num_replicas": keeping.replicas,
        }
        found = await self._found()
        if found is None:
            if await self._made(wanted):
                return True
            found = await self._found() or {}
        if all(found.get(key) == value for key, value in wanted.items()):
            if not await self._stuck():
                return False
            removed = await ask(self._bus, f"STREAM.DELETE.{STREAM}", None, StreamInfo)
            if removed.error is not None:
                raise _refused(removed.error)
            return await self._made(wanted)
        # Keep what else an operator has set.
        changed = await ask(self._bus, f"STREAM.UPDATE.{STREAM}", found | wanted, StreamInfo)
        if changed.error is not None:
            raise _refused(changed.error)
        return True

    async def read(
        self,
        patterns: Sequence[str] = (),
        *,
        since_s: float = 0.0,
        after: int = 0,
        follow: bool = False,
    ) -> AsyncGenerator[Kept, None]:
        if await self._found() is None:
            raise NothingKept
        reader = StreamReader(self._bus, STREAM, patterns, since_s)
        reader.place = after
        try:
            messages = reader.follow() if follow else _there(reader)
            async with aclosing(messages):
                async for message in messages:
                    metadata = message.metadata
                    yield Kept(
                        message.subject,
                        message.data,
                        metadata.sequence.stream,
                        metadata.timestamp.timestamp(),
                    )
        finally:
            await reader.close()

    async def _made(self, wanted: dict[str, Any]) -> bool:
        """Make the stream; False: another master was faster."""
        # Facts need not reach the disk one by one; a stream with copies cannot be told so.
        loose = {"persist_mode": "async"} if wanted["num_replicas"] == 1 else {}
        made = await ask(self._bus, f"STREAM.CREATE.{STREAM}", wanted | loose, StreamInfo)
        if made.error is not None and made.error.err_code != NAME_IN_USE:
            raise _refused(made.error)
        return made.error is None

    async def _stuck(self) -> bool:
        """Tell whether the stream met a full disk: then it counts what comes and keeps none of it,
        for as long as the server lives."""
        headers = {EXPECTED_LAST: str(NEVER)}
        answer = await self._bus.call(
            _PROBE, b"", timeout_s=limits.STORE_TIMEOUT_S, headers=headers
        )
        ack = parse(answer.data, PubAck, _WHERE)
        counted = sequence_in(ack.error.description) if ack.error is not None else None
        info = await ask(self._bus, f"STREAM.INFO.{STREAM}", None, StreamInfo)
        return counted is not None and info.error is None and counted > info.last_seq

    async def _found(self) -> dict[str, Any] | None:
        """Return the stream's configuration; None: the stream does not exist."""
        info = await ask(self._bus, f"STREAM.INFO.{STREAM}", None, StreamInfo)
        if info.error is not None:
            if info.error.err_code == NO_STREAM:
                return None
            raise mapped(_WHERE, info.error)
        return info.config


async def _there(reader: StreamReader) -> AsyncGenerator[Msg, None]:
    """Yield all that is there now, and wait for a server that restarts meanwhile."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limits.RETRY_BUDGET_S
    while True:
        read_to = reader.place
        try:
            async with aclosing(reader.waiting()) as batch:
                async for message in batch:
                    yield message
        except Retryable as error:
            if loop.time() > until_s:
                raise
            reader.lost()
            await asyncio.sleep(min(error.retry_after_s, limits.RETRY_WAIT_S_MAX))
            continue
        if reader.pending <= 0 or read_to == reader.place:
            return


def _refused(error: ApiError) -> Exception:
    if error.err_code == SUBJECTS_OVERLAP:
        return Rejected(
            f"{_WHERE}: another stream captures facts ({error.description}): remove it, or have it "
            f"take {SUBJECTS} from this one"
        )
    return mapped(_WHERE, error)
