"""Agents read the squared lengths of an iteration's gradients, over shm and tcp.

Some seconds: a cluster, and a job of each transport and rule.
"""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from slackwater.agent import Agent
from slackwater.common.domains.models.gradient_noise import GradientSquares
from slackwater.common.domains.slots.gradient_squares import FLOOR_PART
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.schemas.tensors import UpdateRule

pytestmark = [pytest.mark.live, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 50), "large": (1_200_000,)}
WORKERS, ITERATIONS, BETA2 = 3, 4, 0.9


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=2)) as cluster:
        yield cluster


def gradients(rank: int, iteration: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((rank, iteration))
    return {name: 1 + rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def train(
    url: str, job: str, rank: int, rule: str, transport: str, *, noise: bool
) -> list[GradientSquares | None]:
    found = []
    update = UpdateRule(name=rule, beta2=BETA2)  # type: ignore[arg-type]
    with Agent(
        job=job, rank=rank, workers=WORKERS, tensors=SHAPES, update=update, servers=2, url=url,
        transport=transport, noise=noise,
    ) as agent:  # fmt: skip
        for iteration in range(1, ITERATIONS + 1):
            agent.step(gradients(rank, iteration))
            found.append(agent.gradient_squares(iteration))
            assert agent.gradient_squares(iteration + 1) is None, "it was not pushed yet"
    return found


async def run(
    cluster: EmbeddedCluster, rule: str, transport: str, *, noise: bool = True
) -> list[GradientSquares | None]:
    """Train with threads as ranks; all see the same."""
    job = f"{rule}-{transport}-{noise}".lower()
    ranks = [
        asyncio.to_thread(train, cluster.url, job, rank, rule, transport, noise=noise)
        for rank in range(WORKERS)
    ]
    first, *others = await asyncio.gather(*ranks)
    assert all(each == first for each in others)
    return first


def lengths(iteration: int, weights: dict[str, np.ndarray] | None = None) -> tuple[float, float]:
    each = mean = 0.0
    pushed = [gradients(rank, iteration) for rank in range(WORKERS)]
    for name in SHAPES:
        weight = 1.0 if weights is None else weights[name]
        wide = [of[name].astype(np.float64) for of in pushed]
        each += sum(float((g**2 * weight).sum()) for g in wide) / WORKERS
        mean += float((np.mean(wide, 0) ** 2 * weight).sum())
    return each, mean


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_rank_reads_the_lengths_of_all_tensors(
    cluster: EmbeddedCluster, transport: str
) -> None:
    for at, found in enumerate(await run(cluster, "momentum", transport), 1):
        assert found is not None
        assert found.workers == WORKERS
        assert (found.each_sq, found.mean_sq) == pytest.approx(lengths(at), rel=1e-6)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_adams_gradients_are_weighted_by_its_second_moments(
    cluster: EmbeddedCluster, transport: str
) -> None:
    """The first version has no second moments yet. The floor is the bucket's own."""
    first, *others = await run(cluster, "adam", transport)
    assert first is None
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for at, found in enumerate(others, 1):
        for name in SHAPES:
            mean = np.mean([gradients(rank, at)[name] for rank in range(WORKERS)], 0)
            v[name] = BETA2 * v[name] + (1 - BETA2) * mean.astype(np.float64) ** 2
        unbiased = {name: each / (1 - BETA2**at) for name, each in v.items()}
        weights = {name: 1 / (u + FLOOR_PART * u.mean()) for name, u in unbiased.items()}
        assert found is not None
        assert (found.each_sq, found.mean_sq) == pytest.approx(lengths(at + 1, weights), rel=2e-3)


async def test_a_job_that_does_not_ask_is_not_measured(cluster: EmbeddedCluster) -> None:
    assert await run(cluster, "sgd", "shm", noise=False) == [None] * ITERATIONS
