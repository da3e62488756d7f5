"""Parameters that others go on changing are copied out whole, with what they contain."""

import asyncio
from typing import Any

import numpy as np
import pytest

from slackwater.agent.snapshot import Snapshot, Snapshots, StagedSnapshot
from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded, Unavailable
from slackwater.common.domains.slots.layout import Geometry
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.serving import serve
from slackwater.schemas.base import JobId
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule

ELEMENTS = 6
PLAN = JobPlan(
    job=JobId("j"),
    workers=2,
    gradient_dtype="float32",
    update=UpdateRule(),
    consistency="asynchronous",
    layout_epoch=0,
    token="",
)
LAYOUT = BucketLayout(index=3, first=0, count=1, elements=ELEMENTS)
TENSORS = (TensorSpec(name="w", shape=(ELEMENTS,)),)


def region() -> SlotRegion:
    buffer = bytearray(SlotRegion.nbytes_of(PLAN, LAYOUT, TENSORS))
    made = SlotRegion.format(buffer, PLAN, LAYOUT, TENSORS, 0, owner="a1")
    made.initialize(0)
    return made


def update(it: SlotRegion, rank: int) -> None:
    """Parameters are the number of updates in them: a mixture shows."""
    applied = it.applied()
    applied[rank] += 1
    it.parameters(it.version + 1)[:] = it.version + 1
    it.set_applied(it.version + 1, applied)
    it.version += 1


class Remote:
    """A region that is mapped, or read by a channel."""

    def __init__(self, it: SlotRegion) -> None:
        assert it._buffer is not None
        self.view: Any = memoryview(it._buffer)
        self.nbytes = len(self.view)

    def close(self) -> None:
        pass


class Channel:
    """Between any two reads somebody else's update may come."""

    def __init__(self, it: SlotRegion, updates: list[int]) -> None:
        self.region, self.updates = it, updates
        self.reads = 0

    async def read(self, remote: Remote, offset: int, local: memoryview) -> None:
        self.reads += 1
        local[:] = remote.view[offset : offset + len(local)]
        if self.updates:
            for _ in range(self.updates.pop(0)):
                update(self.region, 1)
        await asyncio.sleep(0)

    async def write(self, local: memoryview, remote: Remote, offset: int) -> None:
        remote.view[offset : offset + len(local)] = local


async def staged(channel: Any, copies: Snapshots) -> StagedSnapshot:
    remote: Any = Remote(channel.region)
    made = await StagedSnapshot.attach(channel, remote, Geometry.of(PLAN, LAYOUT), 0, copies)
    assert isinstance(made, StagedSnapshot)
    return made


def test_a_snapshot_stays_as_it_was_taken() -> None:
    it = region()
    remote: Any = Remote(it)
    copies = Snapshots(ELEMENTS, "float32")
    mapped = Snapshot(remote, PLAN.job, 3, 0, copies)
    update(it, 0)
    first = mapped.parameters(1)
    for _ in range(3):
        update(it, 1)
    assert (mapped.parameters(1) == 1.0).all(), "taken once for an iteration"
    assert copies.applied[1] == (1, 0)
    assert (mapped.parameters(2) == 4.0).all()
    assert copies.applied[0] == (1, 3)
    assert (first == 1.0).all(), "valid until this worker has pushed twice more"


def test_a_copy_that_an_update_overtook_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    it = region()
    remote: Any = Remote(it)
    copies = Snapshots(ELEMENTS, "float32")
    mapped = Snapshot(remote, PLAN.job, 3, 0, copies)
    copyto, torn = np.copyto, iter((2, 1, 0))

    def slowly(into: Any, source: Any) -> None:
        copyto(into[:3], source[:3])
        for _ in range(next(torn)):
            update(it, 1)
        copyto(into[3:], source[3:])

    monkeypatch.setattr(np, "copyto", slowly)
    values = mapped.parameters(1)
    assert values.tolist() == [3.0] * ELEMENTS
    assert copies.applied[1] == (0, 3)

    monkeypatch.setattr(np, "copyto", lambda into, source: update(it, 1))
    monkeypatch.setattr(limits, "SNAPSHOTS_MAX", 5)
    with pytest.raises(DeadlineExceeded, match="5 updates came"):
        mapped.parameters(2)


async def test_what_is_read_from_afar_is_whole_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates come between the reads: of the version, the parameters, the words, the version."""
    it, copies = region(), Snapshots(ELEMENTS, "float32")
    channel = Channel(it, [0, 0, 0, 1, 2, 0, 1, 0, 0, 1])
    slots = await staged(channel, copies)
    await slots.fetch(1)
    assert slots.parameters(1).tolist() == [float(it.version)] * ELEMENTS
    assert sum(copies.applied[1]) == it.version
    assert copies.taken == 1

    before = channel.reads
    await slots.fetch(1)
    assert channel.reads == before, "what was delivered is not touched again"

    monkeypatch.setattr(limits, "SNAPSHOTS_MAX", 3)
    channel.updates = [1] * 100
    with pytest.raises(Unavailable, match="3 updates came"):
        await slots.fetch(2)
    assert copies.taken == 1


async def test_two_reads_of_one_iteration_do_not_mix() -> None:
    """The bucket moved while its parameters were on their way: they are asked for twice, and an
    update comes between."""
    it, copies = region(), Snapshots(ELEMENTS, "float32")
    slow, fast = Channel(it, [0, 0, 0, 0, 2]), Channel(it, [])
    old, new = await staged(slow, copies), await staged(fast, copies)
    await asyncio.gather(old.fetch(1), new.fetch(1))
    assert copies.parameters[1].tolist() == [float(sum(copies.applied[1]))] * ELEMENTS


async def test_what_arrives_too_late_leaves_what_was_read_alone() -> None:
    """It came from where the bucket was before; the program took its copy where it is now."""
    it, copies = region(), Snapshots(ELEMENTS, "float32")
    remote: Any = Remote(it)
    mapped = Snapshot(remote, PLAN.job, 3, 0, copies)
    late = await staged(Channel(it, []), copies)
    fetching = asyncio.create_task(late.fetch(1))
    await asyncio.sleep(0)
    update(it, 0)
    assert (mapped.parameters(1) == 1.0).all()
    update(it, 1)
    await fetching
    assert (mapped.parameters(1) == 1.0).all()
    assert copies.applied[1] == (1, 0)


def pushed(it: SlotRegion, rank: int, iteration: int) -> None:
    """The rank's push is applied, and what it led to is left for it."""
    it.set_pushed(rank, iteration)
    before = it.applied()
    update(it, rank)
    serve(it, before, it.owner)


async def test_what_was_left_for_a_rank_is_read_once_whatever_comes_meanwhile() -> None:
    """Two updates come between any two reads: without a copy none would ever be whole."""
    it, copies = region(), Snapshots(ELEMENTS, "float32")
    channel = Channel(it, [])
    slots = await staged(channel, copies)
    for iteration in range(1, 6):
        pushed(it, 0, iteration)
        led_to, version = it.applied(), it.version
        channel.updates = [2] * 8
        await slots.fetch(iteration)
        assert slots.parameters(iteration).tolist() == [float(version)] * ELEMENTS
        assert list(copies.applied[iteration & 1]) == led_to
    assert (copies.reads, copies.torn) == (5, 0)


async def test_a_copy_of_a_former_life_or_place_is_not_trusted() -> None:
    """The rank's former life may have begun to write its next push over it; slots do not move."""
    it, copies = region(), Snapshots(ELEMENTS, "float32")
    slots = await staged(Channel(it, []), copies)
    pushed(it, 0, 1)
    it.gradient(0)[:] = 99.0
    again = await staged(Channel(it, []), copies)
    await again.fetch(1)
    assert again.parameters(1).tolist() == [1.0] * ELEMENTS
    pushed(it, 0, 2)
    it.location_epoch += 1
    it.gradient(0)[:] = 99.0
    await slots.fetch(2)
    assert slots.parameters(2).tolist() == [2.0] * ELEMENTS
    assert (copies.reads, copies.torn) == (3, 0), "it was asked for with the word, for nothing"
