"""Actions of a lender's core, which its shell carries out, and names of its timers."""

from dataclasses import dataclass

from slackwater.common.base.effects import Action, EffectKey
from slackwater.common.domains.memory.trailer import SlabIdentity
from slackwater.schemas.memory import SlabId, ToDevice


@dataclass(frozen=True, slots=True)
class MakeSlab(Action):
    """Fresh memory, faulted in. `SlabMade` follows."""

    slab: SlabId


@dataclass(frozen=True, slots=True)
class LendSlab(Action):
    """Write whose it is, and give the device of `session` a key; answers its `request`."""

    session: int
    request: int
    identity: SlabIdentity


@dataclass(frozen=True, slots=True)
class RenewSlab(Action):
    """Wipe a slab that was given back in good order: no one may read its old content. `SlabMade`
    follows."""

    slab: SlabId
    session: int
    generation: int


@dataclass(frozen=True, slots=True)
class ReleaseSlab(Action):
    """Give its memory back to the machine; `SlabGone` follows. `forced`: without its device's
    consent, so the channel ends first where memory is not mapped."""

    slab: SlabId
    session: int
    generation: int
    forced: bool = False


@dataclass(frozen=True, slots=True)
class SendToDevice(Action):
    session: int
    message: ToDevice


@dataclass(frozen=True, slots=True)
class CloseSession(Action):
    session: int


LenderAction = MakeSlab | LendSlab | RenewSlab | ReleaseSlab | SendToDevice | CloseSession


class RoundDue(EffectKey, frozen=True):
    """The round of eviction ends without the answers that are missing."""

    number: int


class EvictionDue(EffectKey, frozen=True):
    """The slab is taken by force if its device has not said DONE."""

    slab: SlabId


class HoldDue(EffectKey, frozen=True):
    """The slab is lost to its device if that did not come back."""

    slab: SlabId
