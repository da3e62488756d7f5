"""A migration between hosts keeps to its cap of bandwidth, and holds up nobody else's pushes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slackwater.schemas import placement

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

CAP = 2_000_000


async def test_others_push_and_pull_while_a_capped_migration_goes_on(
    lab: Any, training: Callable[..., Any]
) -> None:
    """A region of 10 MB takes 5 s at 2 MB/s. Its own job waits for it; another job between the
    same workers' machine and the same aggregators iterates on."""
    await lab.aggregators("a1", "a2", transport="tcp", migration_bytes_s=CAP)
    large = training("large", sizes={"w": 300_007}, transport="tcp")
    small = training("small", sizes={"w": 20_011}, transport="tcp", pace_s=0.02)
    for run in (large, small):
        run.start()
        await run.until(3)
    moving = asyncio.create_task(lab.director.move(lab.director.jobs["large"], 0, "a2"))
    begun = min(small.done.values())
    await moving
    meanwhile = min(small.done.values()) - begun
    (fact,) = [f for f in lab.director.facts if isinstance(f, placement.TensorCopyDone)]
    assert fact.nbytes / CAP - 0.2 <= fact.copy_s, "it went faster than the cap allows"
    assert meanwhile >= 5, f"the other job made {meanwhile} iterations meanwhile"
    before = min(large.done.values())
    await large.until(before + 3)
    for run in (large, small):
        await run.finish()
