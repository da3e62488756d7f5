"""A service that keeps sums, on the memory bus and store, under virtual time: `Add` is answered
after the new sum is stored, and is applied once per command id."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from slackwater.common.base import codec
from slackwater.common.base.effects import (
    Action,
    Answered,
    Effect,
    EffectKey,
    Observed,
    Persist,
    Publish,
    Recovered,
    Reply,
    Request,
    Requested,
    StartTimer,
    Stop,
    TimerFired,
)
from slackwater.common.shell import Port, ServiceDefinition, run_service
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Ok, Record, Refused
from slackwater.schemas.service import GetHealth, Health, Info, Stats

Name = Annotated[str, msgspec.Meta(max_length=64)]


class Add(Message, kw_only=True, frozen=True, tag="ledger.add"):
    command: Name
    account: Name
    amount: int


class Sum(Message, kw_only=True, frozen=True, tag="ledger.sum"):
    account: Name
    total: int


class Later(Message, kw_only=True, frozen=True, tag="ledger.later"):
    """Answered by a timer after `wait_s`; never, when it is negative."""

    wait_s: float


class Ask(Message, kw_only=True, frozen=True, tag="ledger.ask"):
    """Passed on to the service `to`; its answer is the answer."""

    to: Name
    budget_s: float = 5.0


class Crash(Message, kw_only=True, frozen=True, tag="ledger.crash"):
    pass


class Keep(Message, kw_only=True, frozen=True, tag="ledger.keep"):
    """Stored as it is: the core trusts the number."""

    account: Name
    total: int


class Account(Record, kw_only=True, frozen=True):
    total: Annotated[int, msgspec.Meta(le=2**53)]
    commands: tuple[str, ...]


class ForToken(EffectKey, frozen=True):
    token: int


class Broken(EffectKey, frozen=True):
    pass


@dataclass(frozen=True, slots=True)
class Work(Action):
    token: int


@dataclass
class Worked:
    token: int


class Ledger:
    """The core."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.events: list[Any] = []
        self.epoch = 0

    def step(self, event: Any, now_s: float) -> list[Effect]:
        self.events.append(event)
        match event:
            case Recovered(epoch, records):
                self.epoch = epoch
                for bucket in records.values():
                    self.accounts.update(bucket)  # type: ignore[arg-type]
            case Requested(token, Add() as add):
                return self._add(token, add)
            case Requested(token, Later(wait_s=wait_s)):
                return [StartTimer(ForToken(token), now_s + wait_s)] if wait_s >= 0 else []
            case Requested(token, Ask(to=to, budget_s=budget_s)):
                subject = subjects.command("ledger", to, "add")
                ask = Add(command="c", account="asked", amount=1)
                return [Request(subject, ask, ForToken(token), "lane", 1.0, budget_s)]
            case Requested(token, Ok()):
                return [Work(token)]
            case Requested(_, Crash()):
                self.accounts.clear()  # Half of what it wanted to do.
                raise AssertionError("an invariant is broken")
            case Requested(token, Keep(account=account, total=total)):
                self.accounts[account] = kept = Account(total=total, commands=())
                return [Persist("accounts", account, kept), Reply(token, Ok())]
            case Observed(_, Sum(total=-2)) | Answered(_, Sum(total=-2)):
                raise ZeroDivisionError("nobody thought of this")
            case TimerFired(Broken()):
                raise AssertionError("nobody outside is to blame")
            case TimerFired(ForToken(token)):
                return [Reply(token, Ok())]
            case Answered(ForToken(token), message):
                return [Reply(token, message)]
            case Worked(token):
                return [Reply(token, Ok())]
            case Observed(_, Sum(total=-1)):
                return [Stop("told by a fact", 3)]
        return []

    def _add(self, token: int, add: Add) -> list[Effect]:
        old = self.accounts.get(add.account, Account(total=0, commands=()))
        if add.command in old.commands:
            return [Reply(token, Sum(account=add.account, total=old.total))]
        new = Account(total=old.total + add.amount, commands=(*old.commands, add.command))
        self.accounts[add.account] = new
        fact = Sum(account=add.account, total=new.total)
        return [
            Reply(token, fact),
            Publish(subjects.event("ledger", add.account, "changed"), fact),
            Persist("accounts", add.account, new),
        ]


ENDPOINTS: dict[str, Any] = {
    "add": Add,
    "later": Later,
    "ask": Ask,
    "work": Ok,
    "crash": Crash,
    "keep": Keep,
}


class Running:
    """A service in a task, and a client beside it."""

    def __init__(self, sim: SimWorld, id: str = "l1", **changes: Any) -> None:
        self.core = Ledger()
        self.world = sim.client(f"ledger-{id}")
        self.client = sim.client("client")
        self.id = id
        self.stop = asyncio.Event()
        self.port: Port | None = None
        definition = ServiceDefinition(
            service="ledger",
            id=id,
            core=self.core,
            buckets={"accounts": Account},
            endpoints=ENDPOINTS,
            subscriptions={subjects.events("ledger", "*", "told"): Sum},
            handlers=handlers(Work, on(Work, self._work)),
            on_start=self._on_start,
        )
        definition = replace(definition, **changes)
        self.task = asyncio.ensure_future(run_service(definition, self.world, self.stop))

    async def _on_start(self, port: Port) -> None:
        self.port = port

    async def _work(self, effect: Work) -> Worked:
        await asyncio.sleep(2.0)
        return Worked(effect.token)

    async def ready(self) -> "Running":
        """Returns once it answers."""
        for _ in range(1000):
            if self.task.done():
                self.task.result()
            try:
                await self.ask("health", GetHealth())
                return self
            except Exception:
                await asyncio.sleep(0.05)
        raise AssertionError("it never answered")

    async def ask(self, verb: str, message: Message, timeout_s: float = 60.0) -> Any:
        subject = subjects.command("ledger", self.id, verb)
        raw = await self.client.bus.request(subject, codec.encode(message), timeout_s=timeout_s)
        return codec.decode(raw, Sum | Ok | Refused | Health | Info | Stats)

    async def add(self, command: str, amount: int = 1, account: str = "a") -> Any:
        return await self.ask("add", Add(command=command, account=account, amount=amount))

    async def end(self) -> int:
        self.stop.set()
        return await self.task


def simulate(main: Coroutine[Any, Any, Any]) -> Any:
    return run_simulated(main)
