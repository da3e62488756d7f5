"""A rank that the kernel killed for memory is told from one that somebody killed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.base import limits
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.native.cgroup import MemoryKills
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.effects import RunRank
from slackwater.services.worker.events import ProcessExited
from slackwater.services.worker.gpus import Inventory
from slackwater.services.worker.shell import Processes


class Told:
    """Stands for the shell: keeps what is posted."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()

    def post(self, event: Any) -> None:
        self.events.put_nowait(event)

    def count(self, name: str, by: int = 1) -> None:
        """The metrics are another test's."""

    def fail(self, error: BaseException) -> None:
        self.events.put_nowait(error)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "vmstat").write_text("oom_kill 0\n")
    return tmp_path


async def ended(proc: Path, script: str) -> ProcessExited:
    kills = MemoryKills(proc, proc / "none")
    config, port = WorkerConfig(state_dir=str(proc), gpus=0), Told()
    bus = MemoryBroker(seed=1).connect("w1")
    processes = Processes(config, Inventory(config, NodeId("n1"), None), bus, kills)
    await processes.start(port)  # type: ignore[arg-type]  # what of a port is used
    processes.run(RunRank(JobId("j"), 0, 0, 1, ("/bin/sh", "-c", script), "", ()))
    async with asyncio.timeout(60):
        event = await port.events.get()
    await processes.stop()
    assert isinstance(event, ProcessExited), event
    return event


async def test_a_rank_killed_for_memory_says_so(proc: Path) -> None:
    script = f"echo epoch 3; echo oom_kill 1 > {proc}/vmstat; kill -9 $$"
    event = await ended(proc, script)
    assert event.code == -9
    assert event.result.startswith("killed by the kernel for memory; its log ends with: ")


async def test_a_rank_killed_by_hand_does_not(proc: Path) -> None:
    event = await ended(proc, "echo epoch 3; kill -9 $$")
    assert event.code == -9
    assert "memory" not in event.result


async def test_a_rank_is_the_kernels_first_choice(proc: Path) -> None:
    event = await ended(proc, "cat /proc/self/oom_score_adj; exit 3")
    assert (event.code, event.result) == (3, str(limits.OOM_SCORE_JOB))
