"""The shell on the memory bus and store, under virtual time: order, durability, fencing, drains."""

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest
from tests.unit.common.shell.ledger import (
    Account,
    Add,
    Ask,
    Broken,
    Later,
    Running,
    Sum,
    Worked,
    simulate,
)

from slackwater.common.base import codec, limits
from slackwater.common.base.effects import (
    Draining,
    Effect,
    Observed,
    Persist,
    Recovered,
    Reply,
    Requested,
    TimerFired,
)
from slackwater.common.base.errors import Deposed, Fatal
from slackwater.common.bus.base import Delivery
from slackwater.common.shell import Port
from slackwater.common.shell.world import SimWorld
from slackwater.common.store.memory import MemoryLease, SeededStoreFaults
from slackwater.schemas import subjects
from slackwater.schemas.base import Ok, Refused
from slackwater.schemas.cluster import Heartbeat
from slackwater.schemas.service import Drain, GetHealth, GetInfo, GetStats


def test_an_answer_is_given_once_its_record_is_stored() -> None:
    async def main() -> None:
        sim = SimWorld(1)
        service = await Running(sim).ready()
        facts: list[Delivery] = []

        async def heard(delivery: Delivery) -> None:
            facts.append(delivery)

        await service.client.bus.subscribe("sw.v1.evt.ledger.>", heard)
        reply = await service.add("c1", 5)
        assert reply == Sum(account="a", total=5, sender="ledger.l1", epoch=1)
        assert await service.add("c1", 5) == reply  # A repeated command is not applied again.
        bucket = await sim.client("reader").store.bucket("accounts")
        entry = await bucket.get("a")
        assert entry is not None
        assert entry.value is not None
        assert codec.decode_record(entry.value, Account, "a")[0].total == 5
        await asyncio.sleep(0.1)
        assert [codec.decode(fact.payload, Sum).total for fact in facts] == [5]
        assert await service.end() == 0

    simulate(main())


def test_a_restart_remembers_what_was_said_and_has_a_higher_epoch() -> None:
    async def main() -> None:
        sim = SimWorld(2)
        first = await Running(sim).ready()
        for index in range(20):
            await first.add(f"c{index}", index)
        await first.end()
        second = await Running(sim).ready()
        assert (second.core.epoch, first.core.epoch) == (2, 1)
        assert second.core.accounts["a"].total == sum(range(20))
        assert (await second.add("c7", 7)).total == sum(range(20))
        await second.end()

    simulate(main())


@pytest.mark.parametrize("seed", range(12))
def test_store_faults_lose_nothing_that_was_answered_and_apply_nothing_twice(seed: int) -> None:
    """Writes time out before or after they were applied, 64 in flight; then the service crashes
    in the middle, and its successor has all that was answered, each command once."""

    async def main() -> None:
        faults = SeededStoreFaults(Random(seed), lost=0.05, unanswered=0.05, delay_s_max=0.05)
        sim = SimWorld(seed, store_faults=faults)
        answered: dict[str, int] = {}
        service = await Running(sim).ready()

        async def send(number: int) -> None:
            account = f"a{number % 5}"
            for command in range(20):
                name = f"{number}-{command}"
                reply = await service.add(name, 1, account)
                if isinstance(reply, Sum):
                    answered[name] = reply.total

        senders = [asyncio.ensure_future(send(number)) for number in range(64)]
        await asyncio.sleep(Random(seed).uniform(0.5, 20.0))
        service.task.cancel()
        await asyncio.gather(service.task, return_exceptions=True)
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        again = await Running(sim).ready()
        done = [name for account in again.core.accounts.values() for name in account.commands]
        assert len(done) == len(set(done))
        assert set(answered) <= set(done)
        assert len(answered) > 0
        for account in again.core.accounts.values():
            assert account.total == len(account.commands)
            told = [answered[name] for name in account.commands if name in answered]
            assert told == sorted(told)
        await again.end()

    simulate(main())


def test_a_deposed_instance_ends_and_never_writes_again() -> None:
    async def main() -> None:
        sim = SimWorld(3)
        old = await Running(sim).ready()
        await old.add("c1")
        new = await Running(sim, "l1").ready()  # The same service, started a second time.
        with pytest.raises(Deposed, match="accounts"):
            await asyncio.gather(old.task, *(old.add(f"d{n}", 1, f"d{n}") for n in range(50)))
        await new.add("c2")
        stored, *_ = await (await sim.client("reader").store.bucket("accounts")).load()
        told = set(new.core.accounts) | {"_epoch"}
        assert set(stored) == told  # Nothing of the old one's writes in flight slipped in.
        await new.end()

    simulate(main())


def test_a_command_of_a_replaced_sender_is_refused() -> None:
    async def main() -> None:
        service = await Running(SimWorld(4)).ready()
        good = Add(command="x", account="a", amount=1, sender="master.main", epoch=7)
        assert isinstance(await service.ask("add", good), Sum)
        late = msgspec.structs.replace(good, command="y", epoch=6)
        refused = await service.ask("add", late)
        assert isinstance(refused, Refused)
        assert "fenced" in refused.reason
        other = msgspec.structs.replace(late, sender="master.other", command="z")
        assert isinstance(await service.ask("add", other), Sum)
        assert isinstance(await service.add("person"), Sum)
        stats = await service.ask("stats", GetStats())
        assert stats.counters["fenced"] == 1
        await service.end()

    simulate(main())


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"{", b'{"t":"ledger.add"}', b"\x81\xa1t\xa3foo", b"\x91" * 5000]
)
def test_bytes_that_are_no_message_are_refused_and_counted(payload: bytes) -> None:
    async def main() -> None:
        service = await Running(SimWorld(5)).ready()
        subject = subjects.command("ledger", "l1", "add")
        raw = await service.client.bus.request(subject, payload, timeout_s=5.0)
        json = codec.looks_like_json(payload)
        assert isinstance(codec.decode(raw, Refused, json=json), Refused)
        await service.client.bus.publish(subjects.event("ledger", "x", "told"), payload)
        await asyncio.sleep(0.1)
        stats = await service.ask("stats", GetStats())
        assert stats.counters["undecodable"] == 2
        assert not service.task.done()
        await service.end()

    simulate(main())


@pytest.mark.parametrize(
    ("verb", "payload", "told"),
    [
        ("add", b'{"t":"ledger.add","command":"x","account":"a","amounts":1,"amount":1}',
         "not a Add: unknown key amounts; the nearest is amount (all: v, sender, epoch, command,"),
        ("stats", b'{"t":"service.stats","nosuch":1}', "unknown key nosuch; the nearest is"),
    ],
)  # fmt: skip
def test_a_key_that_nobody_knows_is_refused_where_a_person_typed_it(
    verb: str, payload: bytes, told: str
) -> None:
    """In msgpack it may be a newer release's, and is left alone."""

    async def main() -> None:
        service = await Running(SimWorld(5)).ready()
        subject = subjects.command("ledger", "l1", verb)
        raw = await service.client.bus.request(subject, payload, timeout_s=5.0)
        refused = codec.decode(raw, Refused, json=True)
        assert told in refused.reason
        newer = msgspec.msgpack.encode(msgspec.json.decode(payload))
        raw = await service.client.bus.request(subject, newer, timeout_s=5.0)
        assert msgspec.msgpack.decode(raw)["t"] != "refused"
        await service.end()

    simulate(main())


def test_operators_tools_see_what_was_refused_and_how_long_it_took() -> None:
    """Send the requests of `nats micro ping | info | stats` after refusals by a shell and a
    core."""

    async def main() -> None:
        service = await Running(SimWorld(5)).ready()
        bus = service.client.bus
        await service.add("good")
        await bus.request(subjects.command("ledger", "l1", "add"), b"?", timeout_s=5.0)
        await service.ask("later", Later(wait_s=-1.0))
        shown = {}
        for verb in ("PING", "INFO", "STATS"):
            raw = await bus.request(f"$SRV.{verb}.ledger", b"", timeout_s=5.0)
            shown[verb] = msgspec.json.decode(raw)
        assert len({(one["name"], one["id"], one["version"]) for one in shown.values()}) == 1
        names = [each["name"] for each in shown["INFO"]["endpoints"]]
        assert names[-4:] == ["health", "info", "stats", "drain"]
        figures = {each["name"]: each for each in shown["STATS"]["endpoints"]}
        assert [*figures] == names
        add, later = figures["add"], figures["later"]
        assert (add["num_requests"], add["num_errors"]) == (2, 1)
        assert add["last_error"].startswith("400:not a Add: ")
        assert later["num_errors"] == 1
        assert later["num_requests"] == 5  # It was sent again 1, 3, 7 and 15 s after the first.
        assert later["last_error"].startswith("504:ledger l1 has not answered")
        assert add["processing_time"] > 0
        assert figures["health"]["num_errors"] == 0
        await service.end()

    simulate(main())


def test_timers_requests_and_actions_come_back_as_events() -> None:
    async def main() -> None:
        sim = SimWorld(6)
        one, two = Running(sim, "l1", buckets={"accounts": Account}), None
        await one.ready()
        begun_s = sim.clock.now_s()
        assert isinstance(await one.ask("later", Later(wait_s=12.5)), Ok)
        assert sim.clock.now_s() - begun_s == pytest.approx(12.5, abs=0.01)
        assert isinstance(await one.ask("work", Ok()), Ok)
        gone = await one.ask("ask", Ask(to="nobody", budget_s=3.0))
        assert isinstance(gone, Refused)
        assert "sw.v1.cmd.ledger.nobody.add" in gone.reason
        two = Running(sim, "l2", buckets={"accounts2": Account})
        two.core.step = _answering  # type: ignore[method-assign]
        await two.ready()
        assert isinstance(await one.ask("ask", Ask(to="l2")), Ok)
        await one.end()
        await two.end()

    simulate(main())


def _answering(event: Any, now_s: float) -> list[Effect]:
    """A core that agrees to everything."""
    return [Reply(event.token, Ok())] if isinstance(event, Requested) else []


def test_an_answer_that_comes_at_once_costs_no_task_and_counts_once() -> None:
    """A second answer to a request, in the same step or later, is nobody's."""

    async def main() -> None:
        service = await Running(SimWorld(7)).ready()
        service.core.step = _answering_twice  # type: ignore[method-assign]
        assert await service.client.bus.request(
            subjects.command("ledger", "l1", "work"), codec.encode(Ok()), timeout_s=5.0
        )
        assert (await service.ask("stats", GetStats())).counters["unanswered"] == 1
        assert (await service.ask("stats", GetStats())).gauges["requests_unanswered"] == 0
        await service.end()

    simulate(main())


def _answering_twice(event: Any, now_s: float) -> list[Effect]:
    return [Reply(event.token, Ok())] * 2 if isinstance(event, Requested) else []


def test_a_request_the_core_forgets_is_refused_in_the_end() -> None:
    async def main() -> None:
        service = await Running(SimWorld(7)).ready()
        reply = await service.ask("later", Later(wait_s=-1.0))
        assert isinstance(reply, Refused)
        assert "not answered" in reply.reason
        assert (await service.ask("stats", GetStats())).counters["unanswered"] == 1
        await service.end()

    simulate(main())


def test_drain_finishes_what_is_begun_and_refuses_what_is_new() -> None:
    async def main() -> None:
        service = await Running(SimWorld(8)).ready()
        begun = asyncio.ensure_future(service.ask("work", Ok()))
        await asyncio.sleep(0.1)
        assert isinstance(await service.ask("drain", Drain()), Ok)
        await asyncio.sleep(0.1)
        late = await service.add("late")
        assert isinstance(late, Refused)
        assert late.retry_after_s > 0
        assert (await service.ask("health", GetHealth())).state == "draining"
        assert isinstance(await begun, Ok)
        assert await service.task == 0
        assert any(isinstance(event, Draining) for event in service.core.events)

    simulate(main())


def test_every_service_says_who_it_is_and_how_it_fares() -> None:
    async def main() -> None:
        sim = SimWorld(9)
        service = await Running(sim).ready()
        await service.add("c1")
        health = await service.ask("health", GetHealth())
        assert (health.state, health.bus_connected) == ("ok", True)
        info = await service.ask("info", GetInfo())
        assert info.endpoints[:2] == ("add", "later")
        assert set(info.endpoints) >= {"health", "info", "stats", "drain"}
        stats = await service.ask("stats", GetStats())
        assert stats.counters["requests_add"] == 1
        assert stats.counters["records"] == 1
        heard: list[Heartbeat] = []

        async def hear(delivery: Delivery) -> None:
            heard.append(codec.decode(delivery.payload, Heartbeat))

        await service.client.bus.subscribe("sw.v1.tel.ledger.l1.heartbeat", hear)
        await asyncio.sleep(10 * limits.HEARTBEAT_S)
        assert len(heard) in (10, 11)
        assert {beat.incarnation for beat in heard} == {1}
        await service.end()

    simulate(main())


def test_a_core_that_stops_gives_the_exit_code_and_one_that_breaks_by_itself_its_error() -> None:
    async def main() -> None:
        sim = SimWorld(10)
        service = await Running(sim).ready()
        fact = codec.encode(Sum(account="a", total=-1))
        await service.client.bus.publish(subjects.event("ledger", "a", "told"), fact)
        assert await service.task == 3
        service = await Running(sim).ready()
        crashing = asyncio.ensure_future(service.ask("later", Later(wait_s=9.0)))
        await asyncio.sleep(0.1)
        assert service.port is not None
        service.port.post(TimerFired(Broken()))
        with pytest.raises(AssertionError, match="nobody outside"):
            await service.task
        assert isinstance(await crashing, Refused)

    simulate(main())


def test_a_foreign_write_by_hand_ends_the_writer() -> None:
    async def main() -> None:
        sim = SimWorld(12)
        service = await Running(sim).ready()
        await service.add("c1")
        bucket = await sim.client("vandal").store.bucket("accounts")
        await bucket.put("z", b"by hand", expected_last=await bucket.last_sequence())
        with pytest.raises(Deposed):
            await asyncio.gather(service.task, service.add("c2"))

    simulate(main())


def test_the_lease_passes_to_the_standby_once_it_has_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader is killed and releases nothing; the standby waits, then leads with a higher
    epoch."""

    async def nothing(_: MemoryLease) -> None:
        return None

    monkeypatch.setattr(MemoryLease, "release", nothing)

    async def main() -> None:
        sim = SimWorld(13)
        first = await Running(sim, "main", lease="ledger", instance="m1").ready()
        second = Running(sim, "main", lease="ledger", instance="m2")
        await asyncio.sleep(3 * limits.LEASE_S)
        assert second.core.events == []
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        begun_s = sim.clock.now_s()
        await second.ready()
        assert sim.clock.now_s() - begun_s < 2 * limits.LEASE_S
        assert second.core.epoch == 2
        await second.end()

    simulate(main())


def test_a_leader_whose_lease_is_lost_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sim = SimWorld(17)
        leader = await Running(sim, "main", lease="ledger", instance="m1").ready()
        await asyncio.sleep(5 * limits.LEASE_S)  # It renews as long as it may.
        assert not leader.task.done()

        async def lost(_: MemoryLease) -> bool:
            return False

        monkeypatch.setattr(MemoryLease, "renew", lost)
        with pytest.raises(Deposed, match="lease"):
            await leader.task

    simulate(main())


def test_a_leader_that_cannot_reach_the_store_ends_when_its_lease_has_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        sim = SimWorld(18)
        leader = await Running(sim, "main", lease="ledger", instance="m1").ready()
        begun_s = sim.clock.now_s()
        sim.storage.stop()
        with pytest.raises(Deposed, match="lease"):
            await leader.task
        assert limits.LEASE_S / 2 < sim.clock.now_s() - begun_s < 2 * limits.LEASE_S

    simulate(main())


def test_recovery_comes_first_and_nothing_new_during_the_drain() -> None:
    """Findings of the service's own I/O at the start wait for the recovery; facts that arrive
    during the drain are left alone."""

    async def main() -> None:
        async def early(port: Port) -> None:
            port.post(Worked(-1))

        service = await Running(SimWorld(19), on_start=early).ready()
        assert [type(event) for event in service.core.events[:2]] == [Recovered, Worked]
        working = asyncio.ensure_future(service.ask("work", Ok()))
        await asyncio.sleep(0.1)
        service.stop.set()
        await asyncio.sleep(0.1)
        fact = codec.encode(Sum(account="a", total=1))
        await service.client.bus.publish(subjects.event("ledger", "a", "told"), fact)
        assert isinstance(await working, Ok)
        assert await service.task == 0
        assert not [event for event in service.core.events if isinstance(event, Observed)]

    simulate(main())


def test_the_same_seed_gives_the_same_messages() -> None:
    def run() -> list[tuple[float, str, str, str, bytes]]:
        log: list[tuple[float, str, str, str, bytes]] = []

        async def main() -> None:
            faults = SeededStoreFaults(Random(1), lost=0.1, unanswered=0.1, delay_s_max=0.1)
            sim = SimWorld(14, store_faults=faults, trace=lambda *call: log.append(call))
            service = await Running(sim).ready()
            await asyncio.gather(*(service.add(f"c{n}", n, f"a{n % 3}") for n in range(50)))
            await service.end()

        simulate(main())
        return log

    first = run()
    assert len(first) > 100
    assert first == run()


def test_a_service_without_buckets_has_an_epoch_too() -> None:
    async def main() -> None:
        sim = SimWorld(15)
        for expected in (1, 2):
            services = [Running(sim, f"l{n}", buckets={}) for n in range(5)]
            for service in services:
                service.core.step = _answering  # type: ignore[method-assign]
                await service.ready()
                assert service.port is not None
                assert service.port.epoch == expected
                await service.end()

    simulate(main())


def test_writing_a_foreign_bucket_is_a_bug_that_ends_the_service() -> None:
    async def main() -> None:
        service = Running(SimWorld(16), buckets={"other": Account})
        service.core.step = lambda event, now_s: (  # type: ignore[method-assign]
            [Persist("accounts", "a", Account(total=1, commands=()))]
            if isinstance(event, Recovered)
            else []
        )
        with pytest.raises(Fatal, match="not this service's own"):
            await service.task

    simulate(main())
