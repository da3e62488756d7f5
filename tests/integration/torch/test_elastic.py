"""Elastic training by real processes on a live cluster: one digest, whatever happens to the job.

Each case takes several seconds: every rank is a process that imports torch.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")

from slackwater.agent.journal import Entry, Journal
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.gangs import processes

pytestmark = [pytest.mark.live, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

PROGRAM = Path(__file__).with_name("elastic_program.py")
ITERATIONS = 300
LOOK_S = 0.02


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    options = ClusterOptions(controllers=1, aggregators=2, transport="auto")
    async with EmbeddedCluster(options) as cluster:
        yield cluster


class Run:
    """A submitted job, followed by what it writes."""

    def __init__(self, client: Client, folder: Path, id: str, rule: str, **changes: Any) -> None:
        self.client, self.folder, self.id = client, folder, id
        folder.mkdir()
        (folder / "slowly").touch()
        self.spec = JobSpec(
            id=id, iterations=ITERATIONS, restarts=5,
            program=("python", str(PROGRAM), str(folder), rule, str(ITERATIONS)),
            **{"workers": 4, "workers_min": 1, "workers_max": 4} | changes,
        )  # fmt: skip

    async def submitted(self) -> "Run":
        await self.client.submit(self.spec)
        return self

    async def until(self, holds: Callable[[JobRecord], bool], what: str) -> JobRecord:
        for _ in range(4000):
            record = await self.client.job(self.id)
            if holds(record):
                return record
            assert record.state not in TERMINAL_STATES, f"before {what}: {record.reason}"
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"{self.id}: never {what}: {record}")

    @property
    def reached(self) -> int:
        try:
            return int((self.folder / "reached").read_text() or 0)
        except FileNotFoundError:
            return 0

    async def trained(self, iterations: int) -> None:
        await self.until(lambda record: self.reached >= iterations, f"iteration {iterations}")

    async def scale(self, workers: int) -> None:
        await self.until(lambda record: not record.resizing, "done with the last change")
        await self.client.scale(self.id, workers)
        await self.until(
            lambda record: not record.resizing and processes(record) == workers,
            f"{workers} workers",
        )

    async def digest(self) -> str:
        (self.folder / "slowly").unlink()
        record = await self.until(lambda record: record.state in TERMINAL_STATES, "over")
        assert record.state == "completed", record.reason
        found: str = json.loads(record.results["0"])["digest"]
        return found

    @property
    def journal(self) -> list[Entry]:
        return Journal(self.folder / "journal.jsonl").entries()

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the job's processes, by rank."""
        found = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get("SLACKWATER_JOB") == self.id and "SLACKWATER_RANK" in environment:
                found[int(environment["SLACKWATER_RANK"])] = process
        return found


async def undisturbed(run: Run) -> None:
    """Leave the job alone."""


async def resized(run: Run) -> None:
    """4, 2, 3 and 1 workers."""
    for at, workers in ((10, 2), (30, 3), (60, 1)):
        await run.trained(at)
        await run.scale(workers)


async def paused(run: Run) -> None:
    """Pause in mid-training, and go on with two workers, then with four."""
    for at, workers in ((15, 2), (50, 4)):
        await run.trained(at)
        await run.client.pause(run.id)
        await run.until(lambda record: record.state == "paused", "paused")
        await run.client.scale(run.id, workers)
        await run.client.resume(run.id)


async def killed(run: Run) -> None:
    """Kill rank 0, then another one, in the middle of whatever they do."""
    for at, rank in ((10, 2), (40, 0)):
        await run.trained(at)
        run.ranks()[rank].send_signal(signal.SIGKILL)


def alone(folder: Path, rule: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the program without a cluster."""
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), rule, str(ITERATIONS)],
        env=os.environ | environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


Changes = Callable[[Run], Awaitable[None]]
CASES: dict[str, tuple[Changes, int, list[tuple[str, int]]]] = {
    "undisturbed": (undisturbed, 4, [("start", 4), ("end", 4)]),
    "one": (undisturbed, 1, [("start", 1), ("end", 1)]),
    "resized": (
        resized, 4,
        [("start", 4), ("resize", 2), ("resize", 3), ("resize", 1), ("end", 1)],
    ),
    "paused": (
        paused, 4,
        [("start", 4), ("pause", 4), ("resume", 2), ("pause", 2), ("resume", 4), ("end", 4)],
    ),
    "killed": (killed, 4, [("start", 4), ("recovery", 4), ("recovery", 4), ("end", 4)]),
}  # fmt: skip
"""Name -> what is done, workers to begin with, what the journal says: what, workers."""
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "rule", "transport"),
    [
        pytest.param("undisturbed", "momentum", "shm", marks=NIGHTLY),
        pytest.param("resized", "momentum", "shm"),
        pytest.param("paused", "adam", "shm", marks=SLOW),
        pytest.param("killed", "adam", "shm"),
        pytest.param("one", "adam", "tcp", marks=NIGHTLY),
        pytest.param("undisturbed", "adam", "tcp", marks=NIGHTLY),
        pytest.param("resized", "adam", "tcp", marks=NIGHTLY),
        pytest.param("paused", "momentum", "tcp", marks=NIGHTLY),
        pytest.param("killed", "momentum", "tcp", marks=SLOW),
    ],
)
async def test_a_run_ends_at_the_bits_of_its_replay_in_one_process(
    cluster: EmbeddedCluster, tmp_path: Path, name: str, rule: str, transport: str
) -> None:
    """The replay computes all virtual ranks by itself, so all runs of a rule end at one digest,
    whatever the number of workers and whatever happened to them."""
    disturb, workers, told = CASES[name]
    env = {} if transport == "shm" else {"ONLY_TCP": "1"}
    async with connect(cluster.url) as client:
        id = f"{name}-{rule}-{transport}"
        run = await Run(client, tmp_path / name, id, rule, env=env, workers=workers).submitted()
        await disturb(run)
        digest = await run.digest()
    seen = [(each.what, each.workers) for each in run.journal]
    assert [each for each in seen if each[0] not in ("move", "batch")] == told
    journal = str(run.folder / "journal.jsonl")
    replayed = alone(tmp_path / "replay", rule, SLACKWATER_REPLAY=journal)
    assert replayed.returncode == 0, replayed.stderr
    assert f"digest {digest}" in replayed.stdout, replayed.stdout


async def test_a_job_begun_from_anothers_checkpoint_ends_at_its_bits(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """It is saved in mid-training with four workers, and goes on with one, as another job."""
    async with connect(cluster.url) as client:
        first = await Run(client, tmp_path / "first", "saved", "adam").submitted()
        await first.trained(20)
        for _ in range(1000):
            made = await client.checkpoint("saved", "once", str(tmp_path / "checkpoint"))
            if made.phase in ("done", "failed"):
                break
            await asyncio.sleep(LOOK_S)
        begun_with = {"start_from": str(tmp_path / "checkpoint"), "workers": 1}
        second = Run(client, tmp_path / "second", "begun", "adam", **begun_with)
        await second.submitted()
        digests = [await first.digest(), await second.digest()]
    # A worker tells of an iteration when it has pushed it; it may not be folded yet.
    assert (made.phase, 19 <= made.iteration < ITERATIONS) == ("done", True), made
    assert digests[0] == digests[1]
    assert second.journal[0].iteration == made.iteration, "it went on from there"
