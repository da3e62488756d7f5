"""Sparse tables: real aggregators are killed and blocks travel, while two workers add to rows and
read rows. Every update counts once, and no row is seen half updated (Cruise's AddVector: all
numbers of a row are equal, always).
"""

import asyncio
import os
import random
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.integration.aggregator.test_mode_kills import POINTS, travel

from slackwater.agent.snapshot import reads_of
from slackwater.agent.table_agent import TableAgent
from slackwater.agent.table_rows import RowUpdates
from slackwater.agent.worker_bucket import TableKind

LAYOUT = "slackwater.common.domains.slots.layout"
pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

SPARSE = {"t": TableKind(sparse=True)}
WORKERS, ROWS, WIDTH = 2, 3_000, 700
SHARED = 2
"""Rows whose number leaves this, divided by three, are added to by both; others by one rank."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the table into three, as one of a hundred megabytes would be."""
    monkeypatch.setattr(f"{LAYOUT}.BLOCK_BYTES", 4 * 1024 * 1024)


@dataclass
class Adders:
    """Agents in threads."""

    url: str
    transport: str
    sums: np.ndarray = field(default_factory=lambda: np.zeros((WORKERS, ROWS), np.float32))
    done: list[int] = field(default_factory=lambda: [0] * WORKERS)
    read: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORKERS))
    failures: list[BaseException] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for rank in range(WORKERS):
            self.threads.append(threading.Thread(target=self._run, args=(rank,), daemon=True))
            self.threads[-1].start()

    def _run(self, rank: int) -> None:
        rng = np.random.default_rng(rank)
        try:
            with self._agent(rank) as agent:
                while not self.over.is_set():
                    self._add(agent, rank, rng)
                    self._look(agent, rank, rng.permutation(ROWS)[:200])
                self.together.wait(60.0)
                self._check(agent)
                self.together.wait(60.0)
        except BaseException as error:
            self.failures.append(error)

    def _agent(self, rank: int) -> TableAgent:
        return TableAgent(
            {"t": np.zeros((ROWS, WIDTH), np.float32)}, SPARSE, url=self.url, job="j1",
            rank=rank, workers=WORKERS, transport=self.transport, deadline_s=60.0,
        )  # fmt: skip

    def _check(self, agent: TableAgent) -> None:
        """Compare all with what both added."""
        assert (agent.newest("t") == self.sums.sum(0)[:, None]).all()

    def _add(self, agent: TableAgent, rank: int, rng: np.random.Generator) -> None:
        rows = rng.permutation(ROWS)[: rng.integers(0, 60)]
        rows = rows[(rows % 3 == rank) | (rows % 3 == SHARED)]
        added = rng.integers(-4, 5, len(rows)).astype(np.float32)
        agent.add({"t": RowUpdates(rows, np.repeat(added[:, None], WIDTH, 1))})
        self.sums[rank, rows] += added
        self.done[rank] += 1

    def _look(self, agent: TableAgent, rank: int, rows: np.ndarray) -> None:
        found = agent.rows("t", rows)
        self.read += len(rows)
        assert (found == found[:, :1]).all(), "a row is torn"
        own = rows % 3 == rank
        assert (found[own, 0] == self.sums[rank, rows[own]]).all(), "its own writes"

    async def until(self, batches: int) -> None:
        async with asyncio.timeout(60.0):
            while min(self.done) < batches:
                if self.failures:
                    raise self.failures[0]
                await asyncio.sleep(0.01)

    async def finish(self) -> None:
        self.over.set()
        for thread in self.threads:
            await asyncio.to_thread(thread.join, 60.0)
            assert not thread.is_alive(), "a worker hangs"
        if self.failures:
            raise self.failures[0]


@dataclass
class DenseAdders(Adders):
    """Two whole tables. What pushes led to is left where it is until somebody asks: some pushes
    come without a read between them, and some at once."""

    late: int = 0
    """Pushes that were not here when the program went on."""
    pushes: int = 0

    def _agent(self, rank: int) -> TableAgent:
        tables = {name: np.zeros((WORKERS + 1, 900), np.float32) for name in ("a", "b")}
        return TableAgent(
            tables, url=self.url, job="j1", rank=rank, workers=WORKERS, transport=self.transport,
            deadline_s=60.0,
        )  # fmt: skip

    def _check(self, agent: TableAgent) -> None:
        own, shared = self.sums[:, 0], self.sums[:, 1].sum()
        for name in ("a", "b"):
            assert (agent.newest(name) == np.array([*own, shared])[:, None]).all()

    def _add(self, agent: TableAgent, rank: int, rng: np.random.Generator) -> None:
        delta = np.zeros((WORKERS + 1, 900), np.float32)
        for row, at in ((rank, 0), (WORKERS, 1)):
            delta[row] = added = rng.integers(-4, 5)
            self.sums[rank, at] += added
        agent.add({"a": delta, "b": delta})
        self.pushes += 1
        self.late += any(bucket.version < bucket.iteration for bucket in agent._buckets)
        self.done[rank] += 1

    def _look(self, agent: TableAgent, rank: int, rows: np.ndarray) -> None:
        for name in "ab"[: rows[0] % 3]:
            found = agent.newest(name)
            self.read += 1
            assert (found == found[:, :1]).all(), "a table is torn"
            assert found[rank, 0] == self.sums[rank, 0], "its own writes"


async def disturbed(lab: Any, transport: str, kills: int, kind: type[Adders] = Adders) -> Adders:
    rng = random.Random(transport)
    await lab.aggregators("a1", "a2", transport=transport)
    run = kind(lab.supervisor.url, transport)
    run.start()
    await run.until(3)
    assert len(lab.director.jobs["j1"].places) == (3 if kind is Adders else 1), (
        "blocks of the table"
    )
    travelling = asyncio.ensure_future(travel(lab, rng))
    try:
        for kill in range(kills):
            victim, point = rng.choice(["a1", "a2"]), POINTS[kill % len(POINTS)]
            before = lab.restarts(victim)
            lab.supervisor.arm(victim, f"{point}=kill@{rng.randint(1, 6)}")
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            lab.supervisor.kill(victim, signal.SIGKILL)
            await lab.restarted(victim, before + 2)
            assert not travelling.done(), travelling
            await run.until(min(run.done) + 2)
    finally:
        travelling.cancel()
        await asyncio.gather(travelling, return_exceptions=True)
    await run.finish()
    return run


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_updates_of_rows_count_once_and_no_row_is_torn(lab: Any, transport: str) -> None:
    """Takes some ten seconds: aggregators start again twelve times."""
    await disturbed(lab, transport, 6)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_updates_of_whole_tables_count_once(lab: Any, transport: str) -> None:
    """Takes some ten seconds: aggregators start again twelve times."""
    run = await disturbed(lab, transport, 6, DenseAdders)
    assert isinstance(run, DenseAdders)
    assert run.read > 0
    assert (run.late > run.pushes / 4) == (transport == "tcp"), "what is far is read when asked for"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_pushes_that_nobody_read_yet_survive_a_lost_memory(lab: Any, transport: str) -> None:
    await lab.aggregators("a1", "a2", transport=transport)
    run = DenseAdders(lab.supervisor.url, transport)
    run.start()
    for kill in range(3):
        await run.until(8 * (kill + 1))
        assert await lab.lose("a1", lab.director.jobs["j1"]) >= 1
    await run.until(min(run.done) + 5)
    await run.finish()


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_thousand_kills_in_mid_fold_lose_no_update(lab: Any, transport: str) -> None:
    """Takes about an hour; ROW_KILLS for fewer."""
    run = await disturbed(lab, transport, int(os.environ.get("ROW_KILLS", "500")))
    assert run.read > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_a_billion_reads_beside_updates_see_no_torn_row(lab: Any) -> None:
    """Takes some minutes; ROW_READS for fewer."""
    reads, count, width = int(float(os.environ.get("ROW_READS", "1e9"))), 64, 16
    await lab.aggregators("a1", transport="shm")
    over, failures, batches = threading.Event(), list[BaseException](), [0]

    def live(rank: int) -> None:
        try:
            with TableAgent(
                {"t": np.zeros((count, width), np.float32)}, SPARSE, url=lab.supervisor.url,
                job="j1", rank=rank, workers=WORKERS, transport="shm", deadline_s=60.0,
            ) as agent:  # fmt: skip
                if rank == 0:
                    add(agent)
                else:
                    read(agent)
        except BaseException as error:
            failures.append(error)
        finally:
            over.set()

    def add(agent: TableAgent) -> None:
        rng, ones = np.random.default_rng(0), np.ones((8, width), np.float32)
        while not over.is_set():
            agent.add({"t": RowUpdates(rng.choice(count, 8, replace=False), ones)})
            batches[0] += 1

    def read(agent: TableAgent) -> None:
        rows = np.random.default_rng(1).integers(0, count, 16_384)
        for _ in range(-(-reads // len(rows))):
            found = agent.rows("t", rows).view(np.uint64)  # Two numbers at a time.
            assert (found == found[:, :1]).all(), "a row is torn"

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    if failures:
        raise failures[0]
    assert batches[0] > 100


async def test_rows_of_a_lost_region_are_what_is_mapped_here(lab: Any) -> None:
    """The supervisor forgot the memory, too: whoever maps it fills the next one."""
    await lab.aggregators("a1", "a2", transport="shm")
    run = Adders(lab.supervisor.url, "shm")
    run.start()
    for kill in range(3):
        await run.until(8 * (kill + 1))
        assert await lab.lose("a1", lab.director.jobs["j1"]) >= 1
    await run.until(min(run.done) + 5)
    await run.finish()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_whole_table_is_read_without_a_push(lab: Any, transport: str) -> None:
    """Over a network, too: each read was an empty batch, all tables there and back."""
    await lab.aggregators("a1", transport=transport)
    rng, shape = np.random.default_rng(0), (3_000, 7)

    def made(rank: int) -> TableAgent:
        return TableAgent(
            {"t": np.zeros(shape, np.float32)}, url=lab.supervisor.url, job="j1", rank=rank,
            workers=WORKERS, transport=transport, deadline_s=60.0,
        )  # fmt: skip

    def live(adder: TableAgent, reader: TableAgent) -> None:
        total = np.zeros(shape, np.float32)
        for _ in range(5):
            added = rng.integers(-9, 9, shape).astype(np.float32)
            total += added
            adder.add({"t": added})
            assert (reader.newest("t") == total).all()
        assert (adder.iteration, reader.iteration) == (5, 0)
        before, _ = reads_of(bucket.staging for bucket in adder._buckets)
        for _ in range(20):
            adder.add({"t": added})
            adder.newest("t")
        after, _ = reads_of(bucket.staging for bucket in adder._buckets)
        assert after - before <= 30, "one for each push, and a few that a busy machine delayed"

    agents = await asyncio.gather(*(asyncio.to_thread(made, rank) for rank in range(WORKERS)))
    try:
        await asyncio.to_thread(live, *agents)
    finally:
        for agent in agents:
            await asyncio.to_thread(agent.close)
