"""Actions of the worker's core, which its shell carries out, and names of requests and timers."""

from dataclasses import dataclass, field

from slackwater.common.base.effects import Action, EffectKey
from slackwater.schemas.base import JobId
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.logs import ReadLog
from slackwater.schemas.terminals import TypeIn


@dataclass(frozen=True, slots=True)
class FindProcesses(Action):
    """`ProcessesFound` follows."""


@dataclass(frozen=True, slots=True)
class RunRank(Action):
    """Start a process, and watch it. Its intention is on disk when this returns. `ProcessExited`
    follows."""

    job: JobId
    rank: int
    attempt: int
    workers: int
    program: tuple[str, ...]
    folder: str
    gpu_ids: tuple[str, ...]
    allocation: NodeAllocation = ()
    """GPUs of the whole job, for its program to know."""
    env: dict[str, str] = field(default_factory=dict)
    rendezvous: str = ""
    pack: str = ""
    venv: str = ""
    tenant: str = ""
    together: bool = False
    """All ranks of the job, which has no GPUs, begin on this node: they meet here."""


@dataclass(frozen=True, slots=True)
class LookAtProgram(Action):
    """See whether the program can be started here, and find a port. `ProgramLooked` follows."""

    token: int
    job: JobId
    attempt: int
    program: tuple[str, ...]
    folder: str
    path: str | None
    """Where to look for the program, as its own environment says; None: as the service's does."""
    pack: str = ""
    """The pack of code to fetch before, which the program runs in."""
    venv: str = ""
    """The virtual environment to fetch before."""


@dataclass(frozen=True, slots=True)
class WatchRank(Action):
    """Watch a process that a former life of the service started. `ProcessExited` follows."""

    job: JobId
    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SignalRank(Action):
    """SIGTERM to the rank's process group, or SIGKILL."""

    job: JobId
    rank: int
    kill: bool


@dataclass(frozen=True, slots=True)
class ForgetRank(Action):
    """The master has stored how the attempt ended: its files need not say it again."""

    job: JobId
    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AwaitEnd(Action):
    """The drain goes on until what was told to stop has ended."""


@dataclass(frozen=True, slots=True)
class ReadRankLog(Action):
    """`AnswerReady` follows. `over`: the rank was known to have ended, with `code`, when asked."""

    token: int
    asked: ReadLog
    tenant: str
    """Read it only if it is of this tenant's job; empty: anyone's."""
    attempt: int
    over: bool
    code: int


@dataclass(frozen=True, slots=True)
class LookAtProcesses(Action):
    """See where the rank's program stands. `AnswerReady` follows."""

    token: int
    job: JobId
    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class TypeAtTerminal(Action):
    """Pass on what was typed to a rank that runs. `AnswerReady` follows."""

    token: int
    asked: TypeIn
    tenant: str
    """Type only into a job of this tenant; empty: into anyone's."""
    attempt: int


WorkerAction = (
    FindProcesses
    | LookAtProgram
    | RunRank
    | WatchRank
    | SignalRank
    | ForgetRank
    | AwaitEnd
    | ReadRankLog
    | LookAtProcesses
    | TypeAtTerminal
)


class ReportKey(EffectKey, frozen=True):
    """The master is told how an attempt of a rank ended; and the timer before it is told again."""

    job: JobId
    rank: int
    attempt: int


class KillDue(EffectKey, frozen=True):
    """Kills what is left of the job's processes, up to this attempt of the job. `ranks`: of these
    alone; empty: of all."""

    job: JobId
    last: int
    ranks: tuple[int, ...] = ()


class ReservationDue(EffectKey, frozen=True):
    """Room that was kept for ranks is free again: they were never started."""

    job: JobId
    attempt: int
