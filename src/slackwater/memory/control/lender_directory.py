"""Keep each lender's last heartbeat: which may be asked for a slab, how full each is. Pure.

Power of two choices compares what two lenders have (placement.py). Their last heartbeats say it,
too, a second late; what this device has taken since, it knows. So a device asks the less used one
for a slab at once, and says how full the other is: a lender that has become fuller than that tells
its usage instead, and only then are both asked. That is one round trip where the paper has two.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from slackwater.common.base import limits
from slackwater.common.domains.memory import coding_sets
from slackwater.memory.control.spans import Member
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import LenderId, SlabdHeartbeat

SLACK: Final = 0.02
"""The share of a machine's memory that a second changes without anybody lending."""


class LenderDirectory:
    """The last heartbeat of each lender, and when it was heard."""

    def __init__(self, slab_bytes: int) -> None:
        self.beats: dict[LenderId, tuple[SlabdHeartbeat, float]] = {}
        self._slab_bytes = slab_bytes

    def update(self, beat: SlabdHeartbeat, now_s: float) -> None:
        """Keep a heartbeat. If two lenders have one id the newer counts: the older ends (slabd)."""
        lender = LenderId(beat.id)
        known, seen_s = self.beats.get(lender, (beat, now_s))
        if beat.incarnation < known.incarnation and now_s - seen_s <= limits.LOST_AFTER_S:
            return
        if lender in self.beats or len(self.beats) < limits.LENDERS_MAX:
            self.beats[lender] = (beat, now_s)

    def eligible(self, now_s: float, node: str) -> dict[LenderId, int]:
        """Lenders that lend our size of slab, on other machines than `node`, and may have one:
        their free slabs."""
        return {
            lender: beat.free_slabs
            for lender, (beat, seen_s) in self.beats.items()
            if now_s - seen_s <= limits.LOST_AFTER_S
            and beat.lending
            and beat.free_slabs > 0
            and beat.slab_bytes == self._slab_bytes
            and beat.node != NodeId(node)
        }

    def load(self, lender: LenderId) -> float:
        return coding_sets.load_of(self.beats[lender][0])

    def slab_share(self, lender: LenderId) -> float:
        """Return the share of its machine's memory that one slab takes."""
        return self._slab_bytes / max(1, self.beats[lender][0].total_bytes)

    def taken_since(self, members: Iterable[Member], began_s: float) -> dict[LenderId, float]:
        """Return the share of each lender's memory that placements begun since then take."""
        taken: dict[LenderId, float] = {}
        for one in members:
            if one.lender in self.beats and one.began_s >= began_s:
                taken[one.lender] = taken.get(one.lender, 0.0) + self.slab_share(one.lender)
        return taken

    def pick_least_used(
        self, chosen: Sequence[LenderId], old: Collection[LenderId], members: Iterable[Member]
    ) -> tuple[LenderId, float]:
        """Return the least used lender of `chosen`, those that are not `old` first, and the usage
        above which another one would be less used, give or take SLACK or a slab; 0: no limit."""
        placed = list(members)

        def usage(lender: LenderId) -> float:
            mine = [one for one in placed if one.lender == lender]
            heard_s = self.beats[lender][1]
            return self.load(lender) + self.taken_since(mine, heard_s).get(lender, 0.0)

        ranked = sorted((lender in old, usage(lender), lender) for lender in chosen)
        (is_old, _, best), others = ranked[0], ranked[1:]
        if not others or others[0][0] != is_old:
            return best, 0.0
        return best, others[0][1] + max(SLACK, self.slab_share(best))
