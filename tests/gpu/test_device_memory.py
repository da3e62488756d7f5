"""Allocations, arrays, handles: what a device must do for the transports, whichever it is."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu.fake_cupy import FakeArray, FakeError, fake_device

from slackwater.common.base.errors import AccessRefused, ConfigRejected, Fatal, Rejected
from slackwater.common.transport import gpu_cuda
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.fake_gpu import FakeDevice
from slackwater.common.transport.gpu import (
    Device,
    DeviceArray,
    DeviceRegion,
    borrow,
    copy_into,
    reap,
)


def numbers(device: Device, values: np.ndarray) -> DeviceArray:
    made = DeviceArray(device.allocate(values.nbytes), 0, values.shape, values.dtype)
    made.assign(values)
    return made


def nothing() -> None:
    """Told that a loan is given back."""


def test_memory_is_zeroed_and_copies_go_where_they_should(device: Device) -> None:
    memory = device.allocate(10_000)
    back = memoryview(bytearray(10_000))
    memory.download(0, back)
    assert bytes(back) == bytes(10_000)
    memory.upload(100, memoryview(b"abcdef"))
    memory.copy_from(200, memory, 100, 6)
    memory.download(0, back)
    assert bytes(back[100:106]) == bytes(back[200:206]) == b"abcdef"
    assert sum(back) == 2 * sum(b"abcdef")
    for offset, nbytes in ((-1, 1), (9_999, 2), (10_001, 1)):
        with pytest.raises(Rejected):
            memory.upload(offset, memoryview(bytes(nbytes)))
        with pytest.raises(Rejected):
            memory.download(offset, memoryview(bytearray(nbytes)))


def test_arrays_are_reached_by_copies_alone(device: Device) -> None:
    values = np.arange(12, dtype=np.float32)
    array = numbers(device, values)
    with pytest.raises(TypeError, match="copy them"):
        np.asarray(array)
    assert (array.to_host() == values).all()
    assert (array[3:7].to_host() == values[3:7]).all()
    square = array.reshape((3, 4))
    assert square.to_host().shape == (3, 4)
    square.assign(np.ones((4, 3), np.float32).T)
    assert (array.to_host() == 1).all()
    other = numbers(device, 2 * values)
    copy_into(array, other)
    target = np.zeros((3, 4), np.float32)
    copy_into(target, array)
    assert (target.ravel() == 2 * values).all()
    with pytest.raises(Rejected, match="cannot be copied"):
        array.assign(values.astype(np.float64))
    with pytest.raises(Rejected, match="on the device"):
        DeviceArray(array.memory, 1 << 30, (1,), np.uint8)


def test_a_region_knows_its_bytes_and_forgets_them_when_closed(device: Device) -> None:
    region = DeviceRegion.on(device, 10_000, "r", (4096, 8192))
    region.buffer[:4] = b"head"
    region.buffer[4096:4100] = b"body"
    region.arrived(0, 10_000)
    region.buffer[4096:4100] = bytes(4)
    whole = region.whole()
    assert (bytes(whole.buffer[:4]), bytes(whole.buffer[4096:4100])) == (b"head", b"body")
    whole.close()
    region.fetch(4098, 1)
    assert bytes(region.buffer[4096:4100]) == b"\0\0d\0"
    region.close()
    region.close()
    region.arrived(0, 10_000)
    with pytest.raises(Rejected, match="closed"):
        region.memory  # noqa: B018 (it raises)
    for body in ((0, 0), (-1, 5), (5, 10_001)):
        with pytest.raises(Rejected, match="a body of bytes"):
            DeviceRegion.on(device, 10_000, "r", body)


def test_its_own_process_gets_the_allocation_itself(device: Device) -> None:
    """CUDA does not open a handle in the process that made it."""
    region = DeviceRegion.on(device, 4096, "r")
    given_back: list[int] = []
    invitation = region.invitation()
    loan = borrow(device, invitation, lambda: given_back.append(1))
    assert loan is not None
    loan.upload(7, memoryview(b"same"))
    whole = region.whole()
    assert bytes(whole.buffer[7:11]) == b"same"
    whole.close()
    region.close()
    assert reap() == 0
    back = memoryview(bytearray(4))
    loan.download(7, back)
    assert bytes(back) == b"same", "the loan keeps it"
    del loan
    assert given_back == [1]
    with pytest.raises(AccessRefused, match="freed"):
        borrow(device, invitation, nothing)


def test_another_device_a_damaged_or_a_missing_handle_open_nothing(device: Device) -> None:
    region = DeviceRegion.on(device, 4096, "r")
    invitation = region.invitation()
    assert borrow(None, invitation, nothing) is None
    assert borrow(device, invitation[:16], nothing) is None
    assert borrow(device, invitation[:16] + bytes(16) + invitation[32:], nothing) is None
    with pytest.raises(AccessRefused):
        borrow(device, invitation[:-1], nothing)
    with pytest.raises(AccessRefused, match="bytes of device memory"):
        borrow(device, invitation[:8] + bytes([1]) + bytes(7) + invitation[16:], nothing)
    with pytest.raises(AccessRefused, match="a body of bytes"):
        borrow(device, invitation[:8] + bytes(8) + invitation[16:], nothing)
    region.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: device_named("cuda:x"), "cuda:<n>"),
        (lambda: device_named("tpu"), "unknown"),
    ],
)
def test_a_device_that_nobody_knows_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigRejected, match=message):
        make()


def test_a_full_device_is_a_memory_error_and_room_comes_back() -> None:
    device = FakeDevice(total_bytes=10_000)
    region = DeviceRegion.on(device, 8000, "r")
    with pytest.raises(MemoryError, match="do not fit"):
        DeviceRegion.on(device, 4000, "s")
    region.close()
    DeviceRegion.on(device, 4000, "s").close()


# CUDA's part, on a fake ---------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, kernel_folder: Path) -> Any:
    return fake_device(monkeypatch, kernel_folder)


def runtime_of(cuda: Any) -> Any:
    return cuda.cupy.cuda.runtime


def test_allocations_are_whole_granules_and_are_freed(cuda: Any) -> None:
    """No other owner's data may lie in what a handle opens."""
    memory = cuda.allocate(1)
    [(_, block)] = runtime_of(cuda).blocks.items()
    assert len(block) == gpu_cuda.GRANULE_BYTES
    del memory
    assert not runtime_of(cuda).blocks
    with pytest.raises(MemoryError):
        cuda.allocate(1 << 40)


def test_a_foreign_handle_is_opened_once_and_closed_with_its_last_user(cuda: Any) -> None:
    """Two regions of one peer, or two channels to it: CUDA opens a handle once a process."""
    runtime = runtime_of(cuda)
    peers = runtime.malloc(gpu_cuda.GRANULE_BYTES)
    raw = runtime.ipcGetMemHandle(peers)
    first, second = cuda.open(raw, 0, 1000), cuda.open(raw, 4096, 1000)
    second.upload(0, memoryview(b"x"))
    assert second.address - first.address == 4096
    assert list(runtime.imported) == [peers]
    del first
    assert list(runtime.imported) == [peers]
    del second
    assert not runtime.imported
    runtime.free(peers)
    with pytest.raises(AccessRefused, match="cannot be opened"):
        cuda.open(raw, 0, 1000)


def test_a_programs_array_is_registered_where_it_is(cuda: Any) -> None:
    """A part of a larger allocation: the handle opens all of it, the region is the part."""
    runtime = runtime_of(cuda)
    given = FakeArray(runtime, np.arange(1000, dtype=np.float32))
    array = cuda.wrap(given)
    assert runtime.synchronized == [1], "what writes the array has ended"
    region = DeviceRegion.over(array[100:200], "program's")
    assert region.nbytes == 400
    loan = borrow(cuda, region.invitation(), nothing)
    assert loan is not None
    loan.upload(0, memoryview(np.float32(-1).tobytes()))
    assert array.to_host()[99:102].tolist() == [99, -1, 101]
    region.close()


def test_memory_without_a_handle_is_staged(cuda: Any) -> None:
    """A stream-ordered pool's: CUDA cannot export it."""
    given = FakeArray(runtime_of(cuda), np.zeros(1000, np.float32))
    runtime_of(cuda).pooled.add(given.address)
    region = DeviceRegion.over(cuda.wrap(given), "pooled")
    assert borrow(cuda, region.invitation(), nothing) is None
    region.buffer[:4] = b"abcd"
    region.arrived(0, 4)
    assert cuda.wrap(given).to_host().tobytes()[:4] == b"abcd"
    region.close()


def test_a_programs_array_must_be_whole_and_here(cuda: Any) -> None:
    runtime = runtime_of(cuda)
    given = FakeArray(runtime, np.zeros((4, 6), np.uint16))
    given.__cuda_array_interface__["typestr"] = "<V2"
    assert cuda.wrap(given).dtype == np.uint16, "bfloat16 as its bits"
    given.__cuda_array_interface__["strides"] = (12, 2)
    assert cuda.wrap(given).shape == (4, 6)
    given.__cuda_array_interface__["strides"] = (2, 8)
    with pytest.raises(Rejected, match="gaps"):
        cuda.wrap(given)
    with pytest.raises(Rejected, match="a list is not an array"):
        cuda.wrap([1])
    assert not cuda.is_array(np.zeros(3))
    runtime.pointerGetAttributes = lambda _: type("Where", (), {"device": 1})()
    with pytest.raises(Rejected, match="cuda:1"):
        cuda.wrap(FakeArray(runtime, np.zeros(3)))


def test_an_array_that_names_no_stream_waits_for_the_device(cuda: Any) -> None:
    cuda.wrap(FakeArray(runtime_of(cuda), np.zeros(3), stream=None))
    assert runtime_of(cuda).synchronized == ["device"]


def test_what_the_program_gets_keeps_the_memory(cuda: Any) -> None:
    array = numbers(cuda, np.arange(6, dtype=np.float32)).reshape((2, 3))
    shown = cuda.present(array)
    assert (shown.shape, shown.dtype, shown.pointer) == ((2, 3), np.float32, array.address)
    del array
    gc.collect()
    assert shown.get().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_pinned_region_is_unpinned_before_it_is_unmapped(cuda: Any) -> None:
    region = DeviceRegion.on(cuda, 100_000, "r", (4096, 99_000), pin=True)
    assert len(runtime_of(cuda).pinned) == 1
    region.close()
    assert not runtime_of(cuda).pinned
    runtime_of(cuda).hostRegister = lambda *_: (_ for _ in ()).throw(FakeError(801))
    DeviceRegion.on(cuda, 4096, "unpinned", pin=True).close()


def test_an_error_of_the_device_ends_the_process_and_full_memory_does_not(cuda: Any) -> None:
    memory = cuda.allocate(100)

    def fail(*_: object) -> None:
        raise FakeError(700)

    runtime_of(cuda).memcpyAsync = fail
    with pytest.raises(Fatal, match="a copy of 3 bytes"):
        memory.upload(0, memoryview(b"abc"))


def test_threads_have_streams_of_their_own_and_nothing_is_left(cuda: Any) -> None:
    regions = [DeviceRegion.on(cuda, 5000, f"r{n}") for n in range(5)]
    for region in regions:
        region.close()
    gc.collect()
    assert reap() == 0
    assert not runtime_of(cuda).blocks


def test_the_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ConfigRejected("a CUDA device needs cupy: pip install cupy-cuda13x")

    monkeypatch.setattr(gpu_cuda, "_cupy", missing)
    assert gpu_cuda.probe() == (False, "a CUDA device needs cupy: pip install cupy-cuda13x")


def test_the_doctor_says_what_the_device_can(cuda: Any) -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    cuda.driver.__class__.dmabuf = lambda self, address, nbytes: os.dup(fd)
    try:
        assert gpu_cuda.probe() == (True, "1 CUDA device, 0 GiB; CUDA IPC; dma-buf export")
    finally:
        del cuda.driver.__class__.dmabuf
        os.close(fd)
