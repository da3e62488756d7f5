"""Events of the worker's shell for its core, beside requests and timers."""

from dataclasses import dataclass, field
from typing import Literal

from slackwater.common.base.effects import ShellEvent
from slackwater.schemas.base import JobId, Refused
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.hangs import RankLooked
from slackwater.schemas.logs import LogPiece
from slackwater.schemas.terminals import Typed

RankState = Literal["intended", "running", "exited", "reported"]


@dataclass(frozen=True, slots=True)
class Found:
    """A rank as its files tell of it."""

    job: JobId
    rank: int
    state: RankState
    workers: int = 1
    program: tuple[str, ...] = ()
    code: int | None = 0
    result: str = ""
    attempt: int = 0
    """How often the rank was started before."""
    folder: str = ""
    """The program runs in it; empty: in the service's own."""
    gpu_ids: tuple[str, ...] = ()
    allocation: NodeAllocation = ()
    """GPUs of its whole job."""
    env: dict[str, str] = field(default_factory=dict)
    rendezvous: str = ""
    pack: str = ""
    venv: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ProcessesFound:
    """The processes on disk and those of them that still run: the first event after a start."""

    found: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """`result`: what the program wrote, or for a failure the last line of its log."""

    job: JobId
    rank: int
    code: int | None
    """None: it is not known."""
    result: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class AnswerReady:
    """The shell has found the answer to a request."""

    token: int
    answer: LogPiece | RankLooked | Typed | Refused


@dataclass(frozen=True, slots=True)
class JobsPruned:
    """The jobs' files were removed."""

    jobs: frozenset[str]


@dataclass(frozen=True, slots=True)
class RoomLooked:
    """The disk has room for another job's files, or why it has none."""

    short: str


@dataclass(frozen=True, slots=True)
class ProgramLooked:
    """Whether a prepared job's program can be started here."""

    token: int
    job: JobId
    attempt: int
    why: str
    """Why it cannot; empty: it can."""
    host: str = ""
    port: int = 0
    code: str = ""
    """Digest of its script and what is beside it."""


Event = (
    ShellEvent
    | ProcessesFound
    | ProcessExited
    | AnswerReady
    | JobsPruned
    | RoomLooked
    | ProgramLooked
)
