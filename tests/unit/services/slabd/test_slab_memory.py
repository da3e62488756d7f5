"""A lender's memory itself: what is done to a slab before it is offered, what is told of it."""

import os
import random
from typing import Any

import pytest

from slackwater.common.base import codec
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import AccessRefused
from slackwater.common.domains.memory import trailer
from slackwater.common.shell import metrics
from slackwater.common.shell.definition import Level
from slackwater.common.shell.process import Process
from slackwater.common.shell.world import World
from slackwater.common.transport.region import Region
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import DeviceHello, DeviceId, SlabId
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.effects import MakeSlab, ReleaseSlab, RenewSlab
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
    made = await slabs.make(MakeSlab(SLAB))
    assert (made.slab, made.failure) == (SLAB, "")
    assert registered == [slabs.regions[SLAB]]
    assert slabs.resident_bytes() >= SLAB_BYTES
    slabs.close()


def test_the_metrics_tell_its_slabs_and_its_machine() -> None:
    nothing: Any = None
    world = World("slabd-s1", LiveClock(), nothing, nothing, nothing, random.Random(1), nothing)
    slabd = Slabd(SlabdConfig(slab_bytes=SLAB_BYTES), world, {}, {}, nothing)
    slabd.core.step(MemorySampled(80 * SLAB_BYTES, 8 * SLAB_BYTES, 0.05), 1.0)
    [slab] = slabd.core.slabs
    slabd.core.step(SlabMade(slab), 1.1)
    found = list(slabd.service_gauges())
    assert Level("lender_slabs", {"state": "free"}, 1.0) in found
    assert Level("lender_memory_bytes", {"of": "headroom"}, 10.0 * SLAB_BYTES) in found
    assert Level("lender_pressure_ratio", {}, 0.05) in found
    names = {level.name for level in found}
    assert names == {
        name
        for name, family in metrics.FAMILIES.items()
        if name.startswith("lender_") and family.kind == "gauge"
    }


async def test_memory_that_is_being_made_or_freed_counts_as_the_lenders_own() -> None:
    """If it counted as somebody else's, the lender would give up a slab for it."""
    slabs = Slabs(SLAB_BYTES, Sessions("secret"), at_once)
    seen: list[int] = []
    slabs.prepare = lambda region: seen.append(slabs.resident_bytes())
    await slabs.make(MakeSlab(SLAB))
    assert seen == [SLAB_BYTES + trailer.TRAILER_BYTES]
    [region] = slabs.regions.values()
    region.when_closed(lambda: seen.append(slabs.resident_bytes()))
    await slabs.release(ReleaseSlab(SLAB, 0, 0, False))
    assert seen[1:] == [0]


async def test_no_room_for_fresh_memory_is_told() -> None:
    slabs = Slabs(2**50, Sessions("secret"), at_once)
    made = await slabs.make(MakeSlab(SLAB))
    assert made.failure
    assert not slabs.regions
    assert not slabs.resident_bytes()


async def test_memory_that_was_lent_in_a_former_life_is_not_lent_again() -> None:
    """Its device may have mapped it, whichever way it comes back."""
    former = Slabs(SLAB_BYTES, Sessions("secret"), at_once)
    await former.make(MakeSlab(SLAB))
    identity = trailer.SlabIdentity(slab=SLAB, slab_bytes=SLAB_BYTES, generation=1, hold_s=9.0)
    trailer.write(former.regions[SLAB].buffer, trailer.LENT, identity)
    fd = os.dup(former.regions[SLAB].fileno())
    old = former.regions[SLAB]
    slabs = Slabs(SLAB_BYTES, Sessions("secret"), at_once)
    await slabs.recover(Process(stored=(("slab", fd),)))
    assert await slabs.renew(RenewSlab(SLAB, 0, 1)) == SlabMade(SLAB)
    inode, fresh = (os.fstat(region.fileno()).st_ino for region in (old, slabs.regions[SLAB]))
    assert fresh != inode
    assert trailer.read_fence(old.buffer) == trailer.fence(trailer.REVOKED, 1)
    word, found = trailer.read(slabs.regions[SLAB].buffer)
    assert (trailer.fence_state(word), found.generation) == (trailer.FREE, 1)
    former.close()
    slabs.close()


async def test_a_device_that_writes_into_the_trailer_cannot_end_the_lender() -> None:
    slabs = Slabs(SLAB_BYTES, Sessions("secret", mapping=frozenset(("shm",))), at_once)
    await slabs.make(MakeSlab(SLAB))
    slabs.regions[SLAB].buffer[SLAB_BYTES:] = b"\xff" * trailer.TRAILER_BYTES
    assert await slabs.renew(RenewSlab(SLAB, 0, 3)) == SlabMade(SLAB)
    slabs.regions[SLAB].buffer[SLAB_BYTES:] = b"\xff" * trailer.TRAILER_BYTES
    assert (await slabs.release(ReleaseSlab(SLAB, 0, 3, True))).slab == SLAB


def test_the_next_token_is_let_in_beside_this_one() -> None:
    """While a token is changed, devices and lenders have it at different times."""
    hello = codec.encode(
        DeviceHello(device=DeviceId("d1"), node=NodeId("n1"), incarnation=1, token="next")
    )
    with pytest.raises(AccessRefused, match="another cluster_token"):
        Sessions("this").accept("tcp", hello)
    Sessions("this", "next").accept("tcp", hello)
    assert SlabdConfig(id="a", cluster_token="this").cluster_tokens == ("this",)
    both = SlabdConfig(id="a", cluster_token="this", cluster_token_also="next")
    assert both.cluster_tokens == ("this", "next")
