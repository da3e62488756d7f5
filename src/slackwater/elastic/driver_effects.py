"""Actions that a program's driver wants done, in their order."""

from dataclasses import dataclass
from typing import Any

from slackwater.schemas.base import Message
from slackwater.schemas.elastic import Entry, RunStands


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to a host. `state`: what is kept of this executor under this move follows it."""

    rank: int
    message: Message
    state: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """Put a line into the journal before anything else is done."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Shorten:
    """Put this line into the place of all that are in the journal."""

    entry: RunStands


@dataclass(frozen=True, slots=True)
class KeepState:
    """Keep the state that came with the present frame, under the executor and its move."""

    executor: int
    move: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell people."""

    iteration: int
    of: int
    measured: dict[str, float]


@dataclass(frozen=True, slots=True)
class Finish:
    """The run has ended. `reason` empty: well, with this result."""

    reason: str
    result: Any = None


DriverAction = Send | Write | Shorten | KeepState | Report | Finish
