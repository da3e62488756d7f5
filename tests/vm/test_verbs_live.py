"""A job over verbs alone: real aggregator processes, a real nats-server, Agents that find them;
buckets migrate while it trains, and an aggregator is killed."""

import signal
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vm, pytest.mark.live, pytest.mark.timeout(1200)]
SIZES = {"embed": 300_007, "mlp.w": 270_001, "mlp.b": 20_011}
MOVES = 6


async def test_a_job_trains_migrates_and_survives_a_kill_over_verbs(
    lab: Any, training: Any, check_result: Any
) -> None:
    await lab.aggregators("a1", "a2", transport="verbs")
    director = lab.director
    run = training(sizes=SIZES, update="momentum", transport="verbs")
    run.start()
    await run.until(2)
    assert {kind for beat in director.beats.values() for kind, _ in beat.addresses} == {"verbs"}
    job = director.jobs["j1"]
    assert len(job.places) >= 2
    for number in range(MOVES):
        bucket = number % len(job.places)
        here = job.places[bucket].aggregator
        await director.move(job, bucket, "a2" if here == "a1" else "a1")
    run.check()
    assert sum(place.location_epoch for place in job.places) == MOVES

    before = lab.restarts("a1")
    lab.supervisor.kill("a1", signal.SIGKILL)
    await lab.restarted("a1", before + 1)
    await run.until(min(run.done.values()) + 2)
    iterations = await run.finish()
    await check_result(run, iterations)
    assert all(np.isfinite(run.results[rank]["embed"]).all() for rank in (0, 1))
