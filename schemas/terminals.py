"""The terminal of a job's process: what a person types goes there, what it shows is its log."""

from typing import Annotated, Final

import msgspec

from slackwater.schemas.base import Count, IdText, Message, Rank
from slackwater.schemas.logs import Place

TYPED_BYTES_MAX: Final = 4096
SIDE_MAX: Final = 10_000
PROGRAM: Final = ("python", "-P", "-m", "slackwater.services.worker.terminal_program")
"""Begins the command of a rank whose own command runs in a terminal."""
SOCKET: Final = "SLACKWATER_TERMINAL"
"""Names to this program the socket at which what is typed arrives."""
Side = Annotated[int, msgspec.Meta(ge=0, le=SIDE_MAX)]


class TypeIn(Message, kw_only=True, frozen=True, tag="terminal.type"):
    """sw.v1.cmd.worker.<id>.type: what was typed, or that somebody still sits there.

    Answered by Typed. Bytes have places, as in a log: those that came before are not typed again.
    Several people may sit there, each with places of their own. The worker service passes it on to
    the program that keeps the terminal, as it is.
    """

    job: IdText
    rank: Rank
    seat: IdText
    """Tells apart the people who sit there: another one each time that somebody sits down."""
    attempt: Count | None = None
    """The process that it is meant for; None: the one that runs, whichever it is."""
    place: Place = 0
    """The position of the first byte in all that was typed from there."""
    data: Annotated[bytes, msgspec.Meta(max_length=TYPED_BYTES_MAX)] = b""
    columns: Side = 0
    """The width of the window; 0: as it was."""
    rows: Side = 0


class Typed(Message, kw_only=True, frozen=True, tag="terminal.typed"):
    job: IdText
    rank: Rank
    attempt: Count
    place: Place
    """The position of the byte that is expected next: the program has taken all before it."""


def in_terminal(command: tuple[str, ...], size: tuple[int, int], alone_s: float) -> tuple[str, ...]:
    """Return the program that runs `command` in a terminal of this width and height, and hangs up
    once nobody has sat there for `alone_s` seconds."""
    columns, rows = size
    return (*PROGRAM, f"{columns}x{rows}", f"{alone_s:g}", *command)


def command_of(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that a person gave, without what keeps its terminal."""
    return program[len(PROGRAM) + 2 :] if keeps_terminal(program) else program


def keeps_terminal(program: tuple[str, ...]) -> bool:
    """Tell whether the program is one that `in_terminal` made."""
    return program[: len(PROGRAM)] == PROGRAM


def no_terminal(node: str, asked: TypeIn) -> str:
    """Say why a node types nothing."""
    return f"{node} runs no terminal of job {asked.job}, rank {asked.rank}"
