"""A job may be dropped while its folds wait for the slot: nobody else notices."""

import asyncio

from tests.unit.services.aggregator.test_aggregator_talks import (
    System,
    gradient,
    iterate,
    same,
    simulated,
)

from slackwater.schemas.base import JobId, Ok
from slackwater.schemas.placement import DropJob


@simulated
async def test_a_job_that_is_dropped_before_its_first_fold_does_not_end_the_aggregator(
    system: System,
) -> None:
    aggregator = await system.start("a1", cpu_share=0.03)
    await system.host()
    workers = await system.training()
    for bucket in (0, 1):
        for worker in workers:
            worker.push(bucket, 1, gradient(worker.rank, 1, bucket))
    waiting = aggregator.core.buckets[JobId("j1"), 1]
    held = aggregator.regions.held[waiting.key]
    while waiting.phase != "folding":  # noqa: ASYNC110 (frames are on their way)
        await asyncio.sleep(1e-5)
    assert held.slots.version == 0, "the first bucket's fold has the slot"
    assert isinstance(await system.ask("a1", "drop", DropJob(job="j1")), Ok)
    assert held.region.closed
    await asyncio.sleep(100.0)
    assert held.slots.version == 0
    assert aggregator.executor.observed() == [], "what was dropped stays forgotten"
    await system.host(epoch=1)
    workers = await system.training()
    assert [answer.version for answer in await iterate(workers, 1, 1)] == [1, 1]
    assert same(workers[0], 1, 1)
