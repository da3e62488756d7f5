"""`slackwater launch --pty`: this terminal becomes that of the job's process."""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Final

from slackwater.client import logs
from slackwater.client.terminal import Keyboard
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.console.outcome import Usage, noted
from slackwater.schemas.base import CONFLICT
from slackwater.schemas.jobs import JobRecord, JobSpec

_READ_BYTES: Final = 4096
_LINE_ENDS: Final = b"\r\n"
_END_S: Final = 5.0


class Left(Exception):
    """The person has left: by ~. or because the window was closed."""


def check() -> None:
    """Raises Usage where nobody can sit here."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Usage("--pty: this is not a terminal; without --pty a command's output is shown")


def size() -> tuple[int, int]:
    """Return the width and height of this terminal, in characters."""
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return columns, rows


class Escape:
    """Finds `~.` at the beginning of a line among what is typed, as ssh does; `~~` is one `~`."""

    def __init__(self) -> None:
        self._begins, self._tilde = True, False

    def passed(self, typed: bytes) -> tuple[bytes, bool]:
        """Return what goes on to the program, and whether the person leaves after it."""
        out = bytearray()
        for code in typed:
            byte = bytes((code,))
            if self._tilde:
                self._tilde = False
                if byte == b".":
                    return bytes(out), True
                out += byte if byte == b"~" else b"~" + byte
            elif self._begins and byte == b"~":
                self._tilde = True
                continue
            else:
                out += byte
            self._begins = byte in _LINE_ENDS
        return bytes(out), False


async def sit(client: Client, spec: JobSpec, new: bool) -> None:
    """Show what the job's process shows and pass on what is typed, until it has ended; `new`: from
    its beginning, else its last screen. Raises Left."""
    try:
        record = await logs.started(client, spec.id, patient=True, note=noted)
    except Rejected as error:  # It ended before it was started: the record says more.
        noted(str(error))
        return
    noted(f"job {spec.id} on {record.node}; ~. at the beginning of a line ends it")
    keyboard, left = Keyboard(client, record, size, _noted), asyncio.Event()
    with _raw(keyboard, left):
        tasks = (
            asyncio.create_task(_show(client, record, -1 if new else size()[1])),
            asyncio.create_task(_type(keyboard)),
            asyncio.create_task(left.wait()),
        )
        try:
            await asyncio.wait(tasks[::2], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if left.is_set():
        raise Left
    tasks[0].result()


def _noted(note: str) -> None:
    """Print a note; this terminal does not return to the beginning of a line by itself."""
    sys.stderr.write(f"\r\n{note}\r\n")
    sys.stderr.flush()


async def _type(keyboard: Keyboard) -> None:
    while True:
        try:
            await keyboard.keep()
        except Rejected as error:
            again = error.status == CONFLICT
            if not again:  # It has ended, most often, and is not there to be told in a moment.
                await asyncio.sleep(_END_S)
            _noted(str(error))
            if not again:
                return


async def _show(client: Client, record: JobRecord, tail: int) -> None:
    pieces = logs.read(client, record, 0, tail, follow=True, by_line=False, note=_noted)
    async with aclosing(pieces):
        async for said in pieces:
            sys.stdout.buffer.write(said.data)
            sys.stdout.buffer.flush()


@contextmanager
def _raw(keyboard: Keyboard, left: asyncio.Event) -> Iterator[None]:
    """Let every key go to the program, also those by which a terminal sends signals."""
    loop, fd, escape = asyncio.get_running_loop(), sys.stdin.fileno(), Escape()

    def read() -> None:
        room = keyboard.room // 2  # A tilde that was held back may come with what follows it.
        if not room:
            loop.remove_reader(fd)
            return
        try:
            typed = os.read(fd, min(room, _READ_BYTES))
        except OSError:
            typed = b""
        passed, leaves = escape.passed(typed)
        if passed:
            keyboard.type(passed)
        if leaves or not typed:
            loop.remove_reader(fd)
            left.set()

    before = termios.tcgetattr(fd)
    loop.add_signal_handler(signal.SIGWINCH, keyboard.resized)
    keyboard.when_room = lambda: loop.add_reader(fd, read)
    tty.setraw(fd, termios.TCSADRAIN)  # Keeps text typed ahead.
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        keyboard.when_room = None
        loop.remove_reader(fd)
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
