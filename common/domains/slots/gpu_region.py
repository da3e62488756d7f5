"""A bucket's region whose slots and buffers are on a device.

The header and the record stay in the memfd: words are stored and polled by CPUs at both ends. The
body (gradient slots, parameters, optimiser states: all between them) is the device's memory. The
layout is the same to the byte, so that offsets mean the same to every remote party.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from slackwater.common.domains.slots.gpu_kernels import FoldKernels, kernels_of
from slackwater.common.domains.slots.layout import HEADER_BYTES, Geometry, bucket_plan
from slackwater.common.domains.slots.region import RegionRecord, SlotRegion
from slackwater.common.domains.slots.rules import STORED_DTYPES
from slackwater.common.transport.gpu import Device, DeviceArray, DeviceMemory, DeviceRegion
from slackwater.common.transport.region import Region
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec


def slot_body(geometry: Geometry) -> tuple[int, int]:
    """Return the part of a region that is on the device, as (offset, bytes)."""
    return HEADER_BYTES, geometry.nbytes


class DeviceSlotRegion(SlotRegion):
    """A region whose arrays are DeviceArrays."""

    def __init__(self, region: DeviceRegion, record: RegionRecord, identity: bytes) -> None:
        super().__init__(region.buffer, record, identity)
        self._memory: DeviceMemory | None = region.memory
        self._kernels = kernels_of(region.memory.device)

    @classmethod
    def at(cls, region: DeviceRegion) -> "DeviceSlotRegion":
        """Raises Rejected when the memfd holds no region's header and record."""
        plain = SlotRegion.open(region.buffer)
        made = cls(region, plain.record, plain.identity)
        plain.release()
        return made

    @property
    def kernels(self) -> FoldKernels:
        return self._kernels

    def to_host(self, array: Any) -> Any:
        return array.to_host()

    def release(self) -> None:
        super().release()
        self._memory = None

    def _array(self, offset: int, count: int, dtype: Any) -> Any:
        assert self._memory is not None, "the region was released"
        return DeviceArray(self._memory, offset - HEADER_BYTES, (count,), dtype)

    def _floats(self, offset: int) -> Any:
        return self._array(offset, self.geometry.elements, np.float32)

    def gradient(self, rank: int) -> Any:
        dtype = STORED_DTYPES[self.geometry.dtype]
        return self._array(self.geometry.gradient_offset(rank), self.geometry.elements, dtype)

    def slots(self, dtype: type[np.generic]) -> Any:
        geometry = self.geometry
        count = geometry.workers * geometry.slot_stride // np.dtype(dtype).itemsize
        return self._array(geometry.slots_offset, count, dtype)


def make_region(
    device: Device,
    plan: JobPlan,
    layout: BucketLayout,
    tensors: Sequence[TensorSpec],
    location_epoch: int,
    owner: str,
    *,
    pin: bool,
) -> tuple[DeviceRegion, DeviceSlotRegion]:
    """A fresh one. Raises MemoryError, Rejected."""
    nbytes = SlotRegion.nbytes_of(plan, layout, tensors)
    body = slot_body(Geometry.of(bucket_plan(plan, tensors), layout))
    region = DeviceRegion.on(device, nbytes, f"{plan.job}.{layout.index}", body, pin=pin)
    SlotRegion.format(region.buffer, plan, layout, tensors, location_epoch, owner=owner)
    return region, DeviceSlotRegion.at(region)


def load_region(
    device: Device, host: Region, *, pin: bool
) -> tuple[DeviceRegion, DeviceSlotRegion]:
    """Copy a host region's content to the device. The host region stays as it is. Raises
    MemoryError, Rejected."""
    plain = SlotRegion.open(host.buffer)
    body = slot_body(plain.geometry)
    plain.release()
    region = DeviceRegion.on(device, host.nbytes, host.label, body, pin=pin)
    try:
        for part in (slice(0, body[0]), slice(body[1], None)):
            region.buffer[part] = host.buffer[part]
        region.load(host)  # After the words: a slot is there whole when its word says so.
        return region, DeviceSlotRegion.at(region)
    except BaseException:
        region.close()
        raise
