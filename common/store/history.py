"""The seam of what happened: facts that the bus carried, kept for a while in their order.

Whoever publishes a fact does not wait for it to be kept, and nothing is decided by what is kept: it
is for people. NATS (`history_nats.py`) captures `sw.v1.evt.>` into one bounded stream; in memory
(`history_memory.py`) the broker does. Both pass one conformance suite.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from slackwater.common.base.errors import Unavailable
from slackwater.schemas import subjects

STREAM: Final = "facts"
SUBJECTS: Final = subjects.facts()


class NothingKept(Unavailable):
    """The stream of facts does not exist."""

    def __init__(self) -> None:
        super().__init__(
            f"no facts are kept here: the leading master makes the stream {STREAM!r}; it is of an "
            "older version, does not run, or says in its log why it cannot; `slackwater tap` shows "
            "facts as they come"
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept fact. `at_s`: seconds since 1970 when the bus received it, by the bus's clock."""

    subject: str
    payload: bytes
    sequence: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Keeping:
    """Bounds how much is kept; the oldest facts go first."""

    nbytes: int
    seconds: float
    per_subject: int
    """Facts of one subject: a thing that happens to one job again and again leaves room for all
    others."""
    replicas: int = 1
    """Servers of a NATS cluster that have a copy."""


class History(Protocol):
    """Keeps facts. Its methods raise Unavailable, DeadlineExceeded and Rejected."""

    async def keep(self, keeping: Keeping) -> bool:
        """Keep facts from now on, within these bounds. Return whether this changed anything:
        repeated, it does not."""
        ...

    def read(
        self,
        patterns: Sequence[str] = (),
        *,
        since_s: float = 0.0,
        after: int = 0,
        follow: bool = False,
    ) -> AsyncGenerator[Kept, None]:
        """Yield facts in their order whose subject matches one of `patterns` (none: all). `after`,
        if given, counts before `since_s`. With `follow` later facts come, too, until the generator
        is closed, each once, whatever becomes of the server meanwhile. Raises NothingKept."""
        ...
