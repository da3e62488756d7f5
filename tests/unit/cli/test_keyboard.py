"""Typed text reaches a process once and in order, over the bus in memory and in virtual time:
its program has little room, answers are lost, and it is started again."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import soon

from slackwater.client.terminal import PENDING_BYTES_MAX, Keyboard
from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.shell.client import Client
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.schemas import subjects
from slackwater.schemas.base import CONFLICT, Message, NodeId, Refused
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.terminals import Typed, TypeIn

INFO = ServiceInfo("x", "1.0.0", "answers in a test", {})
SPEC = JobSpec(id="j1", program=("sh",), workers=1)
RECORD = JobRecord(spec=SPEC, state="running", node=NodeId("n1"))


class Site:
    """A worker service whose program takes `rooms` bytes at a time, and says so unless `lost`."""

    def __init__(self, rooms: list[int], lost: list[bool]) -> None:
        self.rooms, self.lost = rooms, lost
        self.number = 0
        self.attempt = 0
        self.places: dict[str, int] = {}
        self.read = b""
        self.sizes: list[tuple[int, int]] = []

    async def open(self) -> Client:
        self.sim = SimWorld(1)
        get = subjects.command("master", "main", "get")
        await self._serve("master", get, lambda _: JobInfo(job=RECORD))
        await self._serve("worker", subjects.command("worker", "n1", "type"), self._type)
        world = self.sim.client("cli")
        return Client(world.bus, world.clock, rng=world.rng)

    async def _serve(self, name: str, subject: str, answer: Callable[[Delivery], Message]) -> None:
        async def respond(delivery: Delivery) -> bytes:
            return codec.encode(answer(delivery))

        await self.sim.client(name).bus.serve(INFO, [Endpoint("x", subject, respond, {}, 8)])

    def _type(self, delivery: Delivery) -> Message:
        asked = codec.decode(delivery.payload, TypeIn)
        if asked.attempt not in (None, self.attempt):
            return Refused(reason="started again", code=CONFLICT)
        self.sizes.append((asked.columns, asked.rows))
        place, room = self.places.get(asked.seat, 0), self.rooms[self.number % len(self.rooms)]
        taken = asked.data[place - asked.place :][:room] if asked.place <= place else b""
        self.read += taken
        place = self.places[asked.seat] = place + len(taken)
        self.number += 1
        if self.lost[self.number % len(self.lost)]:
            return Refused(reason="its answer was lost", retry_after_s=0.1)
        return Typed(job="j1", rank=0, attempt=self.attempt, place=place)

    async def until(self, read: bytes) -> None:
        await soon(lambda: self.read == read, f"{len(read)} bytes are read")


def simulated(site: Site, program: Callable[[Keyboard], Awaitable[None]]) -> None:
    async def run() -> None:
        keyboard = Keyboard(await site.open(), RECORD, lambda: (80, 24))
        keeping = asyncio.create_task(keyboard.keep())
        await program(keyboard)
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping

    run_simulated(run())


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=40), max_size=8),
    rooms=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    lost=st.lists(st.booleans(), min_size=1, max_size=5).filter(lambda each: not all(each)),
)
def test_every_byte_is_read_once_and_in_order(
    pieces: list[bytes], rooms: list[int], lost: list[bool]
) -> None:
    site = Site(rooms, lost)

    async def program(keyboard: Keyboard) -> None:
        for piece in pieces:
            keyboard.type(piece)
            await asyncio.sleep(0.01)
        await site.until(b"".join(pieces))

    simulated(site, program)


def test_somebody_who_types_nothing_is_known_to_be_there() -> None:
    site = Site([9], [False])

    async def program(keyboard: Keyboard) -> None:
        await asyncio.sleep(65.0)
        assert site.number >= 6
        assert set(site.sizes) == {(80, 24)}

    simulated(site, program)


def test_room_comes_back_once_something_is_read() -> None:
    site, told = Site([5000], [False]), []

    async def program(keyboard: Keyboard) -> None:
        keyboard.when_room = lambda: told.append(keyboard.room)
        keyboard.type(b"x" * PENDING_BYTES_MAX)
        assert keyboard.room == 0
        await site.until(b"x" * PENDING_BYTES_MAX)

    simulated(site, program)
    assert told == sorted(told)
    assert told[0] == 4096


def test_one_whose_seat_was_given_away_goes_on_typing() -> None:
    site = Site([100], [False])

    async def program(keyboard: Keyboard) -> None:
        keyboard.type(b"before ")
        await site.until(b"before ")
        site.places.clear()
        keyboard.type(b"after")
        await site.until(b"before after")

    simulated(site, program)


def test_a_process_that_was_started_again_is_typed_nothing_that_was_meant_for_the_other() -> None:
    site = Site([100], [False])

    async def program(keyboard: Keyboard) -> None:
        keyboard.type(b"one")
        await site.until(b"one")
        site.attempt = 1
        keyboard.type(b"two")
        await asyncio.sleep(10.0)
        assert site.read == b"one"

    with pytest.raises(Rejected, match="started again"):
        simulated(site, program)
