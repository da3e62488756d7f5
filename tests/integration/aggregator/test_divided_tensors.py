"""A tensor in several buckets: the program sees one array, wherever its parts are."""

import asyncio
import signal
from typing import Any

import numpy as np
import pytest

from slackwater.agent import Agent
from slackwater.common.base.errors import GradientRefused
from slackwater.schemas.tensors import UpdateRule

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
SIZES = {"fc": 1_700_001, "fc.bias": 1_003, "head": 300_007}
PART_BYTES = 2 * 1024 * 1024


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_parts_move_one_by_one_while_the_tensor_trains_on(
    lab: Any, training: Any, check_result: Any, transport: str
) -> None:
    """Four parts between two aggregators: at every moment some are here and some there, and the
    bits are those of a replay of the whole tensor."""
    lab.director.divide_bytes = PART_BYTES
    await lab.aggregators("a1", "a2", transport=transport)
    run = training(sizes=SIZES, transport=transport)
    run.start()
    await run.until(3)
    job = lab.director.jobs["j1"]
    assert [(b.first, b.start) for b in job.buckets][:4] == [
        (0, part * PART_BYTES // 4) for part in range(4)
    ]
    for _ in range(3):
        for bucket in range(4):
            here = job.places[bucket].aggregator
            await lab.director.move(job, bucket, "a1" if here == "a2" else "a2")
            await run.until(min(run.done.values()) + 1)
    await check_result(run, await run.finish())


async def test_parts_are_moved_through_kills_of_both_ends(
    lab: Any, training: Any, check_result: Any
) -> None:
    """Each part has its own version word and its own owner: whoever dies, nothing is lost or
    applied twice."""
    lab.director.divide_bytes = PART_BYTES
    await lab.aggregators("a1", "a2", transport="tcp")
    run = training(update="momentum", sizes=SIZES, transport="tcp", pace_s=0.02)
    run.start()
    await run.until(3)
    job = lab.director.jobs["j1"]
    for number, point in enumerate(("before", "mid", "after")):
        for victim in ("a1", "a2"):
            before = lab.restarts(victim)
            lab.supervisor.arm(victim, f"aggregator.copy.{point}=kill@1")
            lab.supervisor.kill(victim, signal.SIGKILL)
            await lab.restarted(victim, before + 1)
            bucket = (2 * number + (victim == "a2")) % 4
            here = job.places[bucket].aggregator
            await lab.director.move(job, bucket, "a1" if here == "a2" else "a2")
            await run.until(min(run.done.values()) + 1)
    await lab.settle(job)
    await check_result(run, await run.finish())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_gradient_that_is_made_in_place_and_a_pull_are_one_array(
    lab: Any, transport: str
) -> None:
    """Over shared memory both are the regions' own memory, seen through a window; a part that moved
    is seen where it is now."""
    lab.director.divide_bytes = PART_BYTES
    await lab.aggregators("a1", "a2", transport=transport)
    shape = (1_700, 1_001)
    rng = np.random.default_rng(7)
    start, gradients = np.zeros(shape, np.float32), rng.standard_normal((6, *shape), np.float32)

    def opened() -> Agent:
        return Agent(
            url=lab.supervisor.url, job="j1", rank=0, workers=1, tensors={"w": start},
            update=UpdateRule(name="sgd", learning_rate=0.5), transport=transport, deadline_s=60.0,
        )  # fmt: skip

    agent = await asyncio.to_thread(opened)
    job = lab.director.jobs["j1"]
    expected = start.copy()
    for iteration, gradient in enumerate(gradients):

        def step(gradient: Any = gradient) -> Any:
            buffer = agent.gradient_buffer("w")
            assert buffer.shape == shape
            assert buffer.flags.c_contiguous
            buffer[:] = gradient
            agent.push("w")
            return agent.pull("w")

        got = await asyncio.to_thread(step)
        expected = expected - np.float32(0.5) * gradient
        assert (got == expected).all()
        assert not got.flags.writeable
        bucket = iteration % 4
        here = job.places[bucket].aggregator
        await lab.director.move(job, bucket, "a1" if here == "a2" else "a2")
        assert (got == expected).all(), "what was pulled stays as it is"
    await asyncio.to_thread(agent.close)


async def test_a_part_that_is_refused_is_pushed_again_and_no_other_is_applied_twice(
    lab: Any,
) -> None:
    """A NaN in the third part: the tensor's other parts are in the version already."""
    lab.director.divide_bytes = PART_BYTES
    await lab.aggregators("a1", "a2", transport="tcp")
    gradient = np.ones(SIZES["fc"], np.float32)
    bad = gradient.copy()
    bad[1_200_000] = np.nan

    def train() -> Any:
        with Agent(
            url=lab.supervisor.url, job="j1", rank=0, workers=1, deadline_s=60.0, transport="tcp",
            tensors={"fc": gradient.shape}, update=UpdateRule(name="sgd", learning_rate=0.5),
        ) as agent:  # fmt: skip
            agent.push("fc", gradient)
            agent.pull("fc")
            agent.push("fc", bad)
            with pytest.raises(GradientRefused) as refused:
                agent.wait()
            assert (refused.value.tensor, refused.value.iteration) == ("fc", 2)
            agent.push("fc", gradient)
            return agent.pull("fc").copy()

    got = await asyncio.to_thread(train)
    assert (got == np.float32(-1.0)).all()
