"""A thousand random migrations while two workers train: nobody can tell from the parameters.

Every bucket has a traveller of its own, so that many are on their way at once, in all directions
between three aggregators; the workers push and pull without a pause. The same iterations are run
again where nothing moves, and compared bit for bit.
"""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
SIZES = {f"layer{index}": 262_144 + 1024 * index for index in range(8)}
"""Each a bucket of its own, all of different lengths."""


class Odyssey:
    """`left` migrations, by as many travellers as there are buckets."""

    def __init__(self, lab: Any, job: Any, migrations: int) -> None:
        self.lab, self.job, self.left = lab, job, migrations
        self.moved = 0

    async def travel(self, bucket: int) -> None:
        rng = random.Random(bucket)
        while self.left > 0:
            self.left -= 1
            here = self.job.places[bucket].aggregator
            there = rng.choice([home for home in self.lab.director.homes if home != here])
            await self.lab.director.move(self.job, bucket, there)
            self.moved += 1

    async def all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for bucket in range(len(self.job.places)):
                group.create_task(self.travel(bucket))


@pytest.mark.parametrize(
    ("transport", "migrations"), [("shm", 1000), pytest.param("tcp", 250, marks=pytest.mark.slow)]
)
async def test_parameters_are_those_of_a_run_without_migrations(
    lab: Any, training: Any, check_result: Any, transport: str, migrations: int
) -> None:
    await lab.aggregators("a1", "a2", "a3", transport=transport)
    run = training(sizes=SIZES, transport=transport)
    run.start()
    await run.until(2)
    job = lab.director.jobs["j1"]
    assert len(job.places) == len(SIZES)
    odyssey = Odyssey(lab, job, migrations)
    await odyssey.all()
    assert odyssey.moved == migrations
    assert sum(place.location_epoch for place in job.places) == migrations
    iterations = await run.finish()
    await check_result(run, iterations)

    still = training(job="j2", sizes=SIZES, transport=transport)
    still.last = iterations
    still.start()
    await still.until(iterations)
    assert await still.finish(more=0) == iterations
    assert not any(place.location_epoch for place in lab.director.jobs["j2"].places)
    for name in SIZES:
        for rank in range(run.workers):
            one, other = run.results[rank][name], still.results[rank][name]
            assert (one.view(np.uint32) == other.view(np.uint32)).all(), (name, rank)
