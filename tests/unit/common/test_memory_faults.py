"""Faults of the in-memory bus and store, made to order, under virtual time."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import DeadlineExceeded, Unavailable
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.faults import SeededFaults
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.store.base import Entry, SequenceConflict
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.schemas.base import Ok, Refused

INFO = ServiceInfo("toy", "1.0.0", "a service for tests", {})
Program = Callable[[SimWorld], Coroutine[Any, Any, None]]


def simulate(program: Program, seed: int = 1) -> None:
    async def main() -> None:
        await program(SimWorld(seed))

    run_simulated(main())


async def counting(world: World, subject: str, calls: Counter[str]) -> None:
    async def respond(delivery: Delivery) -> bytes:
        calls[world.name] += 1
        await world.clock.sleep_until(world.clock.now_s() + 0.1)
        return delivery.payload

    await world.bus.serve(INFO, [Endpoint("act", subject, respond, {}, 2)])


def test_a_lost_request_is_a_deadline() -> None:
    async def program(sim: SimWorld) -> None:
        calls: Counter[str] = Counter()
        await counting(sim.client("server"), "a.act", calls)
        sim.broker.faults = SeededFaults(sim.rng("network"), drop=1.0)
        before_s = sim.clock.now_s()
        with pytest.raises(DeadlineExceeded):
            await sim.client("client").bus.request("a.act", b"x", timeout_s=3.0)
        assert sim.clock.now_s() - before_s == pytest.approx(3.0)
        assert calls.total() == 0

    simulate(program)


def test_a_repeated_request_is_done_twice_and_answered_once() -> None:
    async def program(sim: SimWorld) -> None:
        calls: Counter[str] = Counter()
        await counting(sim.client("server"), "a.act", calls)
        sim.broker.faults = SeededFaults(sim.rng("network"), duplicate=1.0)
        client = sim.client("client")
        assert await client.bus.request("a.act", b"x", timeout_s=3.0) == b"x"
        assert calls["server"] == 2

    simulate(program)


def test_a_repeated_request_counts_against_the_bound() -> None:
    """Two slots, four copies: the requester hears the first answer, which is the refusal."""

    async def program(sim: SimWorld) -> None:
        calls: Counter[str] = Counter()
        await counting(sim.client("server"), "a.act", calls)
        sim.broker.faults = SeededFaults(sim.rng("network"), duplicate=1.0)
        client = sim.client("client")
        first = asyncio.create_task(client.bus.request("a.act", b"x", timeout_s=3.0))
        await asyncio.sleep(0.01)
        answer = await client.bus.request("a.act", codec.encode(Ok()), timeout_s=3.0)
        assert isinstance(codec.decode(answer, Refused), Refused)
        assert await first == b"x"
        assert calls["server"] == 2

    simulate(program)


def test_delays_let_messages_overtake_one_another() -> None:
    async def program(sim: SimWorld) -> None:
        got: list[int] = []

        async def handle(delivery: Delivery) -> None:
            got.append(int(delivery.payload))

        await sim.client("b").bus.subscribe("a.fact", handle)
        sim.broker.faults = SeededFaults(sim.rng("network"), delay_s_max=1.0)
        one = sim.client("a")
        for number in range(50):
            await one.bus.publish("a.fact", b"%d" % number)
        await asyncio.sleep(1.5)
        assert sorted(got) == list(range(50))
        assert got != list(range(50))

    simulate(program)


def test_partitions_cut_pairs_and_heal() -> None:
    async def program(sim: SimWorld) -> None:
        faults = sim.broker.faults = SeededFaults(sim.rng("network"))
        calls: Counter[str] = Counter()
        await counting(sim.client("server"), "a.act", calls)
        one, other = sim.client("one"), sim.client("other")

        async def reaches(client: World) -> bool:
            try:
                return await client.bus.request("a.act", b"x", timeout_s=1.0) == b"x"
            except DeadlineExceeded:
                return False

        faults.cut("one", "server")
        assert (await reaches(one), await reaches(other)) == (False, True)
        faults.isolate("server")
        assert (await reaches(one), await reaches(other)) == (False, False)
        faults.heal()
        assert (await reaches(one), await reaches(other)) == (True, True)

    simulate(program)


def test_a_faults_hook_of_ones_own_decides_per_delivery() -> None:
    class LoseAnswers:
        def copies(self, sender: str, receiver: str, subject: str) -> Sequence[float]:
            return () if sender == "server" else (0.0,)

    async def program(sim: SimWorld) -> None:
        sim.broker.faults = LoseAnswers()
        calls: Counter[str] = Counter()
        await counting(sim.client("server"), "a.act", calls)
        with pytest.raises(DeadlineExceeded):
            await sim.client("client").bus.request("a.act", b"x", timeout_s=1.0)
        assert calls["server"] == 1, "it was done; only the answer was lost"

    simulate(program)


def test_a_crash_ends_everything_at_once() -> None:
    """No answer, no more deliveries; whoever asks next hears that nobody is there."""

    async def program(sim: SimWorld) -> None:
        calls: Counter[str] = Counter()
        server, client = sim.client("server"), sim.client("client")
        await counting(server, "a.act", calls)
        asked = asyncio.create_task(client.bus.request("a.act", b"x", timeout_s=2.0))
        await asyncio.sleep(0.05)
        await sim.broker.crash("server")
        with pytest.raises(DeadlineExceeded):
            await asked
        with pytest.raises(Unavailable):
            await client.bus.request("a.act", b"x", timeout_s=2.0)
        assert not server.bus.connected
        with pytest.raises(Unavailable):
            await server.bus.publish("a.fact", b"x")
        await counting(sim.client("server"), "a.act", calls)
        assert await client.bus.request("a.act", b"x", timeout_s=2.0) == b"x"

    simulate(program)


def test_a_stopped_broker_keeps_subscriptions_and_loses_messages() -> None:
    async def program(sim: SimWorld) -> None:
        got: list[bytes] = []

        async def handle(delivery: Delivery) -> None:
            got.append(delivery.payload)

        one, other = sim.client("one"), sim.client("other")
        await other.bus.subscribe("a.>", handle)
        await one.bus.publish("a.fact", b"under way")
        sim.broker.stop()
        with pytest.raises(Unavailable):
            await one.bus.publish("a.fact", b"refused")
        await asyncio.sleep(1.0)
        sim.broker.start()
        await one.bus.publish("a.fact", b"fresh")
        await asyncio.sleep(1.0)
        assert got == [b"fresh"]

    simulate(program)


def test_queue_members_share_the_work_and_a_seed_fixes_who() -> None:
    shares: list[Counter[str]] = []

    async def program(sim: SimWorld) -> None:
        calls: Counter[str] = Counter()
        for number in range(3):
            await counting(sim.client(f"server{number}"), "a.act", calls)
        client = sim.client("client")
        for _ in range(90):
            await client.bus.request("a.act", b"x", timeout_s=1.0)
        shares.append(calls)

    for seed in (1, 1, 2):
        simulate(program, seed)
    assert all(15 < share < 45 for share in shares[0].values())
    assert shares[0] == shares[1] != shares[2]


# The store ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "applied"), [("lost", False), ("unanswered", True)])
def test_a_write_that_timed_out_may_have_happened(kind: str, applied: bool) -> None:
    async def program(sim: SimWorld) -> None:
        bucket = await sim.client("a").store.bucket("b")
        sim.storage.faults = SeededStoreFaults(random.Random(1), **{kind: 1.0})
        before_s = sim.clock.now_s()
        with pytest.raises(DeadlineExceeded, match="it may have been written"):
            await bucket.put("k", b"1", expected_last=0)
        assert sim.clock.now_s() - before_s == pytest.approx(limits.STORE_TIMEOUT_S)
        assert await bucket.get("k") == (Entry("k", b"1", 1) if applied else None)
        assert await bucket.last_sequence() == int(applied)

    simulate(program)


def test_slow_writes_are_applied_in_order_and_answered_in_any() -> None:
    async def program(sim: SimWorld) -> None:
        bucket = await sim.client("a").store.bucket("b")
        sim.storage.faults = SeededStoreFaults(sim.rng("disk"), delay_s_max=1.0)
        finished: list[int] = []

        async def put(number: int) -> None:
            finished.append(await bucket.put(f"k{number}", b"x", expected_last=number))

        await asyncio.gather(*(put(number) for number in range(20)))
        assert sorted(finished) == list(range(1, 21))
        assert finished != sorted(finished)

    simulate(program)


def test_a_refusal_after_a_lost_write_runs_through_the_pipeline() -> None:
    """The first of three is lost: the next two do not fit, and say what the bucket really has."""

    class LoseFirst:
        left = 1

        def fate(self, client: str, bucket: str, key: str) -> tuple[Any, float]:
            self.left -= 1
            return ("lost" if self.left == 0 else "good"), 0.0

        def reaches(self, client: str) -> bool:
            return True

    async def program(sim: SimWorld) -> None:
        bucket = await sim.client("a").store.bucket("b")
        sim.storage.faults = LoseFirst()
        results = await asyncio.gather(
            *(bucket.put(f"k{n}", b"x", expected_last=n) for n in range(3)),
            return_exceptions=True,
        )
        assert isinstance(results[0], DeadlineExceeded)
        assert all(isinstance(one, SequenceConflict) and one.last == 0 for one in results[1:])
        assert (await bucket.load())[:2] == ({}, 0)

    simulate(program)


def test_the_disk_outlives_its_clients_and_its_server() -> None:
    async def program(sim: SimWorld) -> None:
        bucket = await sim.client("a").store.bucket("b")
        await bucket.put("k", b"1", expected_last=0)
        await sim.broker.crash("a")
        sim.storage.stop()
        with pytest.raises(Unavailable):
            await bucket.put("k", b"2", expected_last=1)
        sim.storage.start()
        again = await sim.client("a").store.bucket("b")
        assert (await again.load())[:2] == ({"k": Entry("k", b"1", 1)}, 1)

    simulate(program)


def test_leases_expire_on_virtual_time() -> None:
    async def program(sim: SimWorld) -> None:
        one, other = sim.client("one").store, sim.client("other").store
        lease = await one.lease("leases", "master", "one", 10.0)
        assert lease is not None
        await asyncio.sleep(9.9)
        assert await lease.renew()
        await asyncio.sleep(9.9)
        assert await other.lease("leases", "master", "other", 10.0) is None
        await asyncio.sleep(0.2)
        assert await other.lease("leases", "master", "other", 10.0) is not None
        assert not await lease.renew()

    simulate(program)
