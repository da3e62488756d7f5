"""kill -9 of aggregators while jobs train and their buckets move: nothing is lost, nothing is
applied twice, nobody hangs, and every bucket has exactly one owner."""

import asyncio
import random
import signal
from typing import Any

import pytest

from slackwater.schemas.base import JobId, Ok
from slackwater.schemas.placement import DropJob

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

POINTS = (
    "aggregator.fold.before",
    "aggregator.fold.mid",
    "aggregator.fold.after",
    "aggregator.copy.before",
    "aggregator.copy.mid",
    "aggregator.copy.after",
)


async def keep_moving(lab: Any, job: Any, rng: random.Random) -> None:
    """One bucket after the other to the other aggregator, for ever."""
    while True:
        bucket = rng.randrange(len(job.places))
        here = job.places[bucket].aggregator
        there = next(home for home in lab.director.homes if home != here)
        await lab.director.move(job, bucket, there)
        await asyncio.sleep(rng.uniform(0.0, 0.05))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.nightly)])
async def test_every_kill_is_survived(
    lab: Any, training: Any, check_result: Any, transport: str
) -> None:
    """24 kills at seeded instants: 12 at some moment, 12 at named points, in mid-fold and
    mid-copy among them, while two workers train with Adam and buckets travel without a pause.

    The workers leave most of the machine to those who start again."""
    rng = random.Random(transport)
    await lab.aggregators("a1", "a2", transport=transport)
    run = training(pace_s=0.03, transport=transport)
    run.start()
    await run.until(3)
    moving = asyncio.ensure_future(keep_moving(lab, lab.director.jobs["j1"], rng))
    try:
        for kill in range(12):
            victim = rng.choice(["a1", "a2"])
            point, hit = POINTS[kill % len(POINTS)], rng.randint(1, 6)
            before = lab.restarts(victim)
            lab.supervisor.arm(victim, f"{point}=kill@{hit}")
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            lab.supervisor.kill(victim, signal.SIGKILL)
            await lab.restarted(victim, before + 2)
            assert not moving.done(), moving
            run.check()
            await run.until(min(run.done.values()) + 2)
    finally:
        moving.cancel()
        ended = (await asyncio.gather(moving, return_exceptions=True))[0]
    assert isinstance(ended, asyncio.CancelledError), ended
    iterations = await run.finish()
    await lab.settle(lab.director.jobs["j1"])
    await check_result(run, iterations)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_lost_regions_begin_anew_from_the_workers(
    lab: Any, training: Any, check_result: Any, transport: str
) -> None:
    """The supervisor forgot the memory, too: the workers' newest parameters seed fresh regions. SGD
    has no state to lose: the bits stay those of the replay, and no loss is told."""
    await lab.aggregators("a1", "a2", transport=transport)
    run = training(update="sgd", pace_s=0.002, transport=transport, lossy=True)
    run.start()
    job = None
    for kill in range(3):
        await run.until(5 * (kill + 1))
        job = lab.director.jobs["j1"]
        assert await lab.lose("a1", job) == 2
    iterations = await run.finish(more=20)
    await check_result(run, iterations)
    lost = [
        fact for fact in lab.director.facts if getattr(fact, "fact", "").startswith("optimizer")
    ]
    assert lost == []
    assert [place.location_epoch for place in job.places] == [3, 0, 3]


async def test_kills_while_a_job_is_placed_and_seeded(
    lab: Any, training: Any, check_result: Any
) -> None:
    """Regions that were made and not yet confirmed are found again; so is a fold's first moment.
    What a job moved is counted still when it was dropped and its aggregators were killed after."""
    await lab.aggregators("a1", "a2")
    for victim, point in (("a1", "aggregator.host.after=kill@1"), ("a2", POINTS[0] + "=kill@1")):
        lab.supervisor.arm(victim, point)
        lab.supervisor.kill(victim, signal.SIGKILL)
        await lab.restarted(victim, 1)
    run = training(update="momentum", transport="shm")
    run.start()
    for victim in ("a1", "a2"):
        await lab.restarted(victim, 2)
    await run.until(10)
    iterations = await run.finish()
    beats = await lab.director.fresh_beats()
    assert {beat.id: beat.regions_recovered for beat in beats} == {"a1": 2, "a2": 1}
    await check_result(run, iterations)
    moved = {beat.id: (beat.bytes_in, beat.bytes_out) for beat in beats}
    for victim in moved:
        assert isinstance(await lab.director.insist(victim, "drop", DropJob(job=JobId("j1"))), Ok)
        lab.supervisor.kill(victim, signal.SIGKILL)
        await lab.restarted(victim, 3)
    beats = await lab.director.fresh_beats()
    assert {beat.id: (beat.bytes_in, beat.bytes_out) for beat in beats} == moved
    assert [(beat.buckets, beat.regions_recovered) for beat in beats] == [(0, 0)] * 2
