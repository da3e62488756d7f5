"""The leading master keeps the stream of facts as its configuration says."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.store.history import Keeping
from slackwater.common.store.history_memory import MemoryHistory
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.fact_stream import keep_facts

CONFIG = MasterConfig(facts_bytes=1024**2, facts_s=60.0, facts_per_subject=5)


class Port:
    def __init__(self) -> None:
        self.counted: list[str] = []

    def count(self, name: str, by: int = 1) -> None:
        self.counted.append(name)


async def lived(sim: SimWorld, for_s: float) -> Port:
    """A master that leads for so long."""
    port: Any = Port()
    task = asyncio.ensure_future(keep_facts(sim.client("master"), CONFIG)(port))
    await sim.clock.sleep_until(sim.clock.now_s() + for_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found: Port = port
    return found


def test_the_leading_master_makes_the_stream_once() -> None:
    async def program() -> None:
        sim = SimWorld(1)
        with structlog.testing.capture_logs() as logs:
            await lived(sim, 10 * limits.FACTS_LOOK_S)
            await lived(sim, limits.FACTS_LOOK_S)  # The next leader finds it as it should be.
        assert [entry["event"] for entry in logs] == ["facts.kept"]
        bus = sim.broker.connect("x")
        await bus.publish("sw.v1.evt.job.j1.running", b"1")
        async with aclosing(sim.history.read()) as facts:
            assert [fact.payload async for fact in facts] == [b"1"]

    run_simulated(program())


def test_a_master_that_cannot_make_it_leads_on_says_why_once_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No room for the stream for a minute; then there is."""

    async def program() -> None:
        sim = SimWorld(1)
        from_s = sim.clock.now_s()
        keep = MemoryHistory.keep

        async def full(self: MemoryHistory, keeping: Keeping) -> bool:
            if sim.clock.now_s() < from_s + 60.0:
                raise Rejected("stream facts: insufficient storage resources available")
            return await keep(self, keeping)

        monkeypatch.setattr(MemoryHistory, "keep", full)
        with structlog.testing.capture_logs() as logs:
            port = await lived(sim, 61.0 + limits.FACTS_RETRY_S)
        assert [entry["event"] for entry in logs] == ["facts.unkept", "facts.kept"]
        assert "insufficient storage" in logs[0]["reason"]
        assert set(port.counted) == {"facts_unkept"}
        assert len(port.counted) >= 60.0 / limits.FACTS_RETRY_S

    run_simulated(program())
