"""Two lenders that were given one id by mistake."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slackwater.common.base.errors import ConfigRejected

Make = Callable[..., Any]


async def test_the_older_of_two_lenders_of_one_id_ends(cluster: Make) -> None:
    """Devices would take them for one. It says which other one it saw; the newer one lends on."""
    async with cluster("tcp") as c:
        await c.lend(1)
        [older] = c._lives
        [first] = c.lenders
        c.lenders.clear()
        c.machines.clear()
        await c.lend(1)  # Is called s1, too.
        [second] = c.lenders
        with pytest.raises(ConfigRejected, match=r"id s1 .* node m1"):
            async with asyncio.timeout(20):
                await older
        c._lives.remove(older)
        assert not first.slabs.regions
        assert len(second.core.having("free")) == 4
        assert not c._lives[0].done()
