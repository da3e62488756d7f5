"""A slab that is new to its span has what the backup has, though nobody writes it again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slackwater.memory.pages.table import counters, page_range
from slackwater.memory.store import PAGE_BYTES

Make = Callable[..., Any]
PAGES = 512
SLABS = 2
"""The device's spans."""


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_an_evicted_span_comes_back_by_itself(cluster: Make, kind: str) -> None:
    """Three quarters of the device were written; a page is written while its slab is away. Then
    every page that the file has is in remote memory, each is right, and none went to the file
    again; what was never written takes no remote memory."""
    async with cluster(kind) as c:
        await c.lend(2)
        assembly = await c.export(PAGES * PAGE_BYTES)
        device = assembly.device
        data = np.random.default_rng(5).integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)
        written = PAGES * 3 // 4
        data[written:] = 0
        await device.write_pages(page_range(0, written), data[:written].reshape(-1).data)
        await c.mapped(SLABS)

        def there() -> int:
            return sum(device.present_pages(span) for span in range(SLABS))

        await c.until(lambda: there() == written)  # The same pages as before its first mapping.
        await device.flush()
        before = counters(device.table)
        [leaving] = device.members(0)
        at = int(leaving.lender.removeprefix("s")) - 1
        c.machines[at].others_bytes = c.machines[at].total_bytes
        await c.until(lambda: "unmapped" in c.facts)
        data[3] = 7
        await device.write_pages(page_range(3, 1), data[3].data)
        # A page that is written while it is on its way to the new slab stays on the disk.
        await c.until(
            lambda: (
                there() >= written - 1
                and device.members(0) not in ((), (leaving,))
                and not assembly.lenders._refills.running
            )
        )
        await device.flush()
        after = counters(device.table)
        assert after["disk_pages"] - before["disk_pages"] == 1
        target = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        await device.read_pages(page_range(0, PAGES), target.reshape(-1).data)
        assert np.array_equal(target, data)
        assert assembly.lenders.refiller.refilled_pages >= written
        assert not (await device.allocated(0, PAGES))[written:].any()
