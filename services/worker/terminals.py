"""Passes what a person types on to the program that keeps a rank's terminal."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import AccessRefused, DecodeRejected
from slackwater.common.transport.socket_files import connect, credentials, within
from slackwater.schemas.base import NOT_FOUND, Refused
from slackwater.schemas.terminals import Typed, TypeIn, keeps_terminal, no_terminal
from slackwater.services.worker.effects import TypeAtTerminal
from slackwater.services.worker.events import AnswerReady
from slackwater.services.worker.processes import RankFiles

Holds = Callable[[int, str, int, int], bool]
"""Says whether a process is one of a rank's: pid, job, rank and the number of its process."""
_ANSWER_BYTES: Final = 4096


class Terminals:
    """Handles the core's `TypeAtTerminal`."""

    def __init__(
        self, node: str, state_dir: Path, holds: Holds, typed: Callable[[str, int], None]
    ) -> None:
        """`typed`: is told the job and the rank whose log will soon have the echo."""
        self._node, self._state_dir = node, state_dir
        self._holds, self._typed = holds, typed

    async def type(self, effect: TypeAtTerminal) -> AnswerReady:
        asked = effect.asked
        files = RankFiles(self._state_dir, asked.job, asked.rank, effect.attempt)
        why = no_terminal(self._node, asked)
        intent = files.intent()
        if effect.tenant and intent.tenant != effect.tenant:
            return AnswerReady(effect.token, Refused(reason=why, code=NOT_FOUND))
        if not keeps_terminal(intent.program):
            told = f"{why}: slackwater launch --pty starts a job with one"
            return AnswerReady(effect.token, Refused(reason=told))
        try:
            if asked.data:
                self._typed(asked.job, asked.rank)
            async with asyncio.timeout(limits.TERMINAL_S):
                return AnswerReady(effect.token, await self._passed_on(files, asked))
        except (OSError, TimeoutError, AccessRefused, DecodeRejected) as error:
            told = f"{why} at this moment: {str(error) or 'it does not answer'}"
            wait_s = limits.RETRY_WAIT_S_MIN
            return AnswerReady(effect.token, Refused(reason=told, retry_after_s=wait_s))

    async def _passed_on(self, files: RankFiles, asked: TypeIn) -> Typed:
        """Raises OSError, AccessRefused, DecodeRejected."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            with within(str(files.of_program("terminal").absolute())) as short:
                await connect(sock, short)
            pid, _ = credentials(sock)
            # The path is the program's own: it may have become a link to another's socket.
            if not self._holds(pid, files.job, files.rank, files.attempt):
                raise AccessRefused(f"process {pid}, which listens there, is not of the job")
        except BaseException:
            sock.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        try:
            writer.write(codec.encode(asked))
            writer.write_eof()
            answer = codec.decode(await reader.read(_ANSWER_BYTES), Typed)
        finally:
            writer.close()
        return Typed(job=files.job, rank=files.rank, attempt=files.attempt, place=answer.place)
