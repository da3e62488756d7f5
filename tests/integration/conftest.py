"""A real nats-server for every integration test: one for the session, and fresh ones to break."""

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer

_numbers = count(1)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """Shared by all tests: use names of your own (fixture `unique`), and do not restart it."""
    with NatsServer(monitoring=True) as server:
        yield server


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
def own_nats_server() -> Iterator[NatsServer]:
    """This test's own, to kill and restart."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def unique() -> str:
    """A name that no other test of this session uses: for buckets, subjects and services."""
    return f"n{next(_numbers)}"


@pytest.fixture
async def nats_bus(nats_url: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_url, "test")
    yield bus
    await bus.close()
