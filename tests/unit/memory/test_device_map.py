"""The slab map of a large device comes in parts, each of a size that records and messages take."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slackwater.common.base import codec, limits
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.effects import (
    Effect,
    Persist,
    Recovered,
    Reply,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.memory.service.assembly import DeviceAssembly
from slackwater.memory.service.control_service import (
    ControlService,
    ControlServiceCore,
    MapChanged,
    bucket,
)
from slackwater.memory.service.options import DeviceOptions
from slackwater.schemas.memory import (
    DeviceMap,
    GetMap,
    LenderId,
    SlabId,
    SlabInfo,
    SlabList,
    SpanInfo,
)

MIB, GIB = 1024**2, 1024**3
ID = "d".ljust(63, "x")
"""An id of the greatest length."""


def backed(tmp_path: Path, size: int, slab_bytes: int, resilience: str) -> DeviceAssembly:
    """A device whose every span has all its slabs, of lenders with the longest names."""
    options = DeviceOptions(
        id=ID, size_bytes=size, socket=tmp_path / "nbd", backup=tmp_path / "backup", prefetch=0,
        resilience=resilience,
    )  # fmt: skip
    assembly = DeviceAssembly(options, slab_bytes, LiveClock())
    core = assembly.core
    for span in range(core.settings.spans):
        for member in core.spans.fill(span, 0.0):
            member.state, member.generation = "open", 2**53
            member.lender = LenderId(f"{member.index}".rjust(63, "l"))
            member.slab = SlabId(f"{member.number:012x}")
    core.activity[:] = 123_456.789
    return assembly


def control_service(assembly: DeviceAssembly) -> ControlService:
    status = assembly.status
    return ControlService(ControlServiceCore(ID), status.records, status.map)


def saved(service: ControlService, now_s: float) -> list[Effect]:
    """Say that the map changed; what is saved once the timer that this sets has fired."""
    [timer] = service.step(MapChanged(), now_s)
    assert isinstance(timer, StartTimer)
    return list(service.step(TimerFired(timer.key), timer.at_s))


def written(effects: list[Effect]) -> list[str]:
    return [effect.key for effect in effects if isinstance(effect, Persist)]


def pages(core: ControlService) -> Iterator[DeviceMap]:
    message = GetMap()
    while True:
        [reply] = core.step(Requested(1, message), 0.0)
        assert isinstance(reply, Reply)
        assert isinstance(reply.message, DeviceMap)
        yield reply.message
        if not reply.message.following:
            return
        message = GetMap(first=reply.message.following)


@pytest.mark.parametrize(
    ("size", "slab_bytes", "resilience", "spans", "parts"),
    [
        (64 * GIB, GIB, "8+2", 9, 1),
        (64 * GIB, 64 * MIB, "8+2", 133, 1),
        (4096 * GIB, GIB, "disk", 4096, 3),
        (4096 * GIB, GIB, "8+2", 529, 4),
        (4096 * GIB, 64 * MIB, "8+2", 8449, 56),
        pytest.param(
            4 * GIB,
            limits.SLAB_BYTES_MIN,
            "disk",
            65_536,
            43,
            marks=pytest.mark.slow,
            id="most spans",
        ),
        (16 * MIB, limits.SLAB_BYTES_MIN, "16+16", 18, 1),
    ],
    ids=lambda value: (
        f"{value >> 20} MiB" if isinstance(value, int) and value >= MIB else str(value)
    ),
)
async def test_every_part_is_small_enough(
    size: int, slab_bytes: int, resilience: str, spans: int, parts: int, tmp_path: Path
) -> None:
    """Regression: the record of 4 TiB in coded slabs of 64 MiB would have had 9 MB; at 256 KiB the
    device's control service ended, and the device heard of no lender any more."""
    assembly = backed(tmp_path, size, slab_bytes, resilience)
    assert assembly.core.settings.spans == spans
    records = assembly.status.records()
    assert len(records) == parts
    for record in records.values():
        codec.encode_record(record, 2**53)  # Refuses one that is too large.
    named = [span.span for record in records.values() for span in record.spans]
    assert named == list(range(spans))
    told: list[SpanInfo] = []
    for page in pages(control_service(assembly)):
        codec.encode(page)
        codec.encode(page, json=True)
        told += page.spans
    assert [span.span for span in told] == list(range(spans))


async def test_only_parts_that_changed_are_written(tmp_path: Path) -> None:
    assembly = backed(tmp_path, 4096 * GIB, GIB, "8+2")
    core = control_service(assembly)
    first = list(core.step(Recovered(1, {}), 10.0))
    assert written(first) == ["map", "map-1", "map-2", "map-3"]
    assert not saved(core, 20.0)
    spans = assembly.core.spans
    [lost, *_] = spans.of(200)
    spans.forget(lost)
    [write] = saved(core, 30.0)
    assert isinstance(write, Persist)
    assert (write.bucket, write.key) == (bucket(ID), "map-1")
    kept = {e.key: e.record for e in first if isinstance(e, Persist) and e.record is not None}
    for member in [m for m in spans.all() if m.span >= 153]:
        spans.forget(member)
    anew = list(control_service(assembly).step(Recovered(2, {bucket(ID): kept}), 40.0))
    assert sorted(written(anew)) == ["map-1", "map-2", "map-3"], "the first is what it was"
    assert all(isinstance(effect, Persist) and effect.record is None for effect in anew)


def test_a_lenders_list_fits_one_message() -> None:
    slab = SlabInfo(
        slab=SlabId("f" * 12),
        state="evicting",
        generation=2**53,
        device=ID,
        span=2**53,
        since_s=1e9,
    )
    held = (slab,) * limits.SLABS_HELD_MAX
    message = SlabList(lender=LenderId(ID), slab_bytes=GIB, slabs=held)
    codec.encode(message)
    codec.encode(message, json=True)
