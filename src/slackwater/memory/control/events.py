"""Events of a device's core: past tense, by its driver (lenders.py) or a simulation."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.effects import TimerFired
from slackwater.schemas.memory import LenderId, SlabdHeartbeat, ToDevice


@dataclass(frozen=True, slots=True)
class ActivityMeasured:
    """Page I/O requests of each span in the last `period_s`."""

    counts: NDArray[np.int64]
    period_s: float = 1.0


@dataclass(frozen=True, slots=True)
class LenderSeen:
    heartbeat: SlabdHeartbeat


@dataclass(frozen=True, slots=True)
class Connected:
    lender: LenderId


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The channel is lost, or could not be had."""

    lender: LenderId
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    lender: LenderId
    message: ToDevice


@dataclass(frozen=True, slots=True)
class Opened:
    """The slab can be read and written; `failure`: or not."""

    member: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """A member now has the fragments of all pages that were written before it came."""

    member: int


@dataclass(frozen=True, slots=True)
class Left:
    """Nothing reads or writes the slab any more."""

    member: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """A copy out of the span's slab came too late: the lender has taken it away."""

    span: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """The device ends: its slabs go back."""


Event = (
    ActivityMeasured
    | LenderSeen
    | Connected
    | Disconnected
    | Heard
    | Opened
    | Left
    | Restored
    | Fenced
    | Stopping
    | TimerFired
)
