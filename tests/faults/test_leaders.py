"""Leadership, and epochs: two masters of one id, a master that was stopped for longer than
its lease, a store that was emptied under services that live. Real processes, which take up to half
a minute: a lease lasts ten seconds."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.eventually import eventually
from tests.waiting import soon

from slackwater.common.base.errors import Retryable
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.client import Client, connect
from slackwater.common.shell.config import write_config
from slackwater.schemas.jobs import JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


class Service:
    """A process of one service, started anew by `look` when it ended with a code that systemd would
    start it anew for."""

    def __init__(self, folder: Path, url: str, service: str, id: str, **fields: Any) -> None:
        self.folder = folder / f"{service}-{id}"
        self.folder.mkdir(parents=True)
        config = self.folder / "config.toml"
        write_config(config, {"id": id, "url": url, "state_dir": self.folder, **fields})
        self.command = [
            sys.executable, "-m", f"slackwater.services.{service}", "--config", str(config),
        ]  # fmt: skip
        self.codes: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def look(self) -> None:
        if self.process is not None and (code := self.process.poll()) is not None:
            self.codes.append(code)
            if code not in (0, 78):
                self.start()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = NatsServer(folder / "nats")
        self.url = self.server.start()
        self.services: list[Service] = []

    def run(self, service: str, id: str, **fields: Any) -> Service:
        made = Service(self.folder, self.url, service, id, **fields)
        self.services.append(made)
        return made

    @contextlib.asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                for service in self.services:
                    service.look()
                await asyncio.sleep(0.2)

        watching = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for service in reversed(self.services):
                service.end()
            self.server.stop()


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    made = Lab(tmp_path)
    async with made.living():
        yield made


async def reads(client: Client, job: str, seconds: float) -> list[str]:
    """Ask again and again for the job: what is answered that is not the job."""
    wrong = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        try:
            await client.job(job)
        except Retryable:
            pass  # No master leads, or which one does is unclear.
        except Exception as error:
            wrong.append(str(error))
        await asyncio.sleep(0.02)
    return wrong


async def test_a_second_master_of_one_id_stands_by(lab: Lab) -> None:
    first = lab.run("master", "m1")
    async with connect(lab.url) as client:
        await eventually(client.jobs)
        second = lab.run("master", "m1b")
        write_config(second.folder / "config.toml", {"id": "m1", "url": lab.url})
        second.end(signal.SIGKILL)
        second.start()
        await client.submit(JobSpec(id="j1", model="alexnet"))
        assert await reads(client, "j1", 12.0) == []
        assert "lease.standby" in second.log
        assert first.codes == second.codes == []
        first.end(signal.SIGKILL)
        begun_s = time.monotonic()
        assert (await eventually(lambda: client.job("j1"))).spec.id == "j1"
        assert time.monotonic() - begun_s < 30.0


async def test_a_master_that_slept_through_its_lease_answers_nothing(lab: Lab) -> None:
    first = lab.run("master", "m1")
    async with connect(lab.url) as client:
        await eventually(client.jobs)
        lab.run("master", "m2")
        await asyncio.sleep(2.0)
        first.send(signal.SIGSTOP)
        await eventually(lambda: client.submit(JobSpec(id="j1", model="alexnet")), 60.0)
        first.send(signal.SIGCONT)
        assert await reads(client, "j1", 6.0) == []
        assert first.codes == [1], first.log[-500:]
        assert "lease master" in first.log


async def test_an_emptied_store_begins_a_working_cluster_once_it_is_accepted(lab: Lab) -> None:
    """It is a loss until an operator says otherwise: by the files of those that begin, and by the
    memory of those that lived through it. The new epochs are higher than all that these heard."""
    token = "s" * 32
    aggregator = lab.run("aggregator", "a1", cpu_share=1.0, cluster_token=token)
    worker = lab.run("worker", "w1")
    lab.run("profiler", "p1")
    controller, master = lab.run("controller", "c1"), lab.run("master", "m1")
    async with connect(lab.url) as client:
        await eventually(client.jobs)
        for _ in range(3):
            for each in (master, controller):
                each.end(signal.SIGKILL)
                each.start()
            await eventually(client.jobs)
        await _completes(client, "before")
        for each in (master, controller):
            each.end()
        lab.server.kill()
        shutil.rmtree(lab.folder / "nats" / "jetstream")
        assert lab.server.start() == lab.url
        shutil.rmtree(controller.folder / "witness")
        for each in (master, controller):
            each.start()
        await soon(lambda: master.codes[-1:] == controller.codes[-1:] == [78])
        assert "bucket jobs: write " in master.log
        assert "(missing: before)" in master.log
        assert "bucket placements_c1: write " in controller.log, "the profiler remembers it"
        buckets = ["jobs", "nodes", "policies", "usage", "scaling", "ended"]
        buckets += ["placements_c1", "drains_c1"]
        command = [sys.executable, "-m", "slackwater.cli.main", "bus", "accept", *buckets]
        asked = await asyncio.create_subprocess_exec(*command, "--url", lab.url)
        assert await asked.wait() == 0
        for each in (master, controller):
            each.start()
        await _completes(client, "after")
        assert aggregator.codes == worker.codes == []  # They went on.


async def _completes(client: Client, id: str) -> None:
    spec = JobSpec(id=id, program=("true",), workers=1)
    await eventually(lambda: client.submit(spec), 60.0)
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        record = await eventually(lambda: client.job(id), 60.0)
        if record.state in ("completed", "failed", "cancelled"):
            assert record.state == "completed", record.reason
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{id} has not ended")
