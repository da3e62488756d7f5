"""Peers that connect and say nothing, or too much, on real sockets: they take no thread, no memory
and no descriptor that is not given back, and others get their channels all the same."""

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.common.transport.test_hostile_frames import HELLO, Place, Raw, memfds, place

from slackwater.common.base import limits
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.transport import tcp, wire
from slackwater.common.transport.host import split_identity
from slackwater.common.transport.region import Region
from slackwater.common.transport.reservations import Reservations
from slackwater.common.transport.target_stream import Served

GREETINGS = 24
PREPARE = wire.pack(wire.PREPARE, number=4096, offset=1, body=b"r")


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(limits, "GREETINGS_MAX", GREETINGS)
    monkeypatch.setattr(limits, "CONNECT_S", 20.0)  # No greeting ends by its deadline here.
    return str(request.param)


@contextlib.contextmanager
def silent(here: Place, count: int, source: str = "127.0.0.1") -> Iterator[None]:
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            if here.kind == "shm":
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(split_identity(here.listener.address)[1])
            else:
                port = int(here.listener.address.rpartition(":")[2])
                sock = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
            stack.enter_context(sock)
        yield


async def test_silent_connections_keep_nobody_out(kind: str, tmp_path: Path) -> None:
    """More than are waited for at once, and then one that greets."""
    async with place(kind, tmp_path) as here:
        with silent(here, 3 * GREETINGS):
            near = await here.fabric.connect(here.listener.address, b"greets", deadline_s=10)
            await near.close()


async def test_the_peer_with_the_most_silent_connections_loses_its_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is slow to greet is not another's to push out."""
    monkeypatch.setattr(limits, "GREETINGS_MAX", GREETINGS)
    async with place("tcp", tmp_path) as here, here.raw() as slow:
        await slow.say(HELLO[:10])
        with silent(here, 3 * GREETINGS, source="127.0.0.2"):
            await here.progress()
            await slow.say(HELLO[10:])
            assert (await slow.record())[0].kind == wire.WELCOME


async def test_no_thread_serves_a_channel_that_is_not_complete(tmp_path: Path) -> None:
    """A byte on a data stream begins one only when all streams of the channel are there."""

    def serving() -> int:
        return sum(thread.name == "transport-serve" for thread in threading.enumerate())

    async with place("tcp", tmp_path) as here:
        await here.progress()
        before = serving()
        async with here.raw() as control, here.raw() as data, here.raw() as theirs:
            await control.say(HELLO)
            _, session = await control.record()
            await data.say(wire.pack(wire.JOIN, handle=0, body=session) + b"x")
            assert (await data.record())[0].kind == wire.WELCOME
            await here.progress()
            assert serving() == before
            await theirs.say(wire.pack(wire.JOIN, handle=1, body=session))
            assert (await theirs.record())[0].kind == wire.WELCOME
            while serving() == before:  # noqa: ASYNC110 (another thread begins)
                await asyncio.sleep(0.001)


async def test_whoever_comes_while_compiled_code_is_loaded_waits_for_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is known as soon as its loading begins: who took that for its end imported it in the
    event loop, which then stood still as long as another thread compiled."""
    name = "loaded_slowly_for_a_test"
    (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.3)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tcp, "_COMPILED", (name,))
    tcp._loading.cache_clear()
    try:
        first = asyncio.create_task(tcp._loaded())
        while name not in sys.modules:  # noqa: ASYNC110 (another thread's work)
            await asyncio.sleep(0.001)
        await tcp._loaded()
        assert sys.modules[name].whole
        await first
    finally:
        tcp._loading.cache_clear()
        sys.modules.pop(name, None)


async def test_a_handover_and_the_end_in_one_segment_leave_no_region(tmp_path: Path) -> None:
    """The handover's task is cancelled before it begins."""
    handover = wire.pack(wire.HANDOVER, handle=1, number=1, offset=2, body=b"r")
    async with place("tcp", tmp_path) as here:
        before = memfds()
        for _ in range(3):
            async with here.greeted() as (control, _):
                await control.say(PREPARE + handover + wire.pack(wire.GOODBYE))
                assert await control.ended()
        await here.progress()
        assert memfds() == before


async def test_room_in_which_nothing_arrives_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel stays; what comes for it afterwards is refused."""
    monkeypatch.setattr(limits, "PREPARED_S", 0.05)
    async with place("tcp", tmp_path) as here:
        before = memfds()
        async with here.greeted() as (control, _):
            await control.say(PREPARE)
            header, _ = await control.record()
            assert header.kind == wire.OPENED
            assert memfds() == before + 1
            async with asyncio.timeout(5.0):
                while memfds() > before:  # noqa: ASYNC110 (a timer's work)
                    await asyncio.sleep(0.01)
            await said(control, wire.pack(wire.HANDOVER, number=header.handle, offset=2))


async def said(control: Raw, record: bytes) -> None:
    """It is refused, and the channel goes on."""
    await control.say(record)
    header, body = await control.record()
    assert header.kind == wire.REFUSED
    assert b"no room" in body


def test_room_that_is_written_into_is_kept() -> None:
    """However long that takes in all; it is given back when no more comes."""
    given: list[str] = []

    async def main() -> None:
        rooms = Reservations(Served())
        region = Region.create(64 * 4096, "slow")
        rooms.add(1, region, lambda: given.append("back"), limits.PREPARED_S)
        for page in range(20):
            region.buffer[page * 4096] = 1
            await asyncio.sleep(limits.PREPARED_S * 0.7)
            assert not region.closed
        await asyncio.sleep(limits.PREPARED_S * 2.1)
        assert region.closed
        assert given == ["back"]
        assert not len(rooms)

    run_simulated(main())
