"""One slab of a lender, as its core knows it: its states, and which may follow which.

         MAP            EVICT             DONE, or time is up
free ----------> lent ----------> evicting -------------------+
 ^  |            |  ^ |                                       |
 |  |      UNMAP |  | | its device is gone                    v
 |  |            v  | +-------------> held ------------> leaving (its memory goes back)
 |  |     renewing  +----- CLAIM ------+    time is up        ^
 |  |            |                                            |
 |  +------------|-- memory is needed ------------------------+
 +---------------+
making begins a slab; renewing makes one that was given back anew
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from slackwater.common.base.transitions import Story
from slackwater.common.domains.memory import trailer
from slackwater.schemas.memory import SLABS_PER_MESSAGE, SlabId, SlabInfo, SlabState

TRANSITIONS: Final[Mapping[SlabState, frozenset[SlabState]]] = {
    "making": frozenset({"free"}),
    "free": frozenset({"lent", "leaving"}),
    # Lent again: its device claims it on the channel that has it.
    "lent": frozenset({"lent", "evicting", "held", "renewing", "leaving"}),
    "evicting": frozenset({"leaving"}),
    "held": frozenset({"lent", "leaving"}),
    "renewing": frozenset({"free"}),
    "leaving": frozenset(),
}


@dataclass(slots=True)
class Slab:
    """`session` 0: its device is not connected."""

    id: SlabId
    state: SlabState
    generation: int = 0
    device: str = ""
    session: int = 0
    span: int = 0
    member: int = 0
    secret: str = ""
    hold_s: float = 0.0
    since_s: float = 0.0
    asked_s: float = 0.0
    """EVICT was sent."""
    story: Story = field(default_factory=Story, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.story.begin(self.state, "it is made or found")

    def move(self, new: SlabState, why: str) -> None:
        """Raises InvalidTransition: the table has no such one."""
        self.story.move(f"slab {self.id}", self.state, new, why, TRANSITIONS)
        self.state = new

    def become_free(self) -> None:
        self.move("free", "its memory is new")
        self.device, self.session, self.secret = "", 0, ""
        self.span = self.member = 0

    def info(self) -> SlabInfo:
        """For operators."""
        return SlabInfo(
            slab=self.id,
            state=self.state,
            generation=self.generation,
            device=self.device,
            span=self.span,
            since_s=self.since_s,
        )


def state_found(word: int, hold_s: float) -> SlabState:
    """Return the state of a slab that the last daemon left behind, by its fence word. One that was
    lent waits for its claim; what nobody may claim was being taken away."""
    state = trailer.fence_state(word)
    if state == trailer.FREE:
        return "renewing"
    return "held" if state == trailer.LENT and hold_s > 0 else "evicting"


def check_invariants(slabs: Mapping[SlabId, Slab], sessions: Collection[int]) -> None:
    """Raises AssertionError, with the slab's story, when its fields do not fit its state."""
    for id, slab in slabs.items():
        used = slab.state in ("lent", "evicting")
        good = {
            "known by its id": id == slab.id,
            "lent to a session that is open": not used or slab.session in sessions,
            "lent, so it has a generation": not used or slab.generation > 0,
            "held, so for nobody's session": slab.state != "held" or slab.session == 0,
            "nobody's while it is free": slab.state not in ("making", "free")
            or (slab.device, slab.session, slab.secret) == ("", 0, ""),
        }
        broken = [what for what, holds in good.items() if not holds]
        assert not broken, f"slab {id} is {slab.state}: {broken}; before: {slab.story}"


def by_session(slabs: Iterable[Slab]) -> list[tuple[int, tuple[SlabId, ...]]]:
    """Group slabs by their devices' sessions, in parts that fit one message."""
    grouped: dict[int, list[SlabId]] = {}
    for slab in slabs:
        grouped.setdefault(slab.session, []).append(slab.id)
    return [
        (session, tuple(part[first : first + SLABS_PER_MESSAGE]))
        for session, part in grouped.items()
        for first in range(0, len(part), SLABS_PER_MESSAGE)
    ]
