"""Permits between real programs' threads and a worker service's socket."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from tests.integration.services.worker.test_relay import World, agent, open_relay, world
from tests.waiting import soon

from slackwater.agent.permits import ComputePermit, MovePermit, NodePermits, lent
from slackwater.common.base import limits
from slackwater.common.bus.relay import frame, greeted, read_frame
from slackwater.common.native.link import Interface, Link
from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import PermitUse
from slackwater.schemas.relay import (
    MemoryAsk,
    PermitAsk,
    PermitEnd,
    PermitGranted,
    RelayRefused,
)
from slackwater.services.worker.memory_shares import MemoryShares
from slackwater.services.worker.permit_server import PermitServer
from slackwater.services.worker.permits import Permits

__all__ = ["world"]


async def in_thread(work: Callable[[], None]) -> None:
    await asyncio.wait_for(asyncio.to_thread(work), 30)


async def test_two_programs_compute_one_after_the_other(world: World) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def compute(rank: int) -> None:
        nonlocal inside, most
        permit = ComputePermit(world.ticket(rank=rank))
        for _ in range(50):
            permit.take()
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.0005)
            with lock:
                inside -= 1
            permit.give_back()
        permit.close()

    async with open_relay(world):
        world.ticket(rank=0), world.ticket(rank=1)
        await asyncio.gather(*(in_thread(lambda r=r: compute(r)) for r in range(2)))
        assert most == 1
        await soon(lambda: world.permits.permits.counts("compute").total() == 0)


async def test_a_program_that_waits_lets_others_compute(world: World) -> None:
    first, second = NodePermits(world.ticket(rank=0)), NodePermits(world.ticket(rank=1))

    def both() -> None:
        first.compute.take()
        with lent(first):
            second.compute.take()
            second.compute.give_back()
        assert world.permits.permits.counts("compute")["primary"] == 1
        first.compute.close()
        second.compute.close()

    async with open_relay(world):
        await in_thread(both)
    times = first.take_times()
    assert times.compute_s > 0.0
    assert first.take_times().compute_s == 0.0


async def test_an_iteration_without_a_wait_lets_others_go_first(world: World) -> None:
    turns: list[str] = []

    def one() -> None:
        permit = ComputePermit(world.ticket(rank=0))
        permit.take()
        asked.set()
        while world.permits.permits.counts("compute")["waits"] == 0:
            time.sleep(0.001)
        permit.on_boundary()
        turns.append("one")
        permit.close()

    def other() -> None:
        asked.wait(10)
        permit = ComputePermit(world.ticket(rank=1))
        permit.take()
        turns.append("other")
        permit.give_back()
        permit.close()

    asked = threading.Event()
    async with open_relay(world):
        world.ticket(rank=0), world.ticket(rank=1)
        await asyncio.gather(in_thread(one), in_thread(other))
    assert turns == ["other", "one"]


async def test_without_a_service_a_program_goes_on_and_asks_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PERMIT_AGAIN_S", 0.0)
    permit, move = ComputePermit(world.ticket()), MovePermit(world.ticket())

    def once() -> None:
        permit.take()
        permit.give_back()

    await in_thread(once)
    await move.begin()
    move.end()
    async with open_relay(world):
        await in_thread(permit.take)
        await move.begin()
        counts = world.permits.permits.counts
        assert (counts("compute")["primary"], counts("move")["primary"]) == (1, 1)
    await in_thread(permit.give_back)  # The service has gone, with what it knew.
    move.end()
    async with open_relay(world):
        await in_thread(once)
        await move.begin()
        move.end()
    permit.close()
    move.close()


async def test_transfers_of_one_process_share_a_permit(world: World) -> None:
    one, other = MovePermit(world.ticket(rank=0)), MovePermit(world.ticket(rank=1))
    async with open_relay(world):
        await asyncio.gather(one.begin(), one.begin())
        waiting = asyncio.create_task(other.begin())
        await soon(lambda: world.permits.permits.counts("move")["waits"] == 1)
        one.end()
        await asyncio.sleep(0.01)
        assert not waiting.done()
        one.end()
        await asyncio.wait_for(waiting, 10)
        other.end()
        one.close()
        other.close()


async def test_one_sends_while_another_one_receives(world: World) -> None:
    one = MovePermit(world.ticket(rank=0))
    other = MovePermit(world.ticket(rank=1), receives=True)
    async with open_relay(world):
        await one.begin()
        await asyncio.wait_for(other.begin(), 10)
        counts = world.permits.permits.counts
        assert (counts("move")["primary"], counts("receive")["primary"]) == (1, 1)
        one.end()
        other.end()
        one.close()
        other.close()


async def test_a_secondary_is_paced_until_it_is_the_primary(world: World) -> None:
    link = Link(Interface("lo"), 10_000_000)
    world.permits = PermitServer(Permits(secondary=True), link, MemoryShares())
    one, other = MovePermit(world.ticket(rank=0)), MovePermit(world.ticket(rank=1))
    async with open_relay(world):
        await one.begin()
        await other.begin()
        assert one.pace is None
        assert other.pace is not None
        await asyncio.wait_for(other.pace(1000), 10)
        pace = other.pace
        await asyncio.wait_for(pace(10**9), 10)  # The first one goes at once.
        waits = asyncio.create_task(pace(10**9))  # For minutes, at the rate that is left.
        await asyncio.sleep(0.01)
        assert not waits.done()
        one.end()
        await soon(lambda: other.pace is None)
        await asyncio.wait_for(waits, 10)
        other.end()
        await one.begin()
        await other.begin()
        other.end()  # While it is the secondary one: it begins anew at its next transfer.
        one.end()
        await other.begin()
        assert other.pace is None
        other.end()
        one.close()
        other.close()


async def test_a_killed_holder_frees_its_permit(world: World) -> None:
    async with open_relay(world) as relay:
        _, writer = await greeted(world.ticket(rank=0))
        writer.write(frame(PermitAsk(kind="compute")))
        await soon(lambda: world.permits.permits.counts("compute")["primary"] == 1)
        permit = ComputePermit(world.ticket(rank=1))
        taking = asyncio.create_task(asyncio.to_thread(permit.take))
        await soon(lambda: world.permits.permits.counts("compute")["waits"] == 1)
        relay.ended(("j", 0, 0))
        await asyncio.wait_for(taking, 10)
        permit.close()
        writer.close()


async def test_a_holder_that_never_gives_it_back_is_waited_for_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slackwater.services.worker.permits.LATE_S_MAX", 0.05)
    async with open_relay(world):
        one, other = ComputePermit(world.ticket(rank=0)), ComputePermit(world.ticket(rank=1))
        await in_thread(one.take)
        await in_thread(other.take)
        assert world.permits.permits.usage["j", "compute"].late == 1
        (told,) = world.permits.turns(NodeId("w1"))
        assert (told.job, told.node, told.late) == ("j", "w1", 1)
        one.close()
        other.close()


async def test_a_second_subtask_beside_the_first_ends_the_connection(world: World) -> None:
    async with open_relay(world):
        reader, writer = await greeted(world.ticket())
        writer.write(2 * frame(PermitAsk(kind="compute")))
        granted, _ = await read_frame(reader)
        refused, _ = await read_frame(reader)
        assert isinstance(granted, PermitGranted)
        assert isinstance(refused, RelayRefused)
        assert "beside another one" in refused.reason
        writer.close()
        async with agent(world.ticket()) as bus:  # The relay serves others as before.
            assert bus.connected
        assert world.permits.permits.counts("compute").total() == 0


async def test_whoever_asks_too_often_is_read_more_slowly(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PERMITS_BURST", 10)
    monkeypatch.setattr(limits, "PERMITS_PER_S", 100.0)
    asked = frame(PermitAsk(kind="move")) + frame(PermitEnd())
    async with open_relay(world):
        reader, writer = await greeted(world.ticket())
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        writer.write(20 * asked)
        for _ in range(20):
            await asyncio.wait_for(read_frame(reader), 10)
        assert loop.time() - began_s >= 0.25  # 40 frames, of which 10 at once.
        writer.close()


async def test_processes_are_told_how_much_memory_they_may_use(world: World) -> None:
    """One has all of its data in memory, and gives what it does not need to the other."""
    world.memory_bytes = 100_000_000
    ahead_s = 0.0
    world.permits = PermitServer(
        Permits(), None, MemoryShares(), lambda: time.monotonic() + ahead_s
    )
    first, second = (ComputePermit(world.ticket(job=job)) for job in "jk")
    limits_bytes, used = list[int | None](), list[PermitUse]()

    def both() -> None:
        nonlocal ahead_s
        limit_bytes, stalled_s = second.share(MemoryAsk()), 0.0
        first.take()  # Beside a subtask as well as without one.
        for _ in range(60):
            ahead_s += 1.0
            first.share(MemoryAsk(used_bytes=40_000_000))
            limits_bytes.append(limit_bytes)
            stalled_s += 0.5 * (limit_bytes == 100_000_000)
            told = MemoryAsk(used_bytes=90_000_000, aside_bytes=80_000_000, stalled_s=stalled_s)
            limit_bytes = second.share(told)
        used.extend(world.permits.turns(NodeId("n")))
        first.give_back()
        first.close()
        second.close()

    async with open_relay(world):
        await in_thread(both)
        assert limits_bytes[0] == 100_000_000
        assert limits_bytes[-1] == 150_000_000
        assert [(each.job, each.memory_bytes) for each in used] == [("j", 50_000_000)]
        await soon(lambda: not world.permits.turns(NodeId("n")))


async def test_a_job_that_asked_for_no_memory_has_no_share(world: World) -> None:
    async with open_relay(world):
        reader, writer = await greeted(world.ticket())
        writer.write(frame(MemoryAsk(used_bytes=1)))
        refused, _ = await read_frame(reader)
        assert isinstance(refused, RelayRefused)
        assert "its job asked for none" in refused.reason
        writer.close()


async def test_where_nothing_is_shared_a_process_keeps_what_its_job_asked_for(
    world: World,
) -> None:
    found: list[int | None] = []
    world.memory_bytes = 7_000_000
    permit = ComputePermit(world.ticket())
    async with open_relay(world):
        await in_thread(lambda: found.append(permit.share(MemoryAsk(used_bytes=1))))
        permit.close()
    assert found == [7_000_000]
    assert permit.share(MemoryAsk(used_bytes=1)) is None, "the service is away"
