"""The seam of what happened: facts that the bus carried, kept for a while in their order.

Whoever publishes a fact does not wait for it to be kept, and nothing is decided by what is kept: it
is for people. NATS (`history_nats.py`) captures `sw.v1.evt.>` into one bounded stream; in memory
(`history_memory.py`) the broker does. Both pass one conformance suite.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from slackwater.common.errors import Unavailable
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
    """`at_s`: when the bus had it, since 1970, by its clock alone."""

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
    """Raises Unavailable, DeadlineExceeded, Rejected."""

    async def keep(self, keeping: Keeping) -> bool:
        """Keep facts from now on, or as many as this says; True: something was changed. Repeated
        while nothing differs, it changes nothing."""
        ...

    def read(
        self,
        patterns: Sequence[str] = (),
        *,
        since_s: float = 0.0,
        after: int = 0,
        follow: bool = False,
    ) -> AsyncGenerator[Kept, None]:
        """Facts whose subject fits one of `patterns` (none: all) that the bus had since then, or
        after that sequence, which counts before, in their order; with `follow` those that come,
        too, until the generator is closed, each once, whatever becomes of the server meanwhile.
        Raises NothingKept."""
        ...
