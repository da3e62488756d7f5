"""Streams saved to files, and restored from them: buckets, facts, packs of code.

The files are those of `nats account backup`: a folder for each stream with its configuration
(backup.json) and what the server sends of it (stream.tar.s2). The server sends as fast as it is
answered. What a snapshot has is of one instant; two streams' snapshots are not.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, Rejected, Unavailable
from slackwater.common.base.private_files import private_folder, write_private
from slackwater.common.bus.nats import NatsBus
from slackwater.common.store.jetstream import ApiError, StreamInfo, ask, mapped, parse

CONFIG: Final = "backup.json"
CONTENT: Final = "stream.tar.s2"
CHUNK_BYTES: Final = 128 * 1024
WAIT_S: Final = 30.0
"""The longest wait for one chunk, or for the server to take one."""


class _Names(msgspec.Struct):
    streams: list[str] | None = None
    total: int = 0
    error: ApiError | None = None


class _Restoring(msgspec.Struct):
    deliver_subject: str = ""
    error: ApiError | None = None


async def streams(bus: NatsBus) -> list[str]:
    """Name all streams of the account."""
    found: list[str] = []
    while True:
        page = await ask(bus, "STREAM.NAMES", {"offset": len(found)}, _Names)
        if page.error is not None:
            raise mapped("streams", page.error)
        found += page.streams or []
        if not page.streams or len(found) >= page.total:
            return sorted(found)


async def back_up(bus: NatsBus, stream: str, folder: Path) -> int:
    """Save a stream in the folder of its name below `folder`; return the bytes of its file.

    Raises:
        Unavailable: the server ended it, or nobody leads the stream now.
        DeadlineExceeded: nothing came for WAIT_S.
    """
    target = folder / stream
    await asyncio.to_thread(private_folder, target)
    chunks: asyncio.Queue[Msg] = asyncio.Queue(limits.STORE_IN_FLIGHT_MAX)

    async def take(message: Msg) -> None:
        await chunks.put(message)

    inbox = bus.client.new_inbox()
    subscription = await bus.client.subscribe(inbox, cb=take)
    try:
        question = {
            "deliver_subject": inbox, "no_consumers": True, "jsck": True,
            "chunk_size": CHUNK_BYTES,
        }  # fmt: skip
        begun = await ask(bus, f"STREAM.SNAPSHOT.{stream}", question, StreamInfo)
        if begun.error is not None:
            raise mapped(stream, begun.error)
        nbytes, digest = 0, hashlib.sha256()
        draft = target / f"{CONTENT}.new"
        with draft.open("wb") as file:
            async with aclosing(_sent(stream, chunks)) as sent:
                async for message in sent:
                    digest.update(message.data)
                    nbytes += await asyncio.to_thread(file.write, message.data)
                    if message.reply:
                        await bus.publish(message.reply, b"")
    finally:
        await subscription.unsubscribe()
    told = {"config": begun.config, "state": begun.state, "sha256": digest.hexdigest()}
    text = json.dumps(told, indent=1) + "\n"
    await asyncio.to_thread(write_private, target / CONFIG, text)
    await asyncio.to_thread(draft.replace, target / CONTENT)
    return nbytes


async def _sent(stream: str, chunks: "asyncio.Queue[Msg]") -> AsyncGenerator[Msg, None]:
    """Give each chunk of a snapshot, until the server has sent all."""
    while True:
        try:
            async with asyncio.timeout(WAIT_S):
                message = await chunks.get()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{stream}: the server sent nothing for {WAIT_S:g} s") from error
        if not message.data:
            status = (message.headers or {}).get("Status", "")
            if status.startswith(("4", "5")):
                why = (message.headers or {}).get("Description", "no reason")
                raise Unavailable(f"{stream}: the server ended the snapshot: {why}")
            return
        yield message


async def restore(bus: NatsBus, folder: Path, *, replicas: int | None = None) -> StreamInfo:
    """Make the stream that was saved in this folder; return what it has.

    Raises:
        Rejected: the files are not those of a snapshot, or the stream exists.
        Unavailable: the server does not take it.
    """
    saved = await asyncio.to_thread(_read, folder / CONFIG)
    saved.pop("sha256", None)
    name = saved["config"]["name"]
    if replicas is not None:
        saved["config"]["num_replicas"] = replicas
    begun = await ask(bus, f"STREAM.RESTORE.{name}", saved, _Restoring)
    if begun.error is not None:
        raise mapped(name, begun.error)
    with (folder / CONTENT).open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            answer = await bus.call(begun.deliver_subject, chunk, timeout_s=WAIT_S)
            if answer.data:
                _check(name, parse(answer.data, StreamInfo, name))
    answer = await bus.call(begun.deliver_subject, b"", timeout_s=WAIT_S)
    made = parse(answer.data, StreamInfo, name)
    _check(name, made)
    return made


def check(folder: Path) -> None:
    """Check the files of a snapshot. Those that `nats account backup` made name no hash.

    Raises:
        Rejected: they are not those of a snapshot, or not as they were written.
    """
    saved = _read(folder / CONFIG)
    path = folder / CONTENT
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Rejected(f"{path} cannot be read: {error}") from error
    if saved.get("sha256", found) != found:
        raise Rejected(f"{path} is not as it was saved: its hash is another")


def _check(name: str, answer: StreamInfo) -> None:
    if answer.error is not None:
        raise mapped(name, answer.error)


def _read(path: Path) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(saved["config"]["name"], str) or "state" not in saved:
            raise KeyError("state")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Rejected(f"{path} is not the configuration of a saved stream: {error!r}") from error
    return saved


async def remove(bus: NatsBus, stream: str) -> None:
    """Delete a stream and all that it has."""
    done = await ask(bus, f"STREAM.DELETE.{stream}", None, StreamInfo)
    if done.error is not None:
        raise mapped(stream, done.error)
