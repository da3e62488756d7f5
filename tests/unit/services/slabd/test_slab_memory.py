"""A lender's memory itself: what is done to a slab before it is offered, what is told of it."""

import random
from typing import Any

from slackwater.common import metrics
from slackwater.common.clock import LiveClock
from slackwater.common.shell.definition import Level
from slackwater.common.transport.region import Region
from slackwater.common.world import World
from slackwater.schemas.memory import SlabId
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.events import MemorySampled, SlabMade
from slackwater.services.slabd.sessions import Sessions
from slackwater.services.slabd.shell import Slabd
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


def test_the_metrics_tell_its_slabs_and_its_machine() -> None:
    nothing: Any = None
    world = World("slabd-s1", LiveClock(), nothing, nothing, random.Random(1))
    slabd = Slabd(SlabdConfig(slab_bytes=SLAB_BYTES), world, {}, {}, nothing)
    slabd.core.step(MemorySampled(80 * SLAB_BYTES, 8 * SLAB_BYTES, 0.05), 1.0)
    [slab] = slabd.core.slabs
    slabd.core.step(SlabMade(slab), 1.1)
    found = list(slabd.levels())
    assert Level("lender_slabs", {"state": "free"}, 1.0) in found
    assert Level("lender_memory_bytes", {"of": "headroom"}, 10.0 * SLAB_BYTES) in found
    assert Level("lender_pressure", {}, 0.05) in found
    names = {level.name for level in found}
    assert names == {name for name in metrics.LEVELS if name.startswith("lender_")}
