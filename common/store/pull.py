"""Reading a stream by pulling: all that is there, then (if wanted) all that comes.

The consumer is ephemeral and kept in the server's memory, so a restarted server has forgotten it.
The reader therefore keeps its own place and makes a new consumer behind it whenever the old one
does not answer or a message is missing: a reader survives any restart. In a bucket's stream, with
one message per key, "everything after my place" is also "the last value of every key that I have
not seen".
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from math import inf
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, Removed, Retryable, Unavailable
from slackwater.common.bus.nats import Inbox, NatsBus
from slackwater.common.store.jetstream import NO_STREAM, ApiError, mapped

_NO_MESSAGES: Final = "404"
_EXPIRED: Final = "408"
_BATCH_FULL: Final = "Message Size Exceeds MaxBytes"
_INACTIVE_S: Final = 30.0
"""The server drops a consumer that nobody asked for this long."""
_SAME_S: Final = 0.001
"""Times of one message differ by less: one of them is rounded."""


class _ConsumerMade(msgspec.Struct):
    name: str = ""
    num_pending: int = 0
    error: ApiError | None = None


class _State(msgspec.Struct):
    last_seq: int = 0


class _StreamFound(msgspec.Struct):
    state: _State = msgspec.field(default_factory=_State)
    error: dict[str, Any] | None = None


class _Stored(msgspec.Struct):
    time: datetime


class _MessageFound(msgspec.Struct):
    message: _Stored | None = None


class StreamReader:
    """Reads a stream by one pull consumer. Close it in the end.

    `patterns`: of the subjects that are read; none: all. `since_s`: messages are read from then on.
    """

    def __init__(
        self, bus: NatsBus, stream: str, patterns: Sequence[str] = (), since_s: float = 0.0
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._patterns = patterns
        self._since_s = since_s
        self.pending = 0
        """Messages that were there when the consumer was made, and were not read yet."""
        self.place = 0  # The sequence of the last message read.
        self._read_s = 0.0  # When that message was stored.
        self._consumer = ""
        # Messages that the consumer has delivered: a gap means that one was lost.
        self._delivered = 0
        self._asked = 0
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()  # At most what was asked for.
        self._inbox: Inbox | None = None

    def waiting(self) -> AsyncGenerator[Msg, None]:
        """Messages that wait now, up to STORE_READ_MAX of them."""
        return self._batch({"no_wait": True}, limits.STORE_TIMEOUT_S)

    async def follow(self) -> AsyncGenerator[Msg, None]:
        """Every message, now and later. Lasts until it is closed; outlives the server."""
        forget = self._bus.on_reconnect(lambda: self._arrived.put_nowait(None))
        ask = {"expires": int(limits.STORE_WATCH_S * 1e9)}
        patience_s = limits.STORE_WATCH_S + 1.0
        try:
            while True:
                try:
                    async with aclosing(self._batch(ask, patience_s)) as batch:
                        async for message in batch:
                            yield message
                except (Retryable, Removed) as error:  # It may be made anew.
                    self.lost()
                    wait_s = error.retry_after_s if isinstance(error, Retryable) else inf
                    await asyncio.sleep(min(wait_s, limits.RETRY_WAIT_S_MAX))
        finally:
            forget()

    def lost(self) -> None:
        """Give up the consumer: a new one reads what comes next."""
        self._consumer = ""

    async def close(self) -> None:
        if self._inbox is not None:
            await self._inbox.close()
        if self._consumer and self._bus.connected:
            subject = f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}"
            try:
                await self._bus.publish(subject, b"")
            except Retryable:
                return  # The server forgets an unused consumer by itself.

    async def _batch(self, ask: dict[str, Any], patience_s: float) -> AsyncGenerator[Msg, None]:
        """One request's messages. Ends when the server says so, or all asked for are here."""
        if not self._consumer:
            await self._make_consumer()
        assert self._inbox is not None
        self._asked += 1
        reply_to = f"{self._inbox.subject}.{self._asked}"
        question = ask | {
            "batch": limits.STORE_READ_MAX,
            "max_bytes": limits.STORE_READ_BYTES_MAX,
        }
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        await self._bus.publish(subject, msgspec.json.encode(question), reply_to=reply_to)
        read = 0
        while read < limits.STORE_READ_MAX:
            message = await self._next(patience_s)
            status = (message.headers or {}).get("Status")
            if status is None:
                if self._in_place(message):
                    read += 1
                    yield message
            elif message.subject == reply_to:
                # Else the end of an earlier request, which came after its messages were all here.
                text = (message.headers or {}).get("Description", "")
                if status in (_NO_MESSAGES, _EXPIRED) or text == _BATCH_FULL:
                    return
                raise Unavailable(
                    f"{self._stream}: the reader was ended: {status} {text}",
                    limits.RETRY_WAIT_S_MIN,
                )

    async def _next(self, patience_s: float) -> Msg:
        try:
            async with asyncio.timeout(patience_s):
                message = await self._arrived.get()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._stream}: nothing came within {patience_s:g} s", limits.RETRY_WAIT_S_MIN
            ) from error
        if message is None:
            raise Unavailable(
                f"{self._stream}: the server was away; its reader is made anew",
                limits.RETRY_WAIT_S_MIN,
            )
        return message

    def _in_place(self, message: Msg) -> bool:
        """False: an old consumer's. Raises if the consumer delivered one that is not here."""
        metadata = message.metadata
        if metadata.consumer != self._consumer:
            return False
        if metadata.sequence.consumer != self._delivered + 1:
            raise Unavailable(f"{self._stream}: a message was lost", limits.RETRY_WAIT_S_MIN)
        self._delivered += 1
        self.pending -= 1
        self.place = metadata.sequence.stream
        self._read_s = metadata.timestamp.timestamp()
        return True

    async def _given_again(self) -> bool:
        """Tell whether the place of the last message read is free or another's: the stream was made
        anew, or a kill took what was not on disk yet."""
        if not self.place:
            return False
        info = await self._asked_api("STREAM.INFO", b"")
        found = msgspec.json.decode(info, type=_StreamFound)
        if found.error is not None:
            return False
        if self.place > found.state.last_seq or not self._read_s:
            return self.place > found.state.last_seq
        answer = await self._asked_api("STREAM.MSG.GET", msgspec.json.encode({"seq": self.place}))
        stored = msgspec.json.decode(answer, type=_MessageFound).message
        return stored is not None and abs(stored.time.timestamp() - self._read_s) > _SAME_S

    async def _asked_api(self, verb: str, payload: bytes) -> bytes:
        subject = f"$JS.API.{verb}.{self._stream}"
        answer = await self._bus.call(subject, payload, timeout_s=limits.STORE_TIMEOUT_S)
        return answer.data

    async def _make_consumer(self) -> None:
        if self._inbox is None:
            self._inbox = await self._bus.open_inbox(self._arrived.put_nowait)
        if await self._given_again():  # Everything that was stored since then is new.
            self.place, self._since_s = 0, self._read_s + _SAME_S
        config: dict[str, Any] = {
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE_S * 1e9),
        }
        if self.place or not self._since_s:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self.place + 1}
        else:
            since = datetime.fromtimestamp(self._since_s, UTC).isoformat()
            config |= {"deliver_policy": "by_start_time", "opt_start_time": since}
        if self._patterns:
            config["filter_subjects"] = list(self._patterns)
        answer = await self._bus.call(
            f"$JS.API.CONSUMER.CREATE.{self._stream}",
            msgspec.json.encode({"stream_name": self._stream, "config": config}),
            timeout_s=limits.STORE_TIMEOUT_S,
        )
        made = msgspec.json.decode(answer.data, type=_ConsumerMade)
        if made.error is not None:
            if made.error.err_code == NO_STREAM:
                raise mapped(self._stream, made.error)
            raise Unavailable(f"{self._stream}: no reader: {made.error.description}")
        self._consumer, self._delivered = made.name, 0
        self.pending = made.num_pending
