"""A migration between hosts keeps to its cap of bandwidth, and holds up nobody else's pushes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slackwater.schemas import placement
from slackwater.schemas.base import ClusterId

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

CAP = 2_000_000


async def test_others_push_and_pull_while_a_capped_migration_goes_on(
    lab: Any, training: Callable[..., Any]
) -> None:
    """Adam's 3.6 MB take 1.8 s at 2 MB/s. Its own job waits for it; another job between the
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
    for fact in await lab.director.copies(1):  # On a busy machine one may be made twice.
        assert fact.nbytes / CAP - 0.2 <= fact.copy_s, "it went faster than the cap allows"
    assert meanwhile >= 5, f"the other job made {meanwhile} iterations meanwhile"
    before = min(large.done.values())
    await large.until(before + 3)
    for run in (large, small):
        await run.finish()


async def test_a_jobs_buckets_leave_in_several_iterations_and_not_all_at_once(
    lab: Any, training: Callable[..., Any], check_result: Callable[..., Any]
) -> None:
    """All once froze at the same version, and their job stood still until the last was copied. Each
    of these takes .3 s of the link, and the workers rest .5 s between an update and the next push:
    one or two leave an iteration."""
    await lab.aggregators("a1", "a2", transport="tcp", migration_bytes_s=4_000_000)
    sizes = {f"w{index}": 300_007 for index in range(4)}
    lab.director.homes.remove("a2")
    run = training(update="sgd", sizes=sizes, transport="tcp", pace_s=0.5)
    run.start()
    await run.until(4)
    lab.director.homes.append("a2")
    job = lab.director.jobs["j1"]
    message = placement.MigrateInit(
        cluster=ClusterId("c1"),
        migration="m1",
        job=job.plan.job,
        buckets=tuple(bucket.index for bucket in job.buckets),
        epochs=(1,) * len(job.buckets),
        to=lab.director.endpoint("a2"),
    )
    await lab.director.insist("a1", "migrate", message)
    await lab.settle(job)
    await check_result(run, await run.finish())
    facts = await lab.director.copies(len(job.buckets))
    assert len(facts) == len(job.buckets)
    assert len({fact.version for fact in facts}) > 1, "all froze at one version"
