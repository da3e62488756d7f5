"""Workers join and leave a job while it trains: real Agents on a real aggregator, in this process.

Whatever comes and goes, every iteration is applied once, with the gradients of exactly those who
counted in it, and the parameters are, bit for bit, those of a replay with these sizes.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.in_process import InProcess

from slackwater.agent import Agent
from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.common.domains.slots.folding import replay
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.schemas.tensors import UpdateRule

SHAPES = {"w": (40, 30), "b": (7,), "v": (33,)}
WORKERS_MAX = 5
UPDATE = UpdateRule(name="adam", learning_rate=0.1)


def gradient(name: str, number: int) -> Any:
    """The gradient of one worker's batch: it says which batch that was."""
    made = np.random.default_rng([number, len(name), sum(SHAPES[name])])
    return made.standard_normal(SHAPES[name], np.float32)


class Rank:
    """One process of the job: it trains until it is ended."""

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers
        self.agent: Agent | None = None
        self.sizes: dict[int, int] = {}
        """Iteration -> how many workers rank 0 said that it has."""
        self.failure: BaseException | None = None
        self._ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def open(self) -> Agent:
        shapes = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
        agent = self.agent = Agent(
            tensors=shapes, job="elastic", rank=self.rank, workers=self.workers, update=UPDATE,
            deadline_s=30.0,
        )  # fmt: skip
        return agent

    def step(self) -> None:
        agent = self.agent
        assert agent is not None
        number, iteration = agent.gradients + self.rank, agent.iteration + 1
        self.sizes[iteration] = agent.workers
        for name in SHAPES:
            agent.push(name, gradient(name, number))
        agent.wait()

    def _run(self) -> None:
        try:
            self.open()
            while True:
                self.step()
        except SlackwaterError as error:
            self.failure = None if self._ended else error

    def end(self) -> None:
        """End the process, as a kill does."""
        self._ended = True
        while self.agent is None:
            assert self.thread.is_alive(), self.failure
        self.agent._session._fail(Rejected("it was ended"))  # type: ignore[union-attr]
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert self.failure is None
        self.agent._give_up(None)


class ElasticJob:
    """Rank 0 in this thread, the others in theirs."""

    def __init__(self, workers: int) -> None:
        self.first = Rank(0, workers)
        self.others: dict[int, Rank] = {}
        self._grow(workers)
        self.first.open()

    def _grow(self, workers: int) -> None:
        for rank in range(1, workers):
            if rank not in self.others:
                self.others[rank] = Rank(rank, workers)
                self.others[rank].thread.start()

    def scale(self, workers: int, steps: int) -> None:
        """Train on; the new number counts after the next iteration."""
        self._grow(workers)
        session: Any = self.first.agent._session  # type: ignore[union-attr]
        session.sizing.wanted = workers
        for _ in range(2 + steps):
            self.first.step()
        assert session.sizing.applied.workers == workers
        for rank in [rank for rank in self.others if rank >= workers]:
            self.others.pop(rank).end()

    def close(self) -> None:
        for rank in self.others.values():
            rank.end()
        self.first.agent._give_up(None)  # type: ignore[union-attr]

    def check(self, cluster: InProcess) -> None:
        """Compare with the replay of what rank 0 saw, tensor by tensor."""
        agent, sizes = self.first.agent, self.first.sizes
        assert agent is not None
        assert list(sizes) == list(range(1, agent.iteration + 1)), "an iteration was lost"
        assert agent.gradients == sum(sizes.values())
        for name in SHAPES:
            begun, pushed = 0, []
            for workers in sizes.values():
                pushed.append([gradient(name, begun + rank).ravel() for rank in range(workers)])
                begun += workers
            first = np.ones(SHAPES[name], np.float32).ravel()
            expected = replay(UPDATE, "float32", first, pushed)
            assert np.array_equal(agent.pull(name).ravel(), expected), name
        for bucket in range(3):
            slots: SlotRegion = cluster.slots("elastic", bucket)
            assert slots.version == agent.iteration
            assert slots.sizes.newest.gradients(slots.version) == agent.gradients


@pytest.fixture
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def cluster_of(patch: pytest.MonkeyPatch) -> InProcess:
    cluster = InProcess(bucket_bytes=64)  # Each tensor is a bucket.
    cluster.workers_max = WORKERS_MAX
    cluster.take_part(patch)
    return cluster


def test_two_three_one_two_workers_lose_no_iteration(patched: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(patched)
    job = ElasticJob(2)
    for workers in (3, 1, 2):
        job.scale(workers, steps=2)
    job.close()
    assert set(job.first.sizes.values()) == {1, 2, 3}
    job.check(cluster)


@settings(max_examples=15)
@given(
    st.integers(1, WORKERS_MAX),
    st.lists(st.tuples(st.integers(1, WORKERS_MAX), st.integers(0, 2)), max_size=5),
)
def test_any_sizes_equal_their_replay(begun: int, later: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster = cluster_of(patch)
        job = ElasticJob(begun)
        for workers, steps in later:
            job.scale(workers, steps)
        job.close()
        job.check(cluster)
