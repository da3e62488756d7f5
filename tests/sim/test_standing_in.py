"""Checkpoints that stand in for lost memory, in virtual time: real aggregators and real Agents.

An aggregator loses its memory with its process. Processes that begin then have no parameters, those
that live have the newest; the folder has what was saved. The next version is computed from exactly
what each of them is the newest owner of.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.sim.test_data_plane import (
    BUCKETS,
    ELEMENTS,
    HOMES,
    LAYOUTS,
    TENSORS,
    UPDATE,
    WORKERS,
    Cluster,
    Rank,
    arrange,
    expected,
    gradient,
    train,
)
from tests.sim.test_saving import save

from slackwater.common.domains.slots.folding import replay
from slackwater.common.shell.simulated_loop import SimLoop
from slackwater.schemas.base import AggregatorId, ClusterId, Ok
from slackwater.schemas.placement import BucketPlace, HostBuckets

Act = Callable[[Cluster, list[Rank], Path], Awaitable[None]]


async def lose(cluster: Cluster, victims: tuple[str, ...], folder: Path) -> None:
    """Kill these with their memory, and have their buckets made anew, with the folder at hand."""
    for id in victims:
        ended = cluster.lives[id].ended
        cluster.kill(id, forget=True)
        await ended.wait()
    for id in victims:
        own = [b for b in range(BUCKETS) if cluster.places[b].aggregator == id]
        for bucket in own:
            epoch = cluster.places[bucket].location_epoch + 1
            cluster.places[bucket] = BucketPlace(aggregator=AggregatorId(id), location_epoch=epoch)
        message = HostBuckets(
            cluster=ClusterId("c1"), plan=cluster.plan,
            buckets=tuple(LAYOUTS[bucket] for bucket in own),
            at_epochs=tuple(cluster.places[bucket].location_epoch for bucket in own),
            tensors=TENSORS, saved=str(folder),
        )  # fmt: skip
        assert isinstance(await cluster.insist(id, "host", message), Ok)


def states_of(cluster: Cluster, bucket: int) -> tuple[int, Any, Any]:
    """Return a bucket's version, parameters and momenta, as its aggregator has them."""
    for life in cluster.lives.values():
        for (_, index), held in life.aggregator.regions.held.items():
            if index == bucket:
                slots = held.slots
                version = slots.version
                return version, slots.parameters(version).copy(), slots.state(version, 0).copy()
    raise AssertionError(f"nobody has bucket {bucket}")


def momenta(bucket: int, iterations: int) -> Any:
    """The momenta after so many undisturbed iterations."""
    found = np.zeros(ELEMENTS, np.float32)
    for iteration in range(1, iterations + 1):
        rows = [gradient(rank, iteration, bucket) for rank in range(WORKERS)]
        mean = (rows[0] + rows[1]) * np.float32(0.5)
        found = np.float32(UPDATE.momentum) * found + mean
    return found


def played(act: Act, folder: Path, *, shared: bool) -> None:
    """A job trained to version 4, saved, then to version 6; `act` does the rest."""

    async def main() -> None:
        cluster = Cluster(1, shared=shared)
        monkeypatch = pytest.MonkeyPatch()
        arrange(monkeypatch, cluster, lossy=False)
        try:
            await cluster.begin()
            await cluster.host()
            ranks = [Rank(cluster, rank) for rank in range(WORKERS)]
            await train(ranks, 4)
            made = await save(cluster, folder, 0, iter((1,)))
            assert made.iteration == 4
            await train(ranks, 6)
            await act(cluster, ranks, folder)
            for rank in ranks:
                await rank.close()
        finally:
            monkeypatch.undo()
            cluster.close()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("shared", [True, False], ids=["one-host", "two-hosts"])
def test_all_that_was_lost_goes_on_where_it_was_saved(tmp_path: Path, shared: bool) -> None:
    """Iteration 5 is computed again, to the same bits: no later version is known."""

    async def act(cluster: Cluster, ranks: list[Rank], folder: Path) -> None:
        for rank in ranks:
            await rank.close()
        await lose(cluster, HOMES, folder)
        ranks[:] = [Rank(cluster, rank) for rank in range(WORKERS)]
        await train(ranks, 9)
        for bucket in range(BUCKETS):
            version, parameters, _ = states_of(cluster, bucket)
            assert version == 9
            assert parameters.tobytes() == expected(bucket, 9).tobytes()

    played(act, tmp_path, shared=shared)


@pytest.mark.parametrize("shared", [True, False], ids=["one-host", "two-hosts"])
def test_what_was_lost_alone_is_as_it_was_saved_at_the_version_of_the_rest(
    tmp_path: Path, shared: bool
) -> None:
    """Buckets of the aggregator that lives are undisturbed; the other's go on from version 4's
    values with the gradients of iterations 7 and later."""

    async def act(cluster: Cluster, ranks: list[Rank], folder: Path) -> None:
        lost = [b for b in range(BUCKETS) if cluster.places[b].aggregator == "a1"]
        assert 0 < len(lost) < BUCKETS
        for rank in ranks:
            await rank.close()
        await lose(cluster, ("a1",), folder)
        ranks[:] = [Rank(cluster, rank) for rank in range(WORKERS)]
        await train(ranks, 9)
        for bucket in range(BUCKETS):
            version, parameters, _ = states_of(cluster, bucket)
            assert version == 9
            wanted = expected(bucket, 9)
            if bucket in lost:
                numbers = (1, 2, 3, 4, 7, 8, 9)
                rows = ([gradient(r, i, bucket) for r in range(WORKERS)] for i in numbers)
                wanted = replay(UPDATE, "float32", np.ones(ELEMENTS, np.float32), rows)
            assert parameters.tobytes() == wanted.tobytes(), bucket

    played(act, tmp_path, shared=shared)


def test_workers_that_live_bring_the_parameters_and_the_folder_the_states(tmp_path: Path) -> None:
    """On another host, and they keep no copies of states."""

    async def act(cluster: Cluster, ranks: list[Rank], folder: Path) -> None:
        cluster.plan = msgspec.structs.replace(cluster.plan, state_copies=0)
        lost = [b for b in range(BUCKETS) if cluster.places[b].aggregator == "a1"]
        await lose(cluster, ("a1",), folder)
        for _ in range(600):
            if all(states_of(cluster, bucket)[0] == 6 for bucket in lost):
                break
            await asyncio.sleep(0.05)
        for bucket in lost:
            version, parameters, states = states_of(cluster, bucket)
            assert version == 6
            assert parameters.tobytes() == expected(bucket, 6).tobytes(), "the workers' own"
            np.testing.assert_allclose(states, momenta(bucket, 4), rtol=1e-6)
        await train(ranks, 8)

    played(act, tmp_path, shared=False)
