"""Tables held to one contract, in memory as simulations have them and in an Agent's regions."""

import numpy as np
import pytest
from tests.sim.elastic import Kills, MemoryTables, Store

from slackwater.agent.table_agent import TableAgent
from slackwater.common.domains.slots.rules import Floats
from slackwater.elastic.host import Tables
from slackwater.elastic.run import AgentTables


@pytest.fixture(params=["memory", "agent"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tables:
    first: dict[str, Floats] = {
        "w": np.arange(6, dtype=np.float32).reshape(3, 2),
        "n": np.zeros((1, 1), np.float32),
    }
    if request.param == "memory":
        from random import Random

        return MemoryTables(Store(dict(first)), 0, Kills(Random(0), 0.0))
    monkeypatch.delenv("SLACKWATER_JOB", raising=False)
    return AgentTables(TableAgent(first))


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
