"""The worker service as a process on a real bus: it is killed, and its jobs are not."""

import asyncio
import os
import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import gone, soon

from slackwater.common.base import codec
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import AccessRefused
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.relay import RelayBus, read_ticket
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.client import Client
from slackwater.common.shell.config import write_config
from slackwater.schemas import subjects
from slackwater.schemas.base import Message, Ok, Refused
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.schemas.workers import StartWorkers, StopWorkers, WorkerExited
from slackwater.services.worker.processes import RankFiles

pytestmark = pytest.mark.live


class Master:
    """Stores the ends of ranks, or refuses to while it is `away`."""

    def __init__(self) -> None:
        self.away = False
        self.exits: list[WorkerExited] = []

    async def worker_exited(self, delivery: Delivery) -> bytes:
        answer: Message = Refused(reason="not the leader", retry_after_s=0.1)
        if not self.away:
            self.exits.append(codec.decode(delivery.payload, WorkerExited))
            answer = Ok()
        return codec.encode(answer)


def launch(config: Path, log_path: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "slackwater.services.worker", "--config", str(config)]
    with log_path.open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


@asynccontextmanager
async def service(
    url: str, state_dir: Path, **more: Any
) -> AsyncIterator["subprocess.Popen[bytes]"]:
    config = state_dir / "worker.toml"
    write_config(config, {"id": "w1", "url": url, "state_dir": str(state_dir), "slots": 4, **more})
    process = launch(config, state_dir / "service.log")
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        await asyncio.to_thread(process.wait, 20)


async def master_on(bus: NatsBus) -> Master:
    master = Master()
    subject = subjects.command("master", subjects.MASTER, "worker-exited")
    await bus.serve(
        ServiceInfo("master", "1.0.0", "stands in for the master", {}),
        [Endpoint("worker-exited", subject, master.worker_exited, {}, 8)],
    )
    return master


def start(job: str, script: str, ranks: int = 1) -> StartWorkers:
    return StartWorkers(
        job=job, ranks=tuple(range(ranks)), workers=ranks, program=("/bin/sh", "-c", script)
    )


async def test_jobs_live_through_a_kill_of_the_service_and_their_ends_are_told(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    """One rank runs on, one ends while nobody looks, one ended before but could not be told."""
    bus = await NatsBus.connect(own_nats_server.url, "test")
    master = await master_on(bus)
    client = Client(bus, LiveClock(), budget_s=20.0)
    verb = subjects.command("worker", "w1", "start")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    wait = 'echo "{\\"rank\\": $SLACKWATER_RANK}" > "$SLACKWATER_RESULT"'
    try:
        async with service(own_nats_server.url, tmp_path) as first:
            await client.ask(verb, start("runs", "exec sleep 300"), Ok)
            await client.ask(verb, start("ends", f"read line < {gate}; {wait}"), Ok)
            master.away = True
            await client.ask(verb, start("ended", "echo gone wrong; exit 3"), Ok)
            files = {job: RankFiles(tmp_path, job, 0) for job in ("runs", "ends", "ended")}
            await soon(lambda: files["ended"].path("exit").exists(), "the third job ended")
            await soon(lambda: files["runs"].identity() is not None, "the first job runs")
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait, 20)
        before = files["runs"].identity()
        await asyncio.to_thread(gate.write_text, "go\n")
        await soon(lambda: files["ends"].path("exit").exists(), "the second job ended")
        master.away = False
        async with service(own_nats_server.url, tmp_path):
            await client.ask(verb, start("runs", "exec sleep 300"), Ok)  # A repeat: none started.
            await soon(lambda: len(master.exits) == 2, "both ends are told")
            assert files["runs"].identity() == before
            await client.ask(subjects.command("worker", "w1", "stop"), StopWorkers(job="runs"), Ok)
            await soon(lambda: len(master.exits) == 3, "the stop is told")
        by_job = {exited.job: exited for exited in master.exits}
        assert (by_job["ends"].code, by_job["ends"].result) == (0, '{"rank": 0}\n')
        assert (by_job["ended"].code, by_job["ended"].result) == (3, "gone wrong")
        assert by_job["runs"].code == -signal.SIGTERM
        assert before is not None
        assert not before.alive()
    finally:
        await bus.close()


async def test_a_stopped_service_leaves_no_process_not_even_one_that_ignores_sigterm(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    bus = await NatsBus.connect(own_nats_server.url, "test")
    client = Client(bus, LiveClock(), budget_s=20.0)
    try:
        async with service(own_nats_server.url, tmp_path):
            verb = subjects.command("worker", "w1", "start")
            stubborn = "trap '' TERM; while :; do sleep 1; done"
            await client.ask(verb, start("stubborn", stubborn, ranks=2), Ok)
            ranks = [RankFiles(tmp_path, "stubborn", rank) for rank in range(2)]
            await soon(lambda: all(r.identity() is not None for r in ranks), "both run")
        for rank in ranks:
            identity = rank.identity()
            assert identity is not None
            assert not identity.alive()
    finally:
        await bus.close()


async def test_a_forked_rank_lives_through_a_kill_of_the_service_and_its_warm_process(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    """The warm process ends with the service that it belongs to; the next service makes its own."""
    bus = await NatsBus.connect(own_nats_server.url, "test")
    master = await master_on(bus)
    client = Client(bus, LiveClock(), budget_s=20.0)
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "print('numpy' in sys.modules, os.getppid(), flush=True)\n"
        "while not os.path.exists('gate'):\n    time.sleep(.01)\n"
        "open(os.environ['SLACKWATER_RESULT'], 'w').write('{\"loss\": 0.5}')\n"
    )
    start = StartWorkers(
        job="j", ranks=(0, 1), workers=2, program=("python", "train.py"), folder=str(tmp_path)
    )
    files = [RankFiles(tmp_path, "j", rank) for rank in (0, 1)]
    more = {"warm": "on", "warm_imports": "numpy", "keep_jobs": True}
    try:
        async with service(own_nats_server.url, tmp_path, **more) as first:
            log = tmp_path / "service.log"
            await soon(lambda: "warm.ready" in log.read_text(), "it is warm")
            (warm,) = (each.pid for each in psutil.Process(first.pid).children())
            await client.ask(subjects.command("worker", "w1", "start"), start, Ok)
            await soon(lambda: all(each.log.last_line() for each in files), "both run")
            assert all(each.log.last_line().startswith("True ") for each in files)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait, 20)
        await soon(lambda: gone(warm), "its warm process is gone")
        identities = [each.identity() for each in files]
        assert all(each is not None and each.alive() for each in identities)
        async with service(own_nats_server.url, tmp_path, **more):
            (tmp_path / "gate").touch()
            await soon(lambda: len(master.exits) == 2, "both ends are told")
        assert [(each.code, each.result) for each in master.exits] == [(0, '{"loss": 0.5}')] * 2
    finally:
        await bus.close()


TELLS = """
import asyncio, os, sys
from slackwater.common.base import codec
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.relay import RelayBus, find_ticket
from slackwater.schemas import subjects
from slackwater.schemas.telemetry import IterationsObserved

async def main():
    print(sorted(os.environ), flush=True)
    bus, count = await RelayBus.connect(find_ticket(os.environ)), 0
    while True:
        count += 1
        said = IterationsObserved(
            job="tells", rank=0, first_iteration=count, durations_s=(), location_epoch=0,
            bytes_pushed=0, bytes_pulled=0,
        )
        try:
            await bus.publish(subjects.telemetry("job", "tells", "iterations"), codec.encode(said))
        except Retryable:
            pass
        await asyncio.sleep(0.05)

asyncio.run(main())
"""


async def test_a_program_is_heard_through_the_relay_also_after_a_kill_of_the_service(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    """Its token, in the hands of a process that is not of the rank, opens nothing. Two services and
    a program start one after the other: that takes seconds."""
    bus = await NatsBus.connect(own_nats_server.url, "test")
    client = Client(bus, LiveClock(), budget_s=20.0)
    heard: list[IterationsObserved] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(codec.decode(delivery.payload, IterationsObserved))

    try:
        await bus.subscribe(subjects.telemetry("job", "tells", "iterations"), hear)
        program = ("python", "-c", TELLS)
        asked = StartWorkers(job="tells", ranks=(0,), workers=1, program=program)
        async with service(own_nats_server.url, tmp_path) as first:
            await client.ask(subjects.command("worker", "w1", "start"), asked, Ok)
            await soon(lambda: heard, "the program is heard")
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait, 20)
        heard.clear()
        async with service(own_nats_server.url, tmp_path):
            await soon(lambda: heard, "the program is heard again")
            files = RankFiles(tmp_path, "tells", 0)
            identity = files.identity()
            assert identity is not None
            stolen = next(filter(None, map(read_ticket, open_files(identity.pid))))
            with pytest.raises(AccessRefused, match="is not process 0 of job tells"):
                await RelayBus.connect(stolen)
            stop = subjects.command("worker", "w1", "stop")
            await client.ask(stop, StopWorkers(job="tells"), Ok)
            await soon(lambda: not files.lives(), "the program ended")
        assert heard[-1].sender == "agent.tells.0"
        said = files.path("log").read_text()
        assert "SLACKWATER_TOKEN_FD" in said
        assert not {"NATS_USER", "NATS_TOKEN", "SLACKWATER_URL"} & set(
            literal_eval(said.splitlines()[0])
        )
    finally:
        await bus.close()


def open_files(pid: int) -> list[str]:
    """List what a process of the same account could open at most."""
    return [f"/proc/{pid}/fd/{entry}" for entry in os.listdir(f"/proc/{pid}/fd")]
