"""One suite for every object store."""

import io
from collections.abc import AsyncIterator
from pathlib import Path

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


async def put(objects: Objects, name: str, payload: bytes) -> None:
    await objects.put(name, io.BytesIO(payload))


async def got(objects: Objects, name: str) -> bytes | None:
    target = io.BytesIO()
    return target.getvalue() if await objects.get(name, target) else None


async def test_an_object_comes_back_as_it_was_put(objects: Objects) -> None:
    """Empty, small, and of many pieces."""
    assert await objects.names() == {}
    assert await got(objects, "absent") is None
    for name, payload in (("a", b"small"), ("b", b""), ("c" * 64, bytes(range(256)) * 4000)):
        await put(objects, name, payload)
        assert await got(objects, name) == payload
    now_s = LiveClock().now_s()
    found = await objects.names()
    assert set(found) == {"a", "b", "c" * 64}
    assert all(abs(at_s - now_s) < 300.0 for at_s in found.values())


async def test_a_name_is_stored_once(objects: Objects) -> None:
    await put(objects, "a", b"first")
    await put(objects, "a", b"second")
    assert await got(objects, "a") == b"first"


async def test_what_is_deleted_is_gone_and_may_come_again(objects: Objects) -> None:
    await put(objects, "a", b"first")
    for _ in range(2):
        await objects.delete("a")
    assert await got(objects, "a") is None
    assert await objects.names() == {}
    await put(objects, "a", b"second")
    assert await got(objects, "a") == b"second"


async def test_an_object_goes_from_file_to_file(objects: Objects, tmp_path: Path) -> None:
    payload = bytes(range(256)) * 8000
    (tmp_path / "in").write_bytes(payload)
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as target:
        await objects.put("a", source)
        assert await objects.get("a", target)
    assert (tmp_path / "out").read_bytes() == payload
