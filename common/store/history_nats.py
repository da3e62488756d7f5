"""Facts kept in one bounded JetStream stream, readable by `nats stream view facts`.

The stream captures what the services publish anyway: no publisher waits for it, and where it is
missing or has no room, facts pass as before and are not kept.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from slackwater.common import limits
from slackwater.common.bus.nats import NatsBus
from slackwater.common.errors import Rejected, Retryable
from slackwater.common.store.history import STREAM, SUBJECTS, Keeping, Kept, NothingKept
from slackwater.common.store.jetstream import (
    NAME_IN_USE,
    NO_STREAM,
    SUBJECTS_OVERLAP,
    ApiError,
    ask,
    mapped,
)
from slackwater.common.store.pull import StreamReader

_WHERE: Final = f"stream {STREAM}"
_FIXED: Final[dict[str, Any]] = {
    "name": STREAM,
    "subjects": [SUBJECTS],
    "storage": "file",
    "retention": "limits",
    "discard": "old",
    "no_ack": True,  # It never answers for somebody else.
}


class _Found(msgspec.Struct):
    config: dict[str, Any] = {}
    error: ApiError | None = None


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
            # Facts need no disk's word each; a stream with copies has none of this.
            loose = {"persist_mode": "async"} if keeping.replicas == 1 else {}
            made = await ask(self._bus, f"STREAM.CREATE.{STREAM}", wanted | loose, _Found)
            if made.error is None:
                return True
            if made.error.err_code != NAME_IN_USE:  # Else another master was faster.
                raise _refused(made.error)
            found = await self._found() or {}
        if all(found.get(key) == value for key, value in wanted.items()):
            return False
        # What an operator set besides stands.
        changed = await ask(self._bus, f"STREAM.UPDATE.{STREAM}", found | wanted, _Found)
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

    async def _found(self) -> dict[str, Any] | None:
        """Its configuration; None: there is no such stream."""
        info = await ask(self._bus, f"STREAM.INFO.{STREAM}", None, _Found)
        if info.error is not None:
            if info.error.err_code == NO_STREAM:
                return None
            raise mapped(_WHERE, info.error)
        return info.config


async def _there(reader: StreamReader) -> AsyncGenerator[Msg, None]:
    """All that is there now. A server that restarts meanwhile is waited for."""
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
