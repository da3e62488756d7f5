"""A program whose gradients and parameters are on a device: the same slots, in device memory.

The slot and both parameter buffers are this worker's own, on its device, so that an aggregator
which dies takes nothing from under the program. Where the aggregator has the bucket on the same
device, a push is one copy on it into the peer's slot, and a pull one out of the peer's parameters
(CUDA IPC). Else the bytes go through host memory: straight to and from a region that is mapped
here, or through pinned buffers and the channel.
"""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackwater.agent.attachment import ELEMENT
from slackwater.agent.region_access import Staged, Staging, Tell
from slackwater.common.base import limits
from slackwater.common.base.errors import Fatal
from slackwater.common.domains.slots.layout import Geometry
from slackwater.common.transport.gpu import Device, DeviceArray, Loan
from slackwater.common.transport.shm import ShmRemoteRegion


def arrived(gradient: Any, device: Device) -> Any:
    """Return the program's array as one of ours. What the program does to it, or to the buffer that
    it was lent, has ended."""
    if gradient is None:
        device.await_program()
    return device.wrap(gradient) if device.is_array(gradient) else gradient


class DeviceStaging(Staging):
    """Raises MemoryError when the device is full."""

    def __init__(self, elements: int, dtype: str, device: Device) -> None:
        self.device = device
        self.gradient: Any = _zeros(device, elements, ELEMENT[dtype])
        self.parameters: Any = [_zeros(device, elements, np.float32) for _ in range(2)]
        self._bounces: dict[str, NDArray[np.uint8]] = {}

    def bounce(self, way: str, nbytes: int) -> memoryview:
        """Host memory for one way, "out" or "in", pinned if that can be had."""
        if way not in self._bounces:
            made = np.empty(nbytes, np.uint8)
            try:
                weakref.finalize(self, self.device.pin(made.data)).atexit = False
            except MemoryError:  # Copies are slower then, and right.
                made.fill(0)
            self._bounces[way] = made
        return self._bounces[way].data


def _zeros(device: Device, elements: int, dtype: Any) -> DeviceArray:
    nbytes = elements * np.dtype(dtype).itemsize
    return DeviceArray(device.allocate(nbytes), 0, (elements,), dtype)


class StagedOnDevice(Staged):
    """`staging` is a DeviceStaging."""

    async def _write_gradient(self, tell: Tell | None) -> None:
        gradient: Any = self.staging.gradient
        offset, nbytes = self._geometry.gradient_offset(self._rank), gradient.nbytes
        memory, start = gradient.memory, gradient.offset
        if (loan := self._loan()) is not None:
            theirs, first = loan
            await _off_loop(nbytes, theirs.copy_from, offset - first, memory, start, nbytes)
        elif (view := self._remote.view) is not None:
            await _off_loop(nbytes, memory.download, start, view[offset : offset + nbytes])
        else:
            out = self._bounce("out", nbytes)
            await _off_loop(nbytes, memory.download, start, out)
            await self._send(out, offset, tell)

    async def fetch(self, version: int) -> None:
        target: Any = self.staging.parameters[version & 1]
        offset, nbytes = self._geometry.parameters_offset(version), target.nbytes
        memory, start = target.memory, target.offset
        if (loan := self._loan()) is not None:
            theirs, first = loan
            await _off_loop(nbytes, memory.copy_from, start, theirs, offset - first, nbytes)
        elif (view := self._remote.view) is not None:
            await _off_loop(nbytes, memory.upload, start, view[offset : offset + nbytes])
        else:
            into = self._bounce("in", nbytes)
            await self._bring(offset, into)
            await _off_loop(nbytes, memory.upload, start, into)
        await self.read_words()

    def _loan(self) -> tuple[Loan, int] | None:
        """The body of the peer's region, where it is open here, and its place in the region."""
        return self._remote.loan if isinstance(self._remote, ShmRemoteRegion) else None

    def _bounce(self, way: str, nbytes: int) -> memoryview:
        assert isinstance(self.staging, DeviceStaging)
        return self.staging.bounce(way, nbytes)


def staged(
    staging: Staging | None, geometry: Geometry, device: Device | None
) -> tuple[type[Staged], Staging]:
    """How a worker with this device attaches from afar, and what it needs here: what it has
    already, or fresh. Raises Fatal: a device without room for the bucket."""
    if device is None:
        return Staged, staging or Staging(geometry.elements, geometry.dtype)
    try:
        made = staging or DeviceStaging(geometry.elements, geometry.dtype, device)
    except MemoryError as error:
        raise Fatal(f"no room on device {device.name} for a bucket: {error}") from error
    return StagedOnDevice, made


async def _off_loop(nbytes: int, work: Callable[..., None], *arguments: Any) -> None:
    """When this returns or raises, nobody touches the memory any more."""
    if nbytes <= limits.COPY_INLINE_BYTES:
        work(*arguments)
        return
    done = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        raise
