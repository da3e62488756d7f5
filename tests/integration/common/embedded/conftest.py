"""Toy services as real processes over a real nats-server, under the embedded supervisor."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slackwater.common.base import codec
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.nats import NatsBus
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.shell.config import write_config
from slackwater.common.store.base import EPOCH_KEY
from slackwater.common.store.nats import NatsStore
from slackwater.schemas import subjects
from slackwater.schemas.base import Message

SCRIPT = Path(__file__).with_name("toy_service.py")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("toy_service", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_service"] = module
    spec.loader.exec_module(module)
    return module


toy: Any = sys.modules.get("toy_service") or _load(SCRIPT)


class Lab:
    """A supervisor, and a client on its bus."""

    def __init__(self, supervisor: Supervisor, bus: NatsBus) -> None:
        self.supervisor = supervisor
        self.bus = bus
        self.toy = toy

    def spec(
        self, name: str = "t1", environment: dict[str, str] | None = None, **fields: Any
    ) -> UnitSpec:
        config = self.supervisor.run_dir / f"{name}.toml"
        values = {"id": name, "url": self.supervisor.url, "bucket": f"toys-{name}"}
        write_config(config, values | fields)
        return UnitSpec(
            name=name,
            command=(sys.executable, str(SCRIPT), "--config", str(config)),
            environment=environment or {},
            restarts_max=1000,
            restart_wait_s=0.01,
        )

    async def ask(self, verb: str, message: Message, id: str = "t1", timeout_s: float = 2.0) -> Any:
        subject = subjects.command("toy", id, verb)
        try:
            raw = await self.bus.request(subject, codec.encode(message), timeout_s=timeout_s)
        except Retryable as error:
            error.add_note(str(self.supervisor.status()))
            raise
        return codec.decode(raw, toy.ANSWERS)

    async def until_done(self, verb: str, message: Message, id: str = "t1") -> Any:
        """Ask until there is an answer that is one, as a caller with a budget does."""
        async with asyncio.timeout(40.0):
            while True:
                try:
                    answer = await self.ask(verb, message, id, timeout_s=0.5)
                except Retryable:
                    await asyncio.sleep(0.02)
                    continue
                if getattr(answer, "retry_after_s", 0.0) == 0.0:
                    return answer
                await asyncio.sleep(0.02)

    async def stored(self, name: str = "t1") -> dict[str, Any]:
        entries, *_ = await (await NatsStore(self.bus).bucket(f"toys-{name}")).load()
        return {
            key: codec.decode_record(entry.value, toy.Account, key)[0]
            for key, entry in entries.items()
            if key != EPOCH_KEY and entry.value is not None
        }


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    """Everything is gone after the test: processes, sockets, files, descriptors."""
    fds, children = set(os.listdir("/proc/self/fd")), _children()
    supervisor = Supervisor()
    try:
        await supervisor.start_nats()
        bus = await NatsBus.connect(supervisor.url, "test")
        try:
            yield Lab(supervisor, bus)
        finally:
            await bus.close()
    finally:
        await supervisor.stop()
    assert not supervisor.run_dir.exists()
    assert len(set(os.listdir("/proc/self/fd")) - fds) <= 1  # The listing's own.
    assert _children() == children


def _children() -> str:
    return (Path("/proc/self/task") / str(os.getpid()) / "children").read_text()
