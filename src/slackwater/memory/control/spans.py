"""The spans of a device and the slabs behind them: which slab backs what. Pure.

A member's states (`TRANSITIONS` has them as a table):

              MAP            MR_INFO             mapped
    placing ---------> mapping ---------> opening ------> open
       ^                 |                 ^  |             |
       +-----------------+                 |  |             | the channel is lost
        refused, too late                  |  v             v
                                       claiming <------ suspended
                                           |   CLAIM        |
                            slab is gone   v                v  away too long
    leaving <---------- (from each of these four: EVICT, cold, lost) ; then it is forgotten
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from slackwater.common.base.transitions import Story
from slackwater.schemas.memory import (
    Activity,
    CheckActivity,
    DeviceId,
    FreeMemory,
    LenderId,
    MemberRecord,
    SlabId,
    SpanRecord,
    SpanState,
)

HOT: Final = 20.0
"""HotSlab: page I/O requests per second."""

MemberState = Literal["placing", "mapping", "opening", "open", "suspended", "claiming", "leaving"]
Why = Literal["evict", "cold", "lost"]

TRANSITIONS: Final[Mapping[MemberState, frozenset[MemberState]]] = {
    "placing": frozenset({"placing", "mapping"}),
    "mapping": frozenset({"placing", "opening"}),
    "opening": frozenset({"open", "suspended", "leaving"}),
    "open": frozenset({"suspended", "leaving"}),
    # A channel that is lost again while a claim is under way suspends anew.
    "suspended": frozenset({"claiming", "leaving"}),
    "claiming": frozenset({"opening", "suspended", "leaving"}),
    "leaving": frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """`width` members back a span; fewer than `needed`, and it is unmapped."""

    id: DeviceId
    node: str = ""
    spans: int
    width: int = 1
    needed: int = 1
    hot: float = HOT
    cold: float = 0.0
    """ColdSlab: a mapped span below is given back; 0: never."""
    hold_s: float = 10.0
    """A lender that is away so long has lost our slabs."""
    secret: str = ""


@dataclass(slots=True)
class Member:
    """A slab behind a span, or the search for one. `number`: of this attempt, told by events."""

    span: int
    index: int
    number: int
    state: MemberState
    lender: LenderId | None = None
    slab: SlabId | None = None
    generation: int = 0
    began_s: float = 0.0
    asked: set[LenderId] = field(default_factory=set)
    answers: list[tuple[LenderId, FreeMemory]] = field(default_factory=list)
    excluded: set[LenderId] = field(default_factory=set)
    attempts: int = 0
    refusal: str = ""
    """The refusal of the last lender that was asked in vain."""
    why: Why = "lost"
    whole: bool = False
    """It has the fragment of every page of its span."""
    wanted: bool = False
    """Its lender asked for it, and waits until the span can do without it."""
    story: Story = field(default_factory=Story, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.story.begin(self.state, "it begins")

    def move(self, new: MemberState, why: str) -> None:
        """Raises InvalidTransition: the table has no such one."""
        thing = f"member {self.number} of span {self.span}"
        self.story.move(thing, self.state, new, why, TRANSITIONS)
        self.state = new

    def search(self, why: str) -> None:
        """Look for a lender, with none chosen yet."""
        self.move("placing", why)
        self.lender = None

    def map_at(self, lender: LenderId) -> None:
        self.move("mapping", f"MAP to {lender}")
        self.lender = lender

    def suspend(self, why: str) -> None:
        self.move("suspended", why)
        self.whole = False

    def leave(self, why: Why) -> None:
        self.move("leaving", why)
        self.why = why

    @property
    def usable(self) -> bool:
        return self.state == "open"

    @property
    def counts(self) -> bool:
        """It has a slab that is, or may soon again be, the span's."""
        return self.slab is not None and self.state in ("open", "suspended", "claiming")

    def record(self) -> MemberRecord | None:
        """None while it has no slab that counts."""
        if not self.counts or self.slab is None or self.lender is None:
            return None
        return MemberRecord(lender=self.lender, slab=self.slab, generation=self.generation)


class Spans:
    """Members by span and by number. A span that neither has a slab nor looks for one is absent."""

    def __init__(self, settings: DeviceSettings) -> None:
        self._settings = settings
        self._spans: dict[int, list[Member | None]] = {}
        self._members: dict[int, Member] = {}
        self._number = 0

    def all(self) -> list[Member]:
        return list(self._members.values())

    def numbered(self, number: int) -> Member | None:
        return self._members.get(number)

    def in_use(self) -> list[int]:
        return list(self._spans)

    def of(self, span: int) -> list[Member]:
        return [member for member in self._spans.get(span, ()) if member is not None]

    def thinned(self) -> list[int]:
        """Spans in use that lack members: redundancy is put back whether they are hot or not."""
        return [
            span
            for span, members in self._spans.items()
            if None in members and any(m is not None and m.usable for m in members)
        ]

    def on(self, lender: LenderId) -> list[Member]:
        return [member for member in self._members.values() if member.lender == lender]

    def needs(self, member: Member) -> bool:
        """Tell whether some page could not be read from the others."""
        others = sum(m.usable and m.whole for m in self.of(member.span) if m is not member)
        return member.usable and member.whole and others < self._settings.needed

    def active(
        self, lender: LenderId, message: CheckActivity, rates: NDArray[np.float64]
    ) -> Activity:
        """Return the answer, by `rates` of spans."""
        known = {m.slab: m for m in self.on(lender)}
        asked = [(slab, known.get(slab)) for slab in message.slabs]
        return Activity(
            round=message.round,
            activity=tuple((slab, float(rates[m.span]) if m else 0.0) for slab, m in asked),
            needed=tuple(slab for slab, m in asked if m and self.needs(m)),
        )

    def fill(self, span: int, now_s: float) -> list[Member]:
        """A new member in every place that has none."""
        members = self._spans.setdefault(span, [None] * self._settings.width)
        made = []
        for index, member in enumerate(members):
            if member is None:
                self._number += 1
                new = Member(span, index, self._number, "placing", began_s=now_s)
                members[index] = self._members[self._number] = new
                made.append(new)
        return made

    def forget(self, member: Member) -> None:
        self._members.pop(member.number, None)
        members = self._spans.get(member.span)
        if members is None:
            return
        members[member.index] = None
        if not any(members):
            del self._spans[member.span]

    def check_invariants(self) -> None:
        """Raises AssertionError, with the member's story, when its fields do not fit its state."""
        for span, members in self._spans.items():
            assert any(members), f"span {span} has no member, and is not absent"
        for number, member in self._members.items():
            has_slab = member.slab is not None and member.lender is not None
            looking = member.state in ("placing", "mapping")
            good = {
                "in its place": self._spans[member.span][member.index] is member,
                "known by its number": number == member.number,
                "without a slab while it looks for one": not looking or member.slab is None,
                "with a lender once it asked for a slab": (member.state == "placing")
                == (member.lender is None),
                "with a slab from then on": looking or has_slab,
                "whole only while it is open, or leaves": not member.whole
                or member.state in ("open", "leaving"),
            }
            broken = [what for what, holds in good.items() if not holds]
            assert not broken, f"member {number} is {member.state}: {broken}; {member.story}"

    # For operators and the slab map ---------------------------------------------------------------

    def state(self, span: int) -> SpanState:
        """Return the state of the span's members, taken together."""
        states = {member.state for member in self.of(span)}
        if sum(member.usable for member in self.of(span)) >= self._settings.needed:
            return "mapped"
        if "leaving" in states:
            return "retreating"
        if states & {"suspended", "claiming"}:
            return "suspended"
        return "placing" if states else "unmapped"

    def records(self, span: int) -> tuple[MemberRecord | None, ...]:
        return tuple(
            None if member is None else member.record() for member in self._spans.get(span, ())
        )

    def span_records(self) -> tuple[SpanRecord, ...]:
        found = [SpanRecord(span=span, members=self.records(span)) for span in sorted(self._spans)]
        return tuple(record for record in found if any(record.members))
