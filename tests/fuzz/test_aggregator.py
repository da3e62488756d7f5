"""A whole aggregator, regions and all, under commands that only their types bound."""

import asyncio
from random import Random

import pytest
from tests.fuzz.messages import message

from slackwater.common.base import codec
from slackwater.common.shell import run_service
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.schemas import subjects
from slackwater.schemas.base import Message
from slackwater.schemas.service import GetHealth
from slackwater.services.aggregator import orders
from slackwater.services.aggregator.config import AggregatorConfig
from slackwater.services.aggregator.shell import Aggregator

AT_ONCE = 16


async def _ask(client: World, verb: str, said: Message) -> None:
    subject = subjects.command("aggregator", "a1", verb)
    raw = await client.bus.request(subject, codec.encode(said), timeout_s=60.0)
    if b"has not answered within" in raw:
        raise AssertionError(f"never answered: {said}")


async def _fuzz(seed: int, count: int) -> None:
    rng = Random(seed)
    sim = SimWorld(seed)
    world, client, stop = sim.client("aggregator-a1"), sim.client("client"), asyncio.Event()
    config = AggregatorConfig(id="a1", cluster_token="c", memory_bytes_max=64 << 20)
    fabrics = {"memory": MemoryFabric(MemoryNetwork(seed=seed, shared=True), mapped=True)}
    aggregator = Aggregator(config, world, fabrics, {"memory": "a1"}, virtual=True)
    definition = aggregator.definition()
    service = asyncio.ensure_future(run_service(definition, world, stop))
    await asyncio.sleep(1.0)
    await _ask(client, "health", GetHealth())
    verbs = list(definition.endpoints.items())
    hosted = 0
    for _ in range(count // AT_ONCE):
        chosen = [rng.choice(verbs) for _ in range(AT_ONCE)]
        asks = [_ask(client, verb, message(kind, rng)) for verb, kind in chosen]
        await asyncio.gather(*asks)
        hosted = max(hosted, len(aggregator.core.buckets))
        assert not service.done()
    assert hosted > 0
    stop.set()
    assert await service == 0


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
def test_no_command_breaks_an_aggregator_or_stays_unanswered(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def inline(work, *arguments):  # type: ignore[no-untyped-def]
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    # Nothing is folded here, and compiling for every rule and dtype would take minutes.
    monkeypatch.setattr(orders, "warm", lambda *_: None)
    run_simulated(_fuzz(seed, 400 if seed == 1 else 20_000))
