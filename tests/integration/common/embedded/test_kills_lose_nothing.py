"""kill -9 at every failpoint of the shell, and at random instants, under load with real processes:
no acknowledged record is lost, no command is applied twice, nobody waits forever."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slackwater.common.base import failpoints
from slackwater.common.base.errors import Retryable

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]

SENDERS = 16
SEEDS = (1, 2, 3)


class Load:
    """Senders that add to accounts of t1, and one that makes t2 pass commands on to t1. Each
    command is asked for until it is answered; what was answered is written down."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.answered: dict[str, list[tuple[str, int]]] = {}
        self._stop = False
        self._tasks = [asyncio.ensure_future(self._send(n)) for n in range(SENDERS)]
        self._tasks.append(asyncio.ensure_future(self._pass_on()))

    @property
    def count(self) -> int:
        return sum(len(answers) for answers in self.answered.values())

    async def progress(self, more: int) -> None:
        """Return when so many more commands were answered."""
        target = self.count + more
        async with asyncio.timeout(60.0):
            while self.count < target:
                self.still_running()
                await asyncio.sleep(0.01)

    def still_running(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _send(self, number: int) -> None:
        account, command = f"a{number % 5}", 0
        while not self._stop:
            name = f"{number}-{command}"
            add = self.lab.toy.Add(command=name, account=account, amount=1)
            answer = await self.lab.until_done("add", add)
            self.answered.setdefault(account, []).append((name, answer.total))
            command += 1
            await asyncio.sleep(0.01)

    async def _pass_on(self) -> None:
        command = 0
        while not self._stop:
            ask = self.lab.toy.Ask(to="t1", command=f"ask-{command}")
            answer = await self.lab.until_done("ask", ask, "t2")
            assert isinstance(answer, self.lab.toy.Sum), answer
            self.answered.setdefault("asked", []).append((f"ask-{command}", answer.total))
            command += 1

    async def check(self) -> None:
        """Exactly once, nothing lost, and in one order that all answers agree with."""
        stored = await self.lab.stored()
        for account, answers in self.answered.items():
            record = stored[account]
            assert len(set(record.commands)) == len(record.commands) == record.total
            place = {name: index + 1 for index, name in enumerate(record.commands)}
            assert [name for name, _ in answers if name not in place] == []
            # The answer may be a later one, when the first was lost: never an earlier total.
            assert all(total >= place[name] for name, total in answers)


@asynccontextmanager
async def loaded(lab: Any) -> AsyncIterator[Load]:
    await lab.supervisor.start_units([lab.spec("t1"), lab.spec("t2")])
    load = Load(lab)
    await load.progress(50)
    yield load
    await load.progress(50)
    await load.end()
    await load.check()


POINTS = [point for point in failpoints.SHELL_POINTS if not point.startswith("witness.")]
"""The toy has no folder, so it keeps no witness. Services that do are in tests/chaos."""


@pytest.mark.parametrize("point", POINTS)
async def test_kill_at_a_failpoint(lab: Any, point: str) -> None:
    victim = "t2" if point.startswith("request") else "t1"
    async with loaded(lab) as load:
        unit = lab.supervisor.units[victim]
        for seed in SEEDS:
            hit = "1" if point.startswith(("epoch", "drain", "recover")) else f"random({seed})"
            before = unit.restarts
            lab.supervisor.arm(victim, f"toy.{point}=kill@{hit}")
            lab.supervisor.kill(victim, signal.SIGKILL)
            async with asyncio.timeout(60.0):
                while unit.restarts < before + 2:
                    load.still_running()
                    if point.startswith("drain") and unit.restarts == before + 1:
                        await unit.until_ready()
                        lab.supervisor.kill(victim, signal.SIGTERM)
                    await asyncio.sleep(0.05)
                await unit.until_ready()
            await load.progress(20)
        assert unit.restarts >= 2 * len(SEEDS)


async def test_kill_at_random_instants(lab: Any) -> None:
    """The service 12 times, the bus server 8 times, in a seeded order and at seeded moments."""
    rng = random.Random(7)
    victims = ["t1"] * 12 + ["nats"] * 8
    rng.shuffle(victims)
    async with loaded(lab) as load:
        for victim in victims:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            lab.supervisor.kill(victim, signal.SIGKILL)
            await load.progress(20)


async def test_a_frozen_service_goes_on_where_it_was(lab: Any) -> None:
    """SIGSTOP for longer than its callers wait; nobody took over, so it need not end."""
    async with loaded(lab) as load:
        for _ in range(3):
            lab.supervisor.kill("t1", signal.SIGSTOP)
            with pytest.raises(Retryable):
                await lab.ask("add", lab.toy.Add(command="x", account="x", amount=1), "t1", 1.0)
            lab.supervisor.kill("t1", signal.SIGCONT)
            await load.progress(20)
        assert lab.supervisor.units["t1"].restarts == 0
