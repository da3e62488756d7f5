"""Regions: sealed shared memory, its room taken early where asked, closed with views still out."""

import fcntl
import os

import numpy as np
import pytest

from slackwater.common.base.errors import AccessRefused, Rejected
from slackwater.common.transport.region import Region, check_foreign


def test_two_mappings_of_one_descriptor_show_the_same_bytes() -> None:
    region = Region.create(10_000, "a")
    again = Region.adopt(os.dup(region.fileno()), "b")
    region.buffer[9_999] = 7
    assert again.nbytes == 10_000
    assert again.buffer[9_999] == 7
    region.close()
    assert again.buffer[9_999] == 7
    again.close()


def test_the_size_cannot_be_changed_by_anybody() -> None:
    """Memory that shrinks under a peer kills the peer with SIGBUS."""
    region = Region.create(8192, "a")
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    region.close()


def test_prefault_takes_the_room_at_once() -> None:
    nbytes = 4 * 1024 * 1024
    sparse, full = Region.create(nbytes, "s"), Region.create(nbytes, "f", prefault=True)
    assert os.fstat(sparse.fileno()).st_blocks == 0
    assert os.fstat(full.fileno()).st_blocks * 512 == nbytes
    assert bytes(full.buffer[:100]) == bytes(100)
    sparse.close()
    full.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_region_is_rejected(nbytes: int) -> None:
    with pytest.raises(Rejected, match="at least 1"):
        Region.create(nbytes, "r")


@pytest.mark.parametrize("nbytes", [2**62, 2**70])
def test_no_room_is_a_memory_error_that_names_the_region(nbytes: int) -> None:
    with pytest.raises(MemoryError, match="big"):
        Region.create(nbytes, "big")


def test_a_long_label_is_no_error() -> None:
    region = Region.create(1, "ü" * 500)
    assert region.label == "ü" * 500
    region.close()


def test_close_with_a_view_out_keeps_the_views_bytes() -> None:
    region = Region.create(4096, "r")
    array = np.frombuffer(region.buffer, np.uint8)
    region.buffer[5] = 5
    region.close()
    region.close()
    assert region.closed
    assert array[5] == 5


def test_foreign_memory_must_be_a_sealed_memfd() -> None:
    region = Region.create(4096, "r")
    assert check_foreign(region.fileno()) == 4096
    region.close()
    unsealed = os.memfd_create("u", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    empty = os.memfd_create("e", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    device = os.open("/dev/null", os.O_RDWR)
    for fd, why in ((unsealed, "shrink"), (empty, "empty"), (device, "not a memfd")):
        with pytest.raises(AccessRefused, match=why):
            check_foreign(fd)
        os.close(fd)
