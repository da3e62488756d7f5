"""Pieces of several memories, seen behind one another."""

import numpy as np
import pytest

from slackwater.common.transport.mapping import Window
from slackwater.common.transport.region import Region

PAGE = 4096


def part(region: Region, first: int, count: int) -> np.ndarray:
    return np.frombuffer(region.buffer, np.float32, count, first)


def test_what_is_written_in_the_window_is_in_the_regions() -> None:
    """And what is written there is seen; a piece that is shown anew leaves the old memory alone,
    and memory that its region has closed is still there while it is shown."""
    regions = [Region.create(4 * PAGE, f"r{index}") for index in range(3)]
    parts = [part(regions[0], PAGE, 1024), part(regions[1], 2 * PAGE, 700)]
    window = Window([each.nbytes for each in parts])
    for piece, each in enumerate(parts):
        window.show(piece, each)
    seen = window.bytes.view(np.float32)
    seen[:] = np.arange(1724)
    assert (parts[0] == np.arange(1024)).all()
    assert (parts[1] == np.arange(1024, 1724)).all()
    parts[0][3] = -1.0
    assert seen[3] == -1.0
    other = part(regions[2], 0, 1024)
    window.show(0, other)
    seen[3] = 5.0
    assert (parts[0][3], other[3]) == (-1.0, 5.0)
    del other, parts[1]
    for region in regions:
        region.close()
    assert seen[3] == 5.0
    assert (seen[1024:] == np.arange(1024, 1724)).all()


def test_what_cannot_be_shown_is_named() -> None:
    region = Region.create(4 * PAGE, "r")
    with pytest.raises(ValueError, match="whole pages"):
        Window([100, PAGE])
    window = Window([PAGE])
    with pytest.raises(ValueError, match="fit"):
        window.show(0, part(region, 64, 1024))
    with pytest.raises(ValueError, match="4096 fit"):
        window.show(0, part(region, 0, 1000))
    region.close()
