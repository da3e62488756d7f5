"""Actions of a device's core, which lenders.py carries out, and names of its timers."""

from dataclasses import dataclass

from slackwater.common.base.effects import Action, EffectKey
from slackwater.schemas.memory import LenderId, SlabMapped, ToLender


@dataclass(frozen=True, slots=True)
class ConnectLender(Action):
    """`Connected` or `Disconnected` follows."""

    lender: LenderId
    addresses: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SendToLender(Action):
    lender: LenderId
    message: ToLender


@dataclass(frozen=True, slots=True)
class OpenSlab(Action):
    """Open the memory that `message` gives a key to. `Opened` follows."""

    member: int
    lender: LenderId
    message: SlabMapped


@dataclass(frozen=True, slots=True)
class AdmitSlab(Action):
    """Pages are read from the member's slab and written to it from now on."""

    member: int
    span: int
    index: int


@dataclass(frozen=True, slots=True)
class SuspendSlab(Action):
    """The lender is away: nothing is read from the slab or written to it."""

    member: int
    span: int
    index: int


@dataclass(frozen=True, slots=True)
class LeaveSlab(Action):
    """The slab is given up. `Left` follows once nothing reads or writes it any more."""

    member: int
    span: int
    index: int


@dataclass(frozen=True, slots=True)
class SaveMap(Action):
    """The slab map has changed; it is stored for the next life."""


DeviceAction = (
    ConnectLender | SendToLender | OpenSlab | AdmitSlab | SuspendSlab | LeaveSlab | SaveMap
)


class MemberKey(EffectKey, frozen=True):
    member: int


class PlacementDue(MemberKey, frozen=True):
    """Lenders that were asked for the member's slab have had their time."""


class ClaimDue(MemberKey, frozen=True):
    """The member's slab is claimed, again."""


class LossDue(MemberKey, frozen=True):
    """The member's lender has been away for too long."""
