"""A service as small as they get, run by the tests as a process of its own.

It keeps sums (`add`: durable, once per command), keeps bytes in a memfd of the supervisor's store
(`keep`, `kept`), passes commands on (`ask`), hangs its loop (`hang`), leaves an orphan (`orphan`).
"""

import os
import subprocess
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from slackwater.common.base import failpoints
from slackwater.common.base.effects import (
    Action,
    Answered,
    Effect,
    EffectKey,
    Persist,
    Publish,
    Recovered,
    Reply,
    Request,
    Requested,
)
from slackwater.common.shell import Port, ServiceDefinition
from slackwater.common.shell.config import ServiceConfig
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.main import main
from slackwater.common.shell.world import World
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Ok, Record, Refused

Name = Annotated[str, msgspec.Meta(max_length=64)]


class Add(Message, kw_only=True, frozen=True, tag="toy.add"):
    command: Name
    account: Name
    amount: int


class Sum(Message, kw_only=True, frozen=True, tag="toy.sum"):
    account: Name
    total: int


class Keep(Message, kw_only=True, frozen=True, tag="toy.keep"):
    name: Name
    content: Annotated[bytes, msgspec.Meta(max_length=65_536)]


class Kept(Message, kw_only=True, frozen=True, tag="toy.kept"):
    content: dict[str, bytes]


class Ask(Message, kw_only=True, frozen=True, tag="toy.ask"):
    to: Name
    command: Name


class Tell(Message, kw_only=True, frozen=True, tag="toy.tell"):
    what: Name


class Account(Record, kw_only=True, frozen=True):
    total: int
    commands: tuple[str, ...]


class ToyConfig(ServiceConfig, kw_only=True, frozen=True):
    bucket: str = "toys"
    lease: str = ""
    instance: str = ""


class ForToken(EffectKey, frozen=True):
    token: int


@dataclass(frozen=True, slots=True)
class KeepMemory(Action):
    token: int
    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Misbehave(Action):
    token: int
    what: str


class Toy:
    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._accounts: dict[str, Account] = {}

    def step(self, event: Any, now_s: float) -> list[Effect]:
        match event:
            case Recovered(_, records):
                self._accounts = dict(records[self._bucket])  # type: ignore[arg-type]
            case Requested(token, Add() as add):
                return self._add(token, add)
            case Requested(token, Ask(to=to, command=command)):
                add = Add(command=command, account="asked", amount=1)
                return [Request(subjects.command("toy", to, "add"), add, ForToken(token), "lane")]
            case Answered(ForToken(token), message):
                return [Reply(token, message)]
            case Requested(token, Keep(name=name, content=content)):
                return [KeepMemory(token, name, content)]
            case Requested(token, Tell(what=what)):
                return [Misbehave(token, what)]
            case Reply():
                return [event]
        return []

    def _add(self, token: int, add: Add) -> list[Effect]:
        old = self._accounts.get(add.account, Account(total=0, commands=()))
        if add.command in old.commands:
            return [Reply(token, Sum(account=add.account, total=old.total))]
        new = Account(total=old.total + add.amount, commands=(*old.commands, add.command))
        self._accounts[add.account] = new
        fact = Sum(account=add.account, total=new.total)
        return [
            Persist(self._bucket, add.account, new),
            Publish(subjects.event("toy", add.account, "changed"), fact),
            Reply(token, fact),
        ]


class Hands:
    """The handlers: memory that outlives the process, and misbehaviour."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._port: Port | None = None

    async def start(self, port: Port) -> None:
        self._port = port
        self._fds.update(port.process.stored)

    async def keep(self, effect: KeepMemory) -> Reply:
        assert self._port is not None
        token, name, content = effect.token, effect.name, effect.content
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.write(fd, content)
        self._fds[name] = fd
        await self._port.process.notify.store(fd, name)
        await self._port.process.notify.barrier()
        return Reply(token, Ok())

    def misbehave(self, effect: Misbehave) -> Any:
        known = {
            "kept": self.kept, "hang": self.hang, "orphan": self.orphan, "forget": self.forget
        }  # fmt: skip
        return known[effect.what](effect.token)

    def kept(self, token: int) -> Reply:
        found = {name: os.pread(fd, 65_536, 0) for name, fd in self._fds.items()}
        return Reply(token, Kept(content=found))

    def hang(self, token: int) -> Reply:
        time.sleep(60.0)
        return Reply(token, Ok())

    def orphan(self, token: int) -> Reply:
        subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
        return Reply(token, Ok())

    async def forget(self, token: int) -> Reply:
        assert self._port is not None
        for name in self._fds:
            await self._port.process.notify.remove(name)
        await self._port.process.notify.barrier()
        return Reply(token, Ok())


def build(config: ToyConfig, world: World) -> ServiceDefinition:
    hands = Hands()
    return ServiceDefinition(
        service="toy",
        id=config.id,
        instance=config.instance,
        lease=config.lease,
        core=Toy(config.bucket),
        buckets={config.bucket: Account},
        endpoints={"add": Add, "ask": Ask, "keep": Keep, "tell": Tell},
        handlers=handlers(
            KeepMemory | Misbehave, on(KeepMemory, hands.keep), on(Misbehave, hands.misbehave)
        ),
        on_start=hands.start,
    )


ANSWERS = Sum | Kept | Ok | Refused

if __name__ == "__main__":
    failpoints.register(*failpoints.of_shell("toy"))
    raise SystemExit(main("toy", ToyConfig, build))
