"""Tables held to one contract, in memory as simulations have them and in an Agent's regions."""

import numpy as np
import pytest
from tests.sim.elastic import Kills, MemoryTables, Store

from slackwater.agent.table_agent import TableAgent
from slackwater.agent.table_rows import RowUpdates
from slackwater.agent.worker_bucket import TableKind
from slackwater.elastic.app import Table
from slackwater.elastic.host import Tables
from slackwater.elastic.rules import AdaGrad, Decay, NonNegative, SoftThreshold
from slackwater.elastic.run import AgentTables


@pytest.fixture(params=["memory", "agent"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tables:
    described = {
        "w": Table(3, 2, init=np.arange(6).reshape(3, 2)),
        "n": Table(1, 1),
        "rows": Table(5, 2, init=np.arange(10).reshape(5, 2), sparse=True),
        "projected": Table(2, 2, init=[[1, 2], [3, 4]], rule=NonNegative()),
        "some projected": Table(2, 2, init=[[1, 2], [3, 4]], sparse=True, rule=NonNegative()),
        "shrinks": Table(1, 3, init=[[4, -4, 1]], rule=SoftThreshold(0.5)),
        "shrinks faster": Table(1, 3, init=[[4, -4, 1]], rule=SoftThreshold(1.0)),
        "decays": Table(1, 1, init=[[16]], rule=Decay(0.5)),
    }
    first = {name: table.first_values(name) for name, table in described.items()}
    if request.param == "memory":
        from random import Random

        return MemoryTables(Store(described, first), 0, Kills(Random(0), 0.0))
    monkeypatch.delenv("SLACKWATER_JOB", raising=False)
    kinds = {name: TableKind(table.sparse, table.rule.update) for name, table in described.items()}
    return AgentTables(TableAgent(first, kinds), described)


def test_batches_are_added_exactly_and_counted(tables: Tables) -> None:
    assert tables.number == 0
    assert tables.read("w").tolist() == [[0, 1], [2, 3], [4, 5]]
    tables.apply(1, {"w": np.full((3, 2), 0.5, np.float32)})
    tables.apply(2, {"n": np.full((1, 1), 2.0**24 - 1, np.float32)})
    tables.apply(3, {})
    assert tables.number == 3
    assert tables.read("w").tolist() == [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]
    assert tables.read("n").tolist() == [[2**24 - 1]]


def test_a_read_is_the_callers_own(tables: Tables) -> None:
    found = tables.read("w")
    found[:] = 0
    assert tables.read("w").any()
    delta = np.ones((3, 2), np.float32)
    tables.apply(1, {"w": delta})
    assert (delta == 1).all()


def test_rows_are_added_to_and_read(tables: Tables) -> None:
    for number in (1, 2, 3):
        rows = np.array([4, 1])
        tables.apply(number, {"rows": RowUpdates(rows, np.array([[1, 2], [10, 20]], np.float32))})
    tables.apply(4, {"w": np.ones((3, 2), np.float32)})
    assert tables.number == 4
    assert tables.read_rows("rows", np.array([1, 4, 0])).tolist() == [[32, 63], [11, 15], [0, 1]]
    assert tables.read("rows")[[1, 4, 0]].tolist() == [[32, 63], [11, 15], [0, 1]]


def test_a_batch_is_a_step_of_each_tables_own_rule(tables: Tables) -> None:
    down, three = np.array([[-3, 1], [-1, 0]], np.float32), np.full((1, 3), 3, np.float32)
    shrinking = {"shrinks": three, "shrinks faster": three}
    tables.apply(1, {"projected": down, **shrinking}, {"shrinks": 2, "shrinks faster": 3})
    assert tables.read("projected").tolist() == [[0, 3], [2, 4]]
    assert tables.read("shrinks").tolist() == [[6, 0, 3]], "7 - 1, -1 + 1, 4 - 1"
    assert tables.read("shrinks faster").tolist() == [[4, 0, 1]], "7 - 3, |-1| < 3, 4 - 3"
    one = RowUpdates(np.array([1]), np.array([[-5, 5]], np.float32))
    tables.apply(2, {"some projected": one, "decays": np.ones((1, 1), np.float32)}, {"decays": 2})
    assert tables.read("some projected").tolist() == [[1, 2], [0, 9]]
    assert tables.read("decays").tolist() == [[5]], "16 / 4 + 1"
    tables.apply(3, {})
    assert tables.read("shrinks").tolist() == [[6, 0, 3]], "nothing was added, nothing shrinks"
    assert tables.read("decays").tolist() == [[5]]


def test_adagrads_steps_are_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACKWATER_JOB", raising=False)
    table, size = Table(2, 3, rule=AdaGrad(0.5)), (2, 3)
    kinds = {"t": TableKind(table.sparse, table.rule.update)}
    tables = AgentTables(TableAgent({"t": table.first_values("t")}, kinds), {"t": table})
    rng, x, h = np.random.default_rng(3), np.zeros(size), np.zeros(size)
    for number in range(1, 6):
        d = rng.standard_normal(size).astype(np.float32)
        h += d * d
        x += 0.5 * d / np.sqrt(h)
        tables.apply(number, {"t": d})
    assert np.allclose(tables.read("t"), x, rtol=1e-5)


def test_more_rows_than_a_slot_has_room_for_are_added_whole(tables: Tables) -> None:
    every = RowUpdates(np.arange(5), np.ones((5, 2), np.float32))
    tables.apply(1, {"rows": every})
    tables.apply(2, {"rows": RowUpdates(np.array([2]), np.ones((1, 2), np.float32))})
    assert tables.read("rows").tolist() == [[1, 2], [3, 4], [6, 7], [7, 8], [9, 10]]


def test_rows_of_several_blocks_are_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slackwater.common.domains.slots.layout.BLOCK_BYTES", 64)
    monkeypatch.delenv("SLACKWATER_JOB", raising=False)
    first = np.arange(60, dtype=np.float32).reshape(20, 3)
    agent = TableAgent({"t": first}, {"t": TableKind(sparse=True)})
    assert len(agent._by_rows["t"].blocks) == 4
    assert (agent.newest("t") == first).all()
    rng, expected = np.random.default_rng(0), first.copy()
    for _ in range(20):
        rows = rng.permutation(20)[: rng.integers(0, 20)]
        values = rng.integers(-3, 4, (len(rows), 3)).astype(np.float32)
        agent.add({"t": RowUpdates(rows, values)})
        expected[rows] += values
        some = rng.permutation(20)[:7]
        assert (agent.rows("t", some) == expected[some]).all()
    agent.close()
