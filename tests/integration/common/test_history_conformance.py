"""One suite for every `History`: facts are kept in their order, bounded, and read from anywhere."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import Unavailable
from slackwater.common.bus.base import Bus
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.store.history import History, Keeping, Kept, NothingKept
from slackwater.common.store.history_memory import MemoryHistory
from slackwater.common.store.history_nats import NatsHistory
from slackwater.schemas import subjects

KEEPING = Keeping(nbytes=1024**2, seconds=3600.0, per_subject=100)
J1, J2 = subjects.event("job", "j1", "running"), subjects.event("job", "j2", "running")


@dataclass
class Site:
    """A publisher, its server, and the history that a client reads there."""

    bus: Bus
    history: History
    connect: Callable[[], Awaitable[History]]

    async def tell(self, subject: str, *payloads: bytes) -> None:
        for payload in payloads:
            await self.bus.publish(subject, payload)
        await self.bus.flush()

    async def told(self, *patterns: str, since_s: float = 0.0) -> list[bytes]:
        return [fact.payload for fact in await everything(self.history, *patterns, since_s=since_s)]

    async def settled(self, expected: list[bytes]) -> list[bytes]:
        """Core publishes are captured a moment later than they are sent."""
        for _ in range(1000):
            if (found := await self.told()) == expected:
                return found
            await asyncio.sleep(0.005)
        return await self.told()


async def everything(history: History, *patterns: str, since_s: float = 0.0) -> list[Kept]:
    async with aclosing(history.read(patterns, since_s=since_s)) as facts:
        return [fact async for fact in facts]


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live)])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    buses: list[NatsBus] = []
    if request.param == "memory":
        broker = MemoryBroker()
        shared = MemoryHistory(broker)

        async def again() -> History:
            return shared

        yield Site(broker.connect("publisher"), shared, again)
        return
    server: NatsServer = request.getfixturevalue("own_nats_server")

    async def connected() -> History:
        buses.append(await NatsBus.connect(server.url, "reader"))
        return NatsHistory(buses[-1])

    bus = await NatsBus.connect(server.url, "publisher")
    yield Site(bus, await connected(), connected)
    for each in (*buses, bus):
        await each.close()


async def test_nothing_is_kept_before_somebody_says_so(site: Site) -> None:
    """A cluster of an older version: the error names the stream and what to do."""
    await site.tell(J1, b"before")
    with pytest.raises(NothingKept, match=r"stream 'facts'.*slackwater tap"):
        await site.told()
    assert await site.history.keep(KEEPING)
    assert await site.told() == []


async def test_facts_are_kept_in_their_order_and_other_messages_are_not(site: Site) -> None:
    await site.history.keep(KEEPING)
    await site.tell(J1, b"1")
    await site.tell(subjects.telemetry("job", "j1", "iterations"), b"telemetry")
    await site.bus.publish(subjects.command("master", "main", "get"), b"a request")
    await site.tell(J2, b"2", b"\x00\xff\r\n")
    await site.tell(J1, b"4")
    assert await site.settled([b"1", b"2", b"\x00\xff\r\n", b"4"])
    facts = await everything(site.history)
    assert [fact.subject for fact in facts] == [J1, J2, J2, J1]
    assert [fact.sequence for fact in facts] == [1, 2, 3, 4]
    assert all(early.at_s <= late.at_s for early, late in pairwise(facts))


async def test_keeping_is_idempotent_and_follows_the_configuration(site: Site) -> None:
    assert await site.history.keep(KEEPING)
    await site.tell(J1, b"1", b"2", b"3")
    await site.settled([b"1", b"2", b"3"])
    assert not await site.history.keep(KEEPING)
    assert not await (await site.connect()).keep(KEEPING)
    assert await site.history.keep(replace(KEEPING, per_subject=2))
    assert await site.settled([b"2", b"3"]) == [b"2", b"3"]
    assert not await site.history.keep(replace(KEEPING, per_subject=2))


async def test_a_subject_that_repeats_itself_leaves_room_for_the_others(site: Site) -> None:
    await site.history.keep(replace(KEEPING, per_subject=3))
    await site.tell(J2, b"once")
    await site.tell(J1, *(b"%d" % n for n in range(50)))
    assert await site.settled([b"once", b"47", b"48", b"49"]) == [b"once", b"47", b"48", b"49"]


async def test_bytes_are_bounded_and_the_oldest_go_first(site: Site) -> None:
    """More than ten times the bound is told; what is left is within it, and is the newest."""
    await site.history.keep(replace(KEEPING, nbytes=64 * 1024, per_subject=10_000))
    payloads = [b"%04d" % n + bytes(1020) for n in range(700)]
    await site.tell(J1, *payloads)
    for _ in range(1000):
        found = await site.told()
        if found and found[-1] == payloads[-1]:
            break
        await asyncio.sleep(0.005)
    assert found == payloads[-len(found) :]
    assert 30 < len(found) <= 64


async def test_age_is_bounded(site: Site) -> None:
    """Takes a second: the server counts the real one."""
    await site.history.keep(replace(KEEPING, seconds=1.0))
    await site.tell(J1, b"old")
    for _ in range(1000):
        if not await site.told():
            break
        await asyncio.sleep(0.01)
    await site.tell(J1, b"new")
    assert await site.settled([b"new"]) == [b"new"]


async def test_facts_are_read_by_subject_and_from_a_time_on(site: Site) -> None:
    await site.history.keep(KEEPING)
    await site.tell(J1, b"1")
    await site.tell(J2, b"2")
    await site.settled([b"1", b"2"])
    between_s = (await everything(site.history))[-1].at_s + 0.001
    await asyncio.sleep(0.01)
    await site.tell(J1, b"3")
    await site.tell(subjects.event("migration", "m1", "started"), b"4")
    await site.settled([b"1", b"2", b"3", b"4"])
    assert await site.told(subjects.events("job", "j1")) == [b"1", b"3"]
    assert await site.told(subjects.events("job", "j2"), subjects.events("migration")) == [
        b"2",
        b"4",
    ]
    assert await site.told(subjects.events("job", "nobody")) == []
    assert await site.told(since_s=between_s) == [b"3", b"4"]
    assert await site.told(subjects.events("job"), since_s=between_s) == [b"3"]
    async with aclosing(site.history.read([subjects.events("job")], after=1)) as facts:
        assert [fact.payload async for fact in facts] == [b"2", b"3"]


async def test_more_facts_than_one_read_asks_for(site: Site) -> None:
    await site.history.keep(replace(KEEPING, per_subject=10_000))
    payloads = [b"%d" % n for n in range(2 * limits.STORE_READ_MAX + 3)]
    await site.tell(J1, *payloads)
    assert await site.settled(payloads) == payloads


async def test_a_follower_gets_what_was_and_what_comes_once(site: Site) -> None:
    await site.history.keep(KEEPING)
    await site.tell(J1, b"1", b"2")
    await site.settled([b"1", b"2"])
    found: list[bytes] = []
    async with aclosing(site.history.read([subjects.events("job", "j1")], follow=True)) as facts:
        async with asyncio.timeout(20):
            async for fact in facts:
                found.append(fact.payload)
                if fact.payload == b"2":
                    await site.tell(J2, b"not asked for")
                    await site.tell(J1, b"3", b"4")
                if fact.payload == b"4":
                    break
    assert found == [b"1", b"2", b"3", b"4"]


async def test_two_readers_do_not_take_from_each_other(site: Site) -> None:
    await site.history.keep(KEEPING)
    await site.tell(J1, b"1", b"2")
    await site.settled([b"1", b"2"])
    other = await site.connect()
    assert [fact.payload for fact in await everything(other)] == [b"1", b"2"]
    assert await site.told() == [b"1", b"2"]


async def test_a_server_that_is_away_is_said_to_be(
    site: Site, request: pytest.FixtureRequest
) -> None:
    await site.history.keep(KEEPING)
    if isinstance(site.history, MemoryHistory):
        site.history._broker.stop()
    else:
        server: NatsServer = request.getfixturevalue("own_nats_server")
        await asyncio.to_thread(server.stop)
    with pytest.raises(Unavailable) as caught:
        await site.told()
    assert not isinstance(caught.value, NothingKept)
