"""Typed text goes to a process of the rank, for a user of its job's tenant."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slackwater.common.base import codec
from slackwater.common.transport.socket_files import bind
from slackwater.schemas.base import NOT_FOUND, Refused
from slackwater.schemas.terminals import Typed, TypeIn, in_terminal
from slackwater.services.worker.effects import TypeAtTerminal
from slackwater.services.worker.processes import Intent, RankFiles
from slackwater.services.worker.terminals import Terminals

ASKED = TypeIn(job="j", rank=0, seat="s", attempt=0, place=0, data=b"secret\n")


class Listening:
    """A program that listens where the rank's terminal does, and answers that it took all."""

    def __init__(self, folder: Path) -> None:
        self.files = RankFiles(folder, "j", 0)
        self.heard: list[bytes] = []
        self.ours = True
        self.typed: list[tuple[str, int]] = []
        self._terminals = Terminals("n1", folder, self._holds, lambda *at: self.typed.append(at))

    def _holds(self, pid: int, job: str, rank: int, attempt: int) -> bool:
        assert (pid, job, rank, attempt) == (os.getpid(), "j", 0, 0)
        return self.ours

    def asked_for(self, *program: str) -> None:
        self.files.intend(Intent(job="j", rank=0, workers=1, program=program, tenant="blue"))

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard.append(await reader.read())
        if self.heard[-1]:
            asked = codec.decode(self.heard[-1], TypeIn)
            writer.write(codec.encode(Typed(job="x", rank=9, attempt=9, place=len(asked.data))))
        writer.close()

    async def type(self, tenant: str = "") -> Typed | Refused:
        event = await self._terminals.type(TypeAtTerminal(7, ASKED, tenant, attempt=0))
        assert event.token == 7
        assert isinstance(event.answer, Typed | Refused)
        return event.answer


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        made = Listening(Path(folder))
        made.asked_for(*in_terminal(("bash",), (80, 24), 60.0))
        sock = bind(str(made.files.path("terminal")))
        async with await asyncio.start_unix_server(made.answer, sock=sock):
            yield made


async def test_what_is_typed_reaches_the_program(listening: Listening) -> None:
    typed = await listening.type("blue")
    assert typed == Typed(job="j", rank=0, attempt=0, place=7), "it cannot speak of another job"
    assert listening.typed == [("j", 0)]


async def test_a_process_of_another_job_is_told_nothing(listening: Listening) -> None:
    """The path is in a folder of the program's own, and may be a link to any socket."""
    listening.ours = False
    refused = await listening.type()
    assert isinstance(refused, Refused)
    assert "is not of the job" in refused.reason
    await asyncio.sleep(0.05)
    assert not any(listening.heard)


async def test_another_tenants_job_is_not_known(listening: Listening) -> None:
    refused = await listening.type("red")
    assert isinstance(refused, Refused)
    assert refused.code == NOT_FOUND
    assert not listening.heard


async def test_a_program_that_is_just_starting_is_asked_again(listening: Listening) -> None:
    listening.files.path("terminal").unlink()
    refused = await listening.type()
    assert isinstance(refused, Refused)
    assert refused.retry_after_s > 0


async def test_a_program_without_a_terminal_is_named_with_the_remedy(listening: Listening) -> None:
    listening.asked_for("python", "train.py")
    refused = await listening.type()
    assert isinstance(refused, Refused)
    assert (refused.retry_after_s, "launch --pty" in refused.reason) == (0.0, True)
