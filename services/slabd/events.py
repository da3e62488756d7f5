"""Events of a lender's core, beside those of every shell: past tense."""

from dataclasses import dataclass

from slackwater.common.base.effects import ShellEvent
from slackwater.common.domains.memory import trailer
from slackwater.schemas.memory import DeviceHello, SlabId, ToLender


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """`others_bytes`: used by everything but our slabs. `pressure`: PSI's share of waiting time."""

    total_bytes: int
    others_bytes: int
    pressure: float = 0.0


@dataclass(frozen=True, slots=True)
class SlabsFound:
    """Slabs that the descriptor store kept: each slab's fence word and identity."""

    found: tuple[tuple[int, trailer.SlabIdentity], ...]


@dataclass(frozen=True, slots=True)
class SlabMade:
    """A new slab is ready, or one that was returned is wiped. `failure`: why not."""

    slab: SlabId
    failure: str = ""


@dataclass(frozen=True, slots=True)
class SlabGone:
    """The slab's memory is the machine's again."""

    slab: SlabId


@dataclass(frozen=True, slots=True)
class SessionOpened:
    session: int
    hello: DeviceHello


@dataclass(frozen=True, slots=True)
class SessionClosed:
    session: int


@dataclass(frozen=True, slots=True)
class Heard:
    session: int
    message: ToLender


Event = (
    ShellEvent
    | MemorySampled
    | SlabsFound
    | SlabMade
    | SlabGone
    | SessionOpened
    | SessionClosed
    | Heard
)
