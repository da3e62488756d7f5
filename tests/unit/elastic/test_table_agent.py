"""Tables held to one contract, in memory as simulations have them and in an Agent's regions."""

import numpy as np
import pytest
from tests.sim.elastic import Kills, MemoryTables, Store

from slackwater.agent.table_agent import TableAgent
from slackwater.agent.table_rows import RowUpdates
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.host import Tables
from slackwater.elastic.run import AgentTables


@pytest.fixture(params=["memory", "agent"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tables:
    first: dict[str, Floats] = {
        "w": np.arange(6, dtype=np.float32).reshape(3, 2),
        "n": np.zeros((1, 1), np.float32),
        "rows": np.arange(10, dtype=np.float32).reshape(5, 2),
    }
    if request.param == "memory":
        from random import Random

        return MemoryTables(Store(dict(first)), 0, Kills(Random(0), 0.0))
    monkeypatch.delenv("SLACKWATER_JOB", raising=False)
    return AgentTables(TableAgent(first, ["rows"]))


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


def test_more_rows_than_a_slot_has_room_for_are_added_whole(tables: Tables) -> None:
    every = RowUpdates(np.arange(5), np.ones((5, 2), np.float32))
    tables.apply(1, {"rows": every})
    tables.apply(2, {"rows": RowUpdates(np.array([2]), np.ones((1, 2), np.float32))})
    assert tables.read("rows").tolist() == [[1, 2], [3, 4], [6, 7], [7, 8], [9, 10]]


def test_rows_of_several_blocks_are_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slackwater.common.domains.slots.layout.BLOCK_BYTES", 64)
    monkeypatch.delenv("SLACKWATER_JOB", raising=False)
    first = np.arange(60, dtype=np.float32).reshape(20, 3)
    agent = TableAgent({"t": first}, ["t"])
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
