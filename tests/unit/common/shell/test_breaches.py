"""A message from outside that breaks the core: answered, kept, refused from then on; the state that
it left half changed is given up, not carried on with."""

import asyncio
from typing import Any

import pytest
from tests.unit.common.shell.ledger import Ask, Crash, Keep, Running, Sum, simulate

from slackwater.common.base import codec, limits
from slackwater.common.base.effects import Effect, Reply, Requested
from slackwater.common.base.errors import Breached
from slackwater.common.shell import breaches
from slackwater.common.shell.main import EX_BREACHED, exit_code
from slackwater.common.shell.world import SimWorld
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Ok, Refused
from slackwater.schemas.service import BreachesRecord, GetStats


async def _kept(sim: SimWorld) -> BreachesRecord:
    entry = await (await sim.client("reader").store.bucket(breaches.BUCKET)).get("ledger_l1")
    assert entry is not None
    assert entry.value is not None
    return codec.decode_record(entry.value, BreachesRecord, "breaches")[0]


async def _tell(service: Running, total: int, account: str = "a") -> None:
    fact = codec.encode(Sum(account=account, total=total))
    await service.client.bus.publish(subjects.event("ledger", account, "told"), fact)
    await asyncio.sleep(0.1)


def test_a_request_that_breaks_the_core_is_answered_and_refused_at_once_the_second_time() -> None:
    async def main() -> None:
        sim = SimWorld(1)
        service = await Running(sim).ready()
        await service.add("c1", 5)
        answer = await service.ask("crash", Crash())
        assert isinstance(answer, Refused)
        assert "AssertionError: an invariant is broken" in answer.reason
        with pytest.raises(Breached, match=r"Crash.*bucket breaches, key ledger_l1") as ended:
            await service.task
        assert exit_code(ended.value) == EX_BREACHED
        again = await Running(sim).ready()
        assert again.core.accounts["a"].total == 5  # The stored total, not the one in memory.
        for _ in range(3):  # An honest client repeats it.
            answer = await again.ask("crash", Crash(sender="agent.a", epoch=9))
            assert isinstance(answer, Refused)
            assert "ledger.l1 broke on this" in answer.reason
        assert (await again.add("c2", 1)).total == 6
        stats = await again.ask("stats", GetStats())
        assert (stats.counters["breaches_refused"], stats.gauges["breaches"]) == (3, 1.0)
        await again.end()
        (breach,) = (await _kept(sim)).breaches
        assert (breach.event, breach.message, breach.origin) == ("Requested", "Crash", "")
        assert codec.decode(breach.content, Crash) == Crash()  # It can be played again.

    simulate(main())


def test_a_record_that_could_not_be_read_back_is_never_stored() -> None:
    """Its writer would not start again: `encode_record` checks as strictly as `decode_record`."""

    async def main() -> None:
        sim = SimWorld(2)
        service = await Running(sim).ready()
        good = service.add("c1", 5)
        bad = service.ask("keep", Keep(account="u", total=2**60))
        answers = await asyncio.gather(good, bad)
        assert answers[0].total == 5  # Earlier decisions are still stored and sent.
        assert isinstance(answers[1], Refused)
        for part in ("bucket accounts, key u", "<= 9007199254740992", "$.total", str(2**60)):
            assert part in answers[1].reason
        with pytest.raises(Breached):
            await service.task
        again = await Running(sim).ready()
        assert set(again.core.accounts) == {"a"}
        assert isinstance(await again.ask("keep", Keep(account="u", total=7)), Ok)
        await again.end()

    simulate(main())


def test_a_fact_that_broke_the_core_is_left_out_when_it_is_repeated() -> None:
    async def main() -> None:
        sim = SimWorld(3)
        service = await Running(sim).ready()
        await _tell(service, -2)
        with pytest.raises(Breached, match="ZeroDivisionError"):
            await service.task
        service = await Running(sim).ready()
        await _tell(service, -2)
        assert not service.task.done()
        await service.end()

    simulate(main())


def test_facts_of_one_origin_break_the_core_a_bounded_number_of_times() -> None:
    """Heartbeats carry a time: no two are equal, and an honest sender sends one a second."""

    async def main() -> None:
        sim = SimWorld(4)
        broken = 0
        for beat in range(10):
            service = await Running(sim).ready()
            fact = Sum(account=f"beat{beat}", total=-2)
            await service.client.bus.publish(
                subjects.event("ledger", "a", "told"), codec.encode(fact)
            )
            await asyncio.sleep(1.0)
            if service.task.done():
                assert isinstance(service.task.exception(), Breached)
                broken += 1
                continue
            await service.end()
        assert broken == limits.BREACHES_ALIKE_MAX

    simulate(main())


def test_what_broke_the_core_is_tried_again_after_its_term() -> None:
    async def main() -> None:
        sim = SimWorld(5)
        service = await Running(sim).ready()
        await service.ask("crash", Crash())
        with pytest.raises(Breached):
            await service.task
        again = await Running(sim).ready()
        await asyncio.sleep(limits.BREACH_TERM_S)
        answer = await again.ask("crash", Crash())
        assert "AssertionError" in answer.reason
        with pytest.raises(Breached):
            await again.task

    simulate(main())


def test_an_answer_that_breaks_the_core_becomes_a_refusal_in_its_next_life() -> None:
    async def main() -> None:
        sim = SimWorld(6)
        other = Running(sim, "l2", buckets={})
        await other.ready()
        other.core.step = _lying  # type: ignore[method-assign]
        first = await Running(sim).ready()
        lost = asyncio.ensure_future(first.ask("ask", Ask(to="l2")))
        with pytest.raises(Breached):
            await first.task
        assert isinstance(await lost, Refused)
        second = await Running(sim).ready()
        answer: Message = await second.ask("ask", Ask(to="l2"))
        assert isinstance(answer, Refused)
        assert "ZeroDivisionError" in answer.reason
        await second.end()
        await other.end()

    simulate(main())


def _lying(event: Any, now_s: float) -> list[Effect]:
    return [Reply(event.token, Sum(account="x", total=-2))] if isinstance(event, Requested) else []


def test_breaches_are_kept_in_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BREACHES_KEPT", 2)

    async def main() -> None:
        sim = SimWorld(7)
        for number in range(limits.BREACHES_KEPT + 3):
            service = await Running(sim).ready()
            await service.ask("keep", Keep(account=f"u{number}", total=2**60))
            with pytest.raises(Breached):
                await service.task
        kept = (await _kept(sim)).breaches
        assert len(kept) == limits.BREACHES_KEPT
        newest = codec.decode(kept[-1].content, Keep)
        assert newest.account == f"u{limits.BREACHES_KEPT + 2}"

    simulate(main())


def test_what_was_posted_behind_a_breach_is_left_and_holds_nothing_up() -> None:
    """Events that wait when the core breaks never reach it, and the end does not wait for them."""

    async def main() -> None:
        sim = SimWorld(1)
        service = await Running(sim).ready()
        before = [Requested(1001, Crash()), Requested(1002, Ok()), Requested(1003, Ok())]
        shell: Any = service.port
        steps = shell._steps
        steps._paused = True  # It is before recovery.
        for event in before:
            steps.post(event)
        assert steps.waiting == 3
        steps._paused = False
        began_s = sim.clock.now_s()
        steps._drain()
        assert steps.waiting == 0
        with pytest.raises(Breached):
            await service.task
        assert sim.clock.now_s() - began_s < limits.BREACH_S / 2
        assert [event for event in service.core.events if event in before] == before[:1]

    simulate(main())
