"""Describe a rank that a worker service knows, and room that it keeps for ranks to come."""

import signal
from dataclasses import dataclass

from slackwater.common.base import limits
from slackwater.schemas.base import RUN_ATTEMPTS, TOO_MANY, JobId, NodeId, Refused
from slackwater.schemas.gpus import described
from slackwater.schemas.job_checks import holds_nul
from slackwater.schemas.workers import RESERVED_S, PrepareWorkers, StartWorkers
from slackwater.services.worker.effects import RunRank
from slackwater.services.worker.events import Found, RankState


@dataclass(slots=True)
class Reserved:
    """Room that is kept for ranks until they start, and where they meet, also afterwards: a master
    that was restarted asks again, and starts ranks again."""

    attempt: int
    ranks: int
    gpu_ids: tuple[str, ...]
    since_s: float = 0.0
    """When its program was last looked at."""
    host: str = ""
    port: int = 0
    seconds: float = RESERVED_S
    """How long it is kept for ranks that do not start."""
    rendezvous: str = ""
    """Equals what the ranks were started with; empty: they were not."""


@dataclass(slots=True)
class Rank:
    job: JobId
    rank: int
    state: RankState
    code: int | None = 0
    """None: it is not known."""
    result: str = ""
    attempt: int = 0
    gpu_ids: tuple[str, ...] = ()
    """GPUs that are its own."""

    @property
    def over(self) -> bool:
        return self.state in ("exited", "reported")


def misfit(node: NodeId, message: StartWorkers | PrepareWorkers) -> Refused | None:
    """Refuse ranks that cannot be started anywhere, or of a job that, by its own allocation, has
    none here."""
    if not message.program:
        reason = f"job {message.job} has no program; its user starts it by hand"
        return Refused(reason=reason)
    if odd := holds_nul(message.program, message.folder, message.env):
        return Refused(reason=odd)
    if isinstance(message, PrepareWorkers):
        return None
    meets = message.rendezvous
    if meets and not meets.rpartition(":")[2].isdecimal():
        return Refused(reason=f"rendezvous: {meets!r} is not host:port")
    if message.allocation and message.ranks and not message.gpu_ids:
        reason = f"{node}: job {message.job} was given GPUs, and none of them is named"
        return Refused(reason=reason, retry_after_s=1.0, code=TOO_MANY)
    if not message.allocation or node in dict(message.allocation):
        return None
    where = described(message.allocation)
    return Refused(reason=f"{node}: job {message.job} has nothing here, but on {where}")


def still_reading() -> Refused:
    """Say that the service does not know yet what runs on its node."""
    reason = "the worker service is still reading what runs here"
    return Refused(reason=reason, retry_after_s=limits.RETRY_WAIT_S_MIN)


def said(code: int | None) -> int:
    """Return the code as messages have it, where one that is not known looks like a kill."""
    return -signal.SIGKILL if code is None else code


def run(rank: Rank, asked: StartWorkers | Found) -> RunRank:
    """Return the effect that starts the rank's process. Ranks without GPUs that all begin here meet
    here, and one of them that is started again meets where they did."""
    together = False
    if isinstance(asked, StartWorkers) and not rank.gpu_ids and asked.workers > 1:
        together = len(asked.ranks) == asked.workers or rank.attempt % RUN_ATTEMPTS > 0
    return RunRank(
        rank.job, rank.rank, rank.attempt, asked.workers, asked.program, asked.folder,
        rank.gpu_ids, asked.allocation, asked.env, asked.rendezvous, asked.pack, asked.venv,
        asked.tenant, together,
    )  # fmt: skip
