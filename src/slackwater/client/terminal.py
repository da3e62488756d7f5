"""Sit at the terminal of a job's process: `slackwater launch --pty`."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from slackwater.client.logs import LOOK_S
from slackwater.client.worker_service import Note, Worker, unnoted
from slackwater.common.base import limits
from slackwater.common.base.errors import Unavailable
from slackwater.common.shell.client import Client
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.terminals import TYPED_BYTES_MAX, Typed, TypeIn

FULL_S: Final = 0.05
"""Seconds to wait where the program has no room for what is typed."""
PENDING_BYTES_MAX: Final = 64 * 1024

Size = Callable[[], tuple[int, int]]
"""Returns the width and height of the window, in characters."""


class Keyboard:
    """Keeps text that is typed here until the process has it; `size`: of the window."""

    def __init__(self, client: Client, record: JobRecord, size: Size, note: Note = unnoted) -> None:
        self._worker = Worker(client, record, 0, note)
        self._note, self._told = note, False
        self._job = record.spec.id
        self._size = size
        self._typed = bytearray()
        self._news = asyncio.Event()
        self._seat = ""
        self.when_room: Callable[[], None] | None = None
        """Is called when there is room again."""

    @property
    def room(self) -> int:
        """Bytes that can be taken at this moment."""
        return PENDING_BYTES_MAX - len(self._typed)

    def type(self, data: bytes) -> None:
        """Take what was typed, at most `room` bytes."""
        assert len(data) <= self.room
        self._typed += data
        self._news.set()

    def resized(self) -> None:
        self._news.set()

    async def keep(self) -> None:
        """Pass on what is typed, once each, and say now and then that somebody sits here, until
        cancelled. Raises Rejected: the process has ended, or another goes on in its place."""
        self._seat, place = secrets.token_hex(6), 0
        attempt = (await self._ask(None, 0)).attempt
        while True:
            if not self._typed:
                await self._wait()
            sent = bytes(self._typed[:TYPED_BYTES_MAX])
            now = await self._ask(attempt, place, sent)
            if now.place < place:  # Many others sat there meanwhile: it was given to one.
                self._seat, place = secrets.token_hex(6), 0
                continue
            taken, place = now.place - place, now.place
            del self._typed[:taken]
            if taken and self.when_room is not None:
                self.when_room()
            if sent and not taken:
                await asyncio.sleep(FULL_S)

    async def _ask(self, attempt: int | None, place: int, data: bytes = b"") -> Typed:
        columns, rows = self._size()
        asked = TypeIn(
            job=self._job, rank=0, seat=self._seat, attempt=attempt, place=place, data=data,
            columns=columns, rows=rows,
        )  # fmt: skip
        while True:
            try:
                return await self._worker.asked("type", asked, Typed, patient=False)
            except Unavailable as error:
                if not self._told:
                    self._told = True
                    self._note(f"{error}; waiting for it")
            await asyncio.sleep(LOOK_S)
            self._worker = await self._worker.moved()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(limits.TERMINAL_HERE_S):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()
