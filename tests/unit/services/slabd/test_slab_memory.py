"""A lender's memory itself: what is done to a slab before anybody may have it."""

from slackwater.common.transport.region import Region
from slackwater.schemas.memory import SlabId
from slackwater.services.slabd.sessions import Sessions
from slackwater.services.slabd.slabs import Slabs, at_once

SLAB = SlabId("0123456789ab")
SLAB_BYTES = 64 * 1024


async def test_a_slab_is_resident_and_registered_before_it_is_offered() -> None:
    """With the NIC, too: to map a slab is then a matter of messages (2.7.4.1)."""
    slabs = Slabs(SLAB_BYTES, Sessions("secret"), at_once)
    registered: list[Region] = []
    slabs.prepare = registered.append
    made = await slabs.make(SLAB)
    assert (made.slab, made.failure) == (SLAB, "")
    assert registered == [slabs.regions[SLAB]]
    assert slabs.resident_bytes() >= SLAB_BYTES
    slabs.close()
