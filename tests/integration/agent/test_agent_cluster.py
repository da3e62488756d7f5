"""Agents on the real services: a job that its user starts by hand, and one that is submitted and
whose processes the worker service starts."""

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from slackwater.agent import Agent
from slackwater.agent.initial import Initial
from slackwater.common.base.errors import GradientRefused
from slackwater.common.domains.slots.folding import replay
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell import client
from slackwater.loadgen.emulate import Emulation
from slackwater.loadgen.verify import replay_digest
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.tensors import UpdateRule

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

SIZE = 700_001
"""Elements of the large tensor: a bucket of its own, and not a multiple of anything."""
ADAM = UpdateRule(name="adam", learning_rate=0.01)


@pytest.fixture
async def cluster_url() -> AsyncIterator[str]:
    listening = {"tcp_address": "127.0.0.1:0", "cluster_token": "of-this-test"}
    options = ClusterOptions(controllers=1, aggregators=3, aggregator=listening)
    async with EmbeddedCluster(options) as cluster:
        yield cluster.url


def gradient(rank: int, iteration: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, iteration, size]).normal(size=size).astype(np.float32)


def train(url: str, transport: str, rank: int, iterations: int) -> dict[str, Any]:
    initial = {"large": np.ones(SIZE, np.float32), "small": np.ones(10, np.float32)}
    options: dict[str, Any] = {"job": "by-hand", "workers": 2, "servers": 2, "update": ADAM}
    with Agent(url=url, rank=rank, tensors=initial, transport=transport, **options) as agent:
        for iteration in range(1, iterations + 1):
            made = {n: gradient(rank, iteration, v.size) for n, v in initial.items()}
            if iteration == 3 and rank == 1:
                bad = made["small"].copy()
                bad[4] = np.inf
                with pytest.raises(GradientRefused) as refused:
                    agent.step({**made, "small": bad})
                assert (refused.value.tensor, refused.value.worker) == ("small", 1)
            parameters = agent.step(made)
        final = {name: value.copy() for name, value in parameters.items()}
        agent.close(result={"rank": rank})
    return final


async def finished(url: str, job: str) -> JobRecord:
    async with client.connect(url) as connected:
        for _ in range(1200):
            record = await connected.job(job)
            if record.state in TERMINAL_STATES:
                return record
            await asyncio.sleep(0.1)
    raise AssertionError(f"{job} did not end: {record}")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_job_started_by_hand_trains_as_one_process_would(
    cluster_url: str, transport: str
) -> None:
    """Two ranks, Adam, a refused gradient in between: bit for bit the replay, and the master knows
    that both ranks are done."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            loop.run_in_executor(pool, train, cluster_url, transport, rank, 8) for rank in range(2)
        ]
        results = await asyncio.gather(*ranks)
    for name, size in (("large", SIZE), ("small", 10)):
        pushed = [[gradient(rank, t, size) for rank in range(2)] for t in range(1, 9)]
        expected = replay(ADAM, "float32", np.ones(size, np.float32), pushed)
        for result in results:
            np.testing.assert_array_equal(result[name], expected)
    record = await finished(cluster_url, "by-hand")
    assert record.state == "completed"
    assert {rank: json.loads(text) for rank, text in record.results.items()} == {
        "0": {"rank": 0},
        "1": {"rank": 1},
    }


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_job_goes_on_with_the_states_of_another(cluster_url: str, transport: str) -> None:
    """Eight iterations of Adam in one job, eight more in a second that begins with the parameters
    and states that a rank of the first read: the bits of sixteen, and the same states on both."""
    shapes = {"large": (SIZE,), "small": (10,)}

    def half(job: str, rank: int, first: int, tensors: Any) -> tuple[Any, Any]:
        with Agent(
            url=cluster_url, job=job, rank=rank, workers=2, servers=2, update=ADAM,
            tensors=tensors, transport=transport,
        ) as agent:  # fmt: skip
            for t in range(first, first + 8):
                agent.step({n: gradient(rank, t, shape[0]) for n, shape in shapes.items()})
            return {n: agent.pull(n).copy() for n in shapes}, agent.states()

    async def both(job: str, first: int, tensors: Any) -> tuple[Any, Any]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(2) as pool:
            ranks = [
                loop.run_in_executor(pool, half, job, rank, first, tensors(rank))
                for rank in range(2)
            ]
            (values, states), (_, others) = await asyncio.gather(*ranks)
        for name in shapes:
            for one, other in zip(states[name].states, others[name].states, strict=True):
                np.testing.assert_array_equal(one, other)
        return values, states

    values, states = await both("first", 1, lambda rank: shapes)
    assert {each.updates for each in states.values()} == {8}
    begun = {name: each.states for name, each in states.items()}
    brought = Initial(values, begun, updates=8)
    values, states = await both("second", 9, lambda rank: shapes if rank else brought)
    assert {each.updates for each in states.values()} == {16}
    for name, (size,) in shapes.items():
        pushed = [[gradient(rank, t, size) for rank in range(2)] for t in range(1, 17)]
        expected = replay(ADAM, "float32", np.zeros(size, np.float32), pushed)
        np.testing.assert_array_equal(values[name], expected)


async def test_an_emulated_job_that_was_submitted_is_right_to_the_last_bit(
    cluster_url: str,
) -> None:
    emulation = Emulation("alexnet", bytes_scale=0.05, seed=11)
    update = UpdateRule(name="momentum", learning_rate=0.01)
    words = "python -m slackwater.loadgen.emulate --model alexnet --bytes-scale 0.05"
    spec = JobSpec(
        id="emulated",
        model="alexnet",
        workers=2,
        servers=2,
        iterations=12,
        update=update,
        seed=11,
        program=(*words.split(), "--compute-s", "0.2", "--iterations", "12", "--seed", "11"),
    )
    async with client.connect(cluster_url) as connected:
        await connected.submit(spec)
    record = await finished(cluster_url, "emulated")
    assert record.state == "completed", record.reason
    expected = replay_digest(emulation, 2, 12, update)
    for rank in ("0", "1"):
        result = json.loads(record.results[rank])
        assert (result["digest"], result["iterations"]) == (expected, 12)


async def test_a_program_that_fails_is_explained(cluster_url: str) -> None:
    words = "python -m slackwater.loadgen.emulate --model vgg20 --compute-s 1 --iterations 1"
    spec = JobSpec(id="unknown-model", program=tuple(words.split()))
    async with client.connect(cluster_url) as connected:
        await connected.submit(spec)
    record = await finished(cluster_url, "unknown-model")
    assert record.state == "failed"
    assert "unknown model 'vgg20'" in record.reason
