"""A drained lender stays drained, whatever becomes of its daemon and its machine."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sim.lenders import Lender

from slackwater.common.base.errors import Rejected
from slackwater.common.shell.client import Client
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok
from slackwater.schemas.memory import EvictBegun, EvictNow, SetLending


async def made() -> tuple[Lender, Client]:
    sim, network = SimWorld(1), MemoryNetwork(seed=1, latency_s=0.0003)
    system: Any = SimpleNamespace(
        sim=sim, network=network, fabric=MemoryFabric(network, mapped=True), mapped=True
    )
    lender = Lender(system, "s1")
    await lender.start()
    await asyncio.sleep(12.0)
    world = sim.client("operator")
    return lender, Client(world.bus, world.clock, rng=world.rng)


def free(lender: Lender) -> int:
    assert lender.slabd is not None
    return len(lender.slabd.core.having("free"))


async def drained_lives(kills: bool) -> None:
    lender, operator = await made()
    had = free(lender)
    assert had > 2
    subject = subjects.command("slabd", "s1", "lending")
    await operator.ask(subject, SetLending(lending=False), Ok)
    for _ in range(2):
        await (lender.kill() if kills else lender.end())
        await lender.start()
        await asyncio.sleep(12.0)
        assert lender.slabd is not None
        assert not lender.slabd.heartbeat(0.0).lending
        assert free(lender) == 0
    await operator.ask(subject, SetLending(lending=True), Ok)
    await lender.kill()
    await lender.start()
    await asyncio.sleep(12.0)
    assert free(lender) == had
    await lender.end()


async def nothing_to_evict() -> None:
    lender, operator = await made()
    subject = subjects.command("slabd", "s1", "evict")
    with pytest.raises(Rejected, match="s1 lends nothing that is not being evicted already"):
        await operator.ask(subject, EvictNow(count=2), EvictBegun)
    await lender.end()


def simulate(work: Coroutine[Any, Any, None]) -> None:
    run_simulated(work)


@pytest.mark.parametrize("kills", [True, False], ids=["kill -9", "stop"])
def test_a_drain_survives_the_daemon_until_an_operator_ends_it(kills: bool) -> None:
    """Regression: `lending` was kept nowhere, so a drained lender lent again after a restart."""
    simulate(drained_lives(kills))


def test_an_eviction_where_nothing_is_lent_is_refused() -> None:
    """Regression: it was answered Ok, and nothing happened."""
    simulate(nothing_to_evict())
