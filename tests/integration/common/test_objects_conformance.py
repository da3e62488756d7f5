"""One suite for every object store."""

from collections.abc import AsyncIterator

import pytest

from slackwater.common.base.clock import LiveClock
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.store.objects import MemoryObjects, NatsObjects, Objects


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live)])
async def objects(request: pytest.FixtureRequest) -> AsyncIterator[Objects]:
    if request.param == "memory":
        yield MemoryObjects(LiveClock())
        return
    server: NatsServer = request.getfixturevalue("own_nats_server")
    bus = await NatsBus.connect(server.url, "objects")
    yield NatsObjects(bus, "code")
    await bus.close()


async def test_an_object_comes_back_as_it_was_put(objects: Objects) -> None:
    """Empty, small, and of many pieces."""
    assert await objects.names() == {}
    assert await objects.get("absent") is None
    for name, payload in (("a", b"small"), ("b", b""), ("c" * 64, bytes(range(256)) * 4000)):
        await objects.put(name, payload)
        assert await objects.get(name) == payload
    now_s = LiveClock().now_s()
    found = await objects.names()
    assert set(found) == {"a", "b", "c" * 64}
    assert all(abs(at_s - now_s) < 300.0 for at_s in found.values())


async def test_a_name_is_stored_once(objects: Objects) -> None:
    await objects.put("a", b"first")
    await objects.put("a", b"second")
    assert await objects.get("a") == b"first"


async def test_what_is_deleted_is_gone_and_may_come_again(objects: Objects) -> None:
    await objects.put("a", b"first")
    for _ in range(2):
        await objects.delete("a")
    assert await objects.get("a") is None
    assert await objects.names() == {}
    await objects.put("a", b"second")
    assert await objects.get("a") == b"second"
