"""Write into a slot region what an Agent writes there."""

from slackwater.common.domains.slots.layout import WORD
from slackwater.common.domains.slots.region import SlotRegion


def count(region: SlotRegion, rank: int, pushed: int = 0, pulled: int = 0) -> None:
    """Add to the rank's counters the bytes that it moved (agent/region_access.py)."""
    at = region.geometry.counters_offset(rank) // WORD
    for word, nbytes in enumerate((pushed, pulled)):
        region._words[at + word] += nbytes
