"""Describe a rank that a worker service knows, and room that it keeps for ranks to come."""

from dataclasses import dataclass

from slackwater.schemas.base import JobId
from slackwater.schemas.workers import RESERVED_S
from slackwater.services.worker.events import RankState


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
    code: int = 0
    result: str = ""
    attempt: int = 0
    gpu_ids: tuple[str, ...] = ()
    """GPUs that are its own."""

    @property
    def over(self) -> bool:
        return self.state in ("exited", "reported")
