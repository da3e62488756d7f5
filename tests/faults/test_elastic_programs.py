"""kill -9 of hosts, the driver and services while an elastic program runs and is scaled: every task
counts exactly once, and executors keep their state.

Real processes and bytes. Each test takes twenty to forty seconds: a host that is started again
imports numpy and attaches anew, again and again.
"""

import asyncio
import contextlib
import math
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.faults.test_saved_jobs import facts_of, reaches, saved

from slackwater.common.base import limits, saved_program
from slackwater.common.base.checkpoint_folder import newest_of_buckets
from slackwater.common.base.errors import Rejected
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay.proof import mismatch
from slackwater.loadgen.replay.workload import emulated
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.gangs import process_number
from slackwater.services.worker.processes import RankFiles

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).with_name("elastic_counts.py")
BAD_PROGRAM = Path(__file__).with_name("elastic_bad.py")
QUADRATIC = Path(__file__).with_name("elastic_quadratic.py")
HOSTS_MAX = 4
Running = tuple[EmbeddedCluster, Client]


@asynccontextmanager
async def running(transport: str = "", **options: Any) -> AsyncIterator[Running]:
    settings = ClusterOptions(
        controllers=1, aggregators=2, restarts_max=1000, restart_wait_s_max=0.05,
        **({"transport": transport} if transport else {}), **options,
    )  # fmt: skip
    async with EmbeddedCluster(settings) as cluster, connect(cluster.url, "test") as client:
        patient = limits.RETRY_BUDGET_S
        yield cluster, Client(client.bus, client.clock, patient, history=client.history)


def program(folder: Path, iterations: int, **fields: object) -> JobSpec:
    spec = JobSpec(
        id="counts", program=(sys.executable, str(PROGRAM)), folder=str(folder), workers=2,
        workers_min=1, workers_max=HOSTS_MAX, consistency="asynchronous", restarts=1000,
        env={"ITERATIONS": str(iterations)}, grace_s=30.0,
    )  # fmt: skip
    return msgspec.structs.replace(spec, **fields)


def logs_of(cluster: EmbeddedCluster) -> str:
    logs = Path(cluster.supervisor.state_dir).rglob("*.log")
    return "".join(log.read_text() for log in logs)


def hosts_of(cluster: EmbeddedCluster, record: JobRecord) -> list[int]:
    """The process groups of the job's hosts that run."""
    id = record.spec.id
    found = []
    for folder in Path(cluster.supervisor.state_dir).glob("worker-w*"):
        for rank in range(HOSTS_MAX):
            identity = RankFiles(folder, id, rank, process_number(record, rank)).identity()
            if identity is not None and identity.alive():
                found.append(identity.pid)
    return found


async def ended(client: Client, id: str = "counts", within_s: float = 150.0) -> JobRecord:
    for _ in range(int(within_s / 0.1)):
        if (record := await client.job(id)).state in TERMINAL_STATES:
            return record
        await asyncio.sleep(0.1)
    raise AssertionError(f"the program does not end: {record}")


def check(record: JobRecord, iterations: int) -> None:
    assert record.state == "completed", record.reason
    result = msgspec.json.decode(record.results["0"])
    tasks = 6 * iterations
    assert result["sums"] == [tasks, 2 * tasks, tasks]
    assert (result["last"], result["iterations"]) == (0.5 * tasks, iterations)
    assert result["loss"] == pytest.approx(1 / iterations)


async def kill_hosts(
    cluster: EmbeddedCluster, client: Client, seed: int, kills: int, services: list[str]
) -> int:
    rng, killed = random.Random(seed), 0
    while killed < kills:
        await asyncio.sleep(rng.uniform(0.3, 1.2))
        record = await client.job("counts")
        if record.state in TERMINAL_STATES:
            break
        hosts = hosts_of(cluster, record)
        if not hosts:
            continue
        with contextlib.suppress(ProcessLookupError):  # It ended by itself meanwhile.
            os.killpg(rng.choice(hosts), signal.SIGKILL)
            killed += 1
        if services and rng.random() < 0.7:
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            cluster.supervisor.kill(rng.choice(services), signal.SIGKILL)
    return killed


@pytest.mark.parametrize(
    ("sparse", "transport"),
    [
        pytest.param(False, "", id="whole-shm"),
        pytest.param(True, "tcp", id="rows-tcp"),
        pytest.param(False, "tcp", marks=pytest.mark.nightly, id="whole-tcp"),
        pytest.param(True, "", marks=pytest.mark.nightly, id="rows-shm"),
    ],
)
async def test_killed_hosts_and_services_lose_no_task_and_repeat_none(
    tmp_path: Path, transport: str, sparse: bool
) -> None:
    iterations = 600 if sparse else 800
    env = {"ITERATIONS": str(iterations), **({"SPARSE": "1"} if sparse else {})}
    async with running(transport) as (cluster, client):
        await client.submit(program(tmp_path, iterations, env=env))
        names = [unit.name for unit in cluster.supervisor.status()]
        services = [name for name in names if name.startswith(("agg", "master", "contr", "work"))]
        assert len(services) >= 5, names
        killed = await kill_hosts(cluster, client, 4, 8, services)
        record = await ended(client)
        check(record, iterations)
        assert killed >= 3
        assert sum(record.restarts.values()) >= 3


async def test_hosts_come_and_go_under_kills(tmp_path: Path) -> None:
    """Hosts that have memory for one executor at a time, for which every other one is read from
    its file."""
    iterations = 800
    async with running(nodes=2) as (cluster, client):
        await client.submit(program(tmp_path, iterations, memory_bytes=1))
        killing = asyncio.ensure_future(kill_hosts(cluster, client, 5, 5, []))
        sizes = set()
        for hosts in (4, 1, 3, 2):
            for _ in range(40):
                with contextlib.suppress(Rejected):  # It changes its size, or has ended.
                    await client.scale("counts", hosts)
                record = await client.job("counts")
                sizes.add(sum(number for _, number in record.allocation))
                if record.state in TERMINAL_STATES or sum(n for _, n in record.allocation) == hosts:
                    break
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
        killing.cancel()
        check(await ended(client), iterations)
        assert len(sizes) >= 3
        assert "were read again" in logs_of(cluster)


async def test_a_program_that_asks_for_other_numbers_of_hosts_gets_them(tmp_path: Path) -> None:
    """Three, then one, though rank 0 and the master are killed meanwhile; nobody types `scale`."""
    iterations = 900
    env = {"ITERATIONS": str(iterations), "HOSTS": "3 1"}
    async with running(nodes=2) as (cluster, client):
        await client.submit(program(tmp_path, iterations, env=env))
        killing = asyncio.ensure_future(kill_hosts(cluster, client, 7, 4, ["master-m1"]))
        sizes = [2]
        while (record := await client.job("counts")).state not in TERMINAL_STATES:
            if (hosts := sum(number for _, number in record.allocation)) not in (sizes[-1], 0):
                sizes.append(hosts)
            await asyncio.sleep(0.05)
        killing.cancel()
        check(record, iterations)
        told = await facts_of(client, "counts", "scaling")
    assert sizes[:3] == [2, 3, 1], "it had them"
    said = {fact.reason for fact in told}
    assert said <= {"its program asks for 3 workers", "its program asks for 1 worker"}, (
        "told, or killed before that"
    )


async def test_it_gives_slots_to_a_job_of_higher_priority_and_gets_them_back(
    tmp_path: Path,
) -> None:
    """Two of four slots are given, to a job that starts on them at once; the master is killed
    meanwhile."""
    iterations = 900
    urgent = JobSpec(
        id="urgent", workers=2, priority=1, program=(sys.executable, "-c", "print(2)"),
        folder=str(tmp_path),
    )  # fmt: skip
    async with running(worker={"slots": HOSTS_MAX}) as (cluster, client):
        await client.submit(program(tmp_path, iterations, workers=HOSTS_MAX))
        await goes_on(client, 20)
        await client.submit(urgent)
        cluster.supervisor.kill("master-m1", signal.SIGKILL)
        assert (await ended(client, "urgent", within_s=30.0)).state == "completed"
        for _ in range(300):
            record = await client.job("counts")
            if not record.resizing and sum(n for _, n in record.allocation) == HOSTS_MAX:
                break
            await asyncio.sleep(0.1)
        assert record.state == "running", "it has its four hosts again"
        check(await ended(client), iterations)
        told = await facts_of(client, "counts", "gives-way")
        said = {fact.reason for fact in told}
        assert said <= {"2 slots for job urgent, whose priority is 1"}, (
            "told, or killed before that"
        )


async def paused(client: Client) -> None:
    await client.pause("counts")
    await reaches(client, "counts", "paused")


async def saved_twice(client: Client, folder: Path) -> None:
    """Wait until the program has iterated, and was saved twice since."""
    await goes_on(client, 10)
    seen: set[int] = set()
    async with asyncio.timeout(60.0):
        while len(seen) < 3:
            with contextlib.suppress(Rejected):  # It is not saved yet.
                seen.add(newest_of_buckets(folder)[0].iteration)
            await asyncio.sleep(0.1)


async def test_paused_and_resumed_it_goes_on(tmp_path: Path) -> None:
    iterations = 500
    async with running() as (_, client):
        await client.submit(program(tmp_path, iterations))
        await asyncio.sleep(4.0)
        await paused(client)
        await client.resume("counts")
        check(await ended(client), iterations)


async def test_a_saved_program_goes_on_in_another_job(tmp_path: Path) -> None:
    """Another job with another number of hosts, whose rank 0 is killed: every task of both counts
    once, and executors have their states."""
    iterations, folder = 500, tmp_path / "saved"
    async with running() as (cluster, client):
        await client.submit(program(tmp_path, iterations))
        went = await goes_on(client, 20)
        await paused(client)
        assert (await saved(client, "counts", folder, "c")).phase == "done"
        saved_program.save(saved_program.own_folder(program(tmp_path, 0)), folder)
        await client.cancel("counts")
        other = program(tmp_path, iterations, id="other", workers=3, start_from=str(folder))
        await client.submit(other)
        await goes_on(client, went, "other")
        hosts = hosts_of(cluster, await client.job("other"))
        os.killpg(hosts[0], signal.SIGKILL)
        check(await ended(client, "other"), iterations)


async def test_tables_that_were_lost_in_a_pause_are_as_old_as_their_checkpoint(
    tmp_path: Path,
) -> None:
    """Partial recovery (Qiao 2021, section 5.4): of two tables one loses what came after its
    checkpoint, which training makes up for, and the other nothing, if it is elsewhere. No batch
    counts in one of them alone."""
    iterations, folder = 150, tmp_path / "saved"
    spec = program(
        tmp_path, iterations, program=(sys.executable, str(QUADRATIC)), servers=2,
        save_to=str(folder), save_every_s=0.5,
    )  # fmt: skip
    async with running() as (cluster, client):
        await client.submit(spec)
        await saved_twice(client, folder)
        await paused(client)
        pool = [info.record for info in await client.aggregators()]
        homes = [record.id for record in pool if record.cluster is not None]
        lost = f"aggregator-{homes[0]}"
        cluster.supervisor.drop_fds(lost)
        cluster.supervisor.kill(lost, signal.SIGKILL)
        await cluster.supervisor.until_ready(lost)
        await client.resume("counts")
        record = await ended(client)
        told = await facts_of(client, "counts", "restored")
    assert record.state == "completed", record.reason
    assert told, "its memory was lost"
    result = msgspec.json.decode(record.results["0"])
    exact = 0.97**iterations
    assert 0.999 * exact < min(result.values()) <= max(result.values()) < 10 * exact
    if len(homes) == 2:
        assert min(result.values()) == pytest.approx(exact, rel=1e-3), "nothing of it was lost"


@pytest.mark.parametrize("transport", ["", "tcp"], ids=["shm", "tcp"])
async def test_tables_that_are_lost_while_it_runs_are_as_hosts_read_them_last(
    tmp_path: Path, transport: str
) -> None:
    """Every aggregator's memory is lost, one after the other, and an iteration or two with it: on
    a machine without other work none at all."""
    iterations = 120
    spec = program(tmp_path, iterations, program=(sys.executable, str(QUADRATIC)), servers=2)
    async with running(transport) as (cluster, client):
        await client.submit(spec)
        for home in ("aggregator-a1", "aggregator-a2"):
            await goes_on(client, (await goes_on(client, 10)) + 10)
            cluster.supervisor.drop_fds(home)
            cluster.supervisor.kill(home, signal.SIGKILL)
            await cluster.supervisor.until_ready(home)
        record = await ended(client)
    assert record.state == "completed", record.reason
    result = msgspec.json.decode(record.results["0"])
    for left in result.values():
        lost = math.log(left, 0.97)
        assert iterations - 10.0 < lost < iterations + 0.1, f"{iterations - lost:.1f} were lost"


@pytest.mark.parametrize("transport", ["", "tcp"], ids=["shm", "tcp"])
async def test_rows_that_are_lost_while_it_runs_are_those_of_hosts_or_of_a_checkpoint(
    tmp_path: Path, transport: str
) -> None:
    """A host has all of a sparse table where it maps it, else none: then the checkpoint counts."""
    iterations, folder = 150, tmp_path / "saved"
    spec = program(
        tmp_path, iterations, program=(sys.executable, str(QUADRATIC)), servers=2,
        save_to=str(folder), save_every_s=0.5,
        env={"ITERATIONS": str(iterations), "SPARSE": "1"},
    )  # fmt: skip
    async with running(transport) as (cluster, client):
        await client.submit(spec)
        for home in ("aggregator-a1", "aggregator-a2"):
            await saved_twice(client, folder)
            cluster.supervisor.drop_fds(home)
            cluster.supervisor.kill(home, signal.SIGKILL)
            await cluster.supervisor.until_ready(home)
        record = await ended(client)
    assert record.state == "completed", record.reason
    result = msgspec.json.decode(record.results["0"])
    may_lose = 60.0 if transport else 2.0
    for left in result.values():
        lost = iterations - math.log(left, 0.97)
        assert -0.1 < lost < may_lose, f"{lost:.1f} iterations were lost"


async def marked(client: Client, before: str) -> None:
    """Wait until the job has another mark."""
    for _ in range(600):
        if (await client.job("counts")).mark != before:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"no mark after {before!r}")


@pytest.mark.parametrize("transport", ["", "tcp"], ids=["shm", "tcp"])
async def test_a_program_goes_back_whole_to_its_mark_and_repeats_what_came_after(
    tmp_path: Path, transport: str
) -> None:
    """Each aggregator's memory is lost once, which in the other mode costs updates: here every task
    counts exactly once, and executors have the states of it. Hosts and services are killed, too."""
    iterations, folder = 700, tmp_path / "marks"
    spec = program(tmp_path, iterations, save_to=str(folder), save_every_s=1.0, recover="rollback")
    async with running(transport) as (cluster, client):
        await client.submit(spec)
        for number, home in enumerate(("aggregator-a1", "aggregator-a2")):
            await marked(client, (await client.job("counts")).mark)
            await goes_on(client, (await goes_on(client, 0)) + 20)
            await kill_hosts(cluster, client, number, 1, ["master-m1", "controller-c1"])
            cluster.supervisor.drop_fds(home)
            cluster.supervisor.kill(home, signal.SIGKILL)
            await cluster.supervisor.until_ready(home)
            await asyncio.sleep(1.0)
        record = await ended(client)
        told = await facts_of(client, "counts", "rolled-back")
    check(record, iterations)
    assert record.placement >= 1, "it went back"
    assert all("it goes back to mark mark-" in fact.reason for fact in told)
    assert record.begins_with.startswith(str(folder))
    marks = [path.name for path in folder.iterdir()]
    assert len(marks) == 1, "older marks are removed"


async def test_a_launch_that_is_killed_leaves_the_program_running(tmp_path: Path) -> None:
    """The same command shows it again, and ends as it does."""
    async with running() as (cluster, client):
        command = [
            sys.executable, "-m", "slackwater.cli.main", "launch", str(PROGRAM), "--url",
            cluster.url, "--env", "ITERATIONS=400", "--id", "counts",
        ]  # fmt: skip

        async def launch() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(
                *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
            )

        first = await launch()
        assert first.stdout is not None
        while b"iteration" not in (line := await first.stdout.readline()):
            assert line
        first.kill()
        await first.communicate()
        second = await launch()
        output, _ = await second.communicate()
        assert second.returncode == 0, output.decode()[-3000:]
        assert b"iteration 400 of 400" in output
        check(await ended(client), 400)


BAD = {
    "shape": r"table w: an update of shape \(3,\), what it goes to has \(10, 2\) \(elastic_bad.py",
    "row": r"table w: .*10.* \(elastic_bad.py, ",
    "nan": r"table w: an update with NaN or infinity \(elastic_bad.py, ",
    "driver": r"the driver Raises\(50, 1\) raised ValueError: its driver gives up \(elastic_bad",
    "file": r"KeyError: 'a column that its data lack'",
    "version": r"host 1 cannot take part: it has release 0.0.1 of slackwater, the driver ",
}


async def test_bad_programs_fail_by_name_and_leave_others_alone(tmp_path: Path) -> None:
    """All at once, on the aggregators and nodes of one that is right."""
    iterations = 300
    async with running(nodes=2) as (_, client):
        await client.submit(program(tmp_path, iterations))
        for what in BAD:
            bad = (sys.executable, str(BAD_PROGRAM))
            await client.submit(program(tmp_path, 1, id=what, program=bad, env={"WHAT": what}))
        records = {what: await ended(client, what) for what in BAD}
        good = await ended(client)
    check(good, iterations)
    assert not good.restarts
    for what, said in BAD.items():
        assert records[what].state == "failed", what
        assert re.search(said, records[what].reason), records[what].reason
        assert not records[what].restarts, f"{what} was started again"


@pytest.mark.nightly
@pytest.mark.timeout(2400)
async def test_two_hundred_kills_and_moves_lose_nothing(tmp_path: Path) -> None:
    """Hosts, aggregators, controller, master, worker services and the bus, and hosts that come and
    go: takes some twenty minutes."""
    kills = int(os.environ.get("ELASTIC_KILLS", "200"))
    iterations = 120 * kills
    async with running(nodes=2) as (cluster, client):
        await client.submit(program(tmp_path, iterations))
        services = [unit.name for unit in cluster.supervisor.status()]
        rng, killed, last = random.Random(9), 0, 0
        while killed < kills:
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            choice = rng.random()
            if choice < 0.3:
                with contextlib.suppress(Rejected):  # It changes its size already.
                    await client.scale("counts", rng.randint(1, HOSTS_MAX))
            elif choice < 0.65:
                hosts = hosts_of(cluster, await client.job("counts"))
                if hosts:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rng.choice(hosts), signal.SIGKILL)
            else:
                cluster.supervisor.kill(rng.choice(services), signal.SIGKILL)
            killed += 1
            if killed % 20 == 0:
                last = await goes_on(client, last)
        check(await ended(client, within_s=900.0), iterations)


async def goes_on(client: Client, before: int, id: str = "counts") -> int:
    """Wait until more iterations are done than before; return how many."""
    for _ in range(1200):
        info = await client.job_info(id)
        assert info.job.state not in TERMINAL_STATES, info.job.reason
        program = info.progress.program if info.progress else None
        if program is not None and program.iteration > before:
            return program.iteration
        await asyncio.sleep(0.1)
    raise AssertionError(f"no iteration after {before}")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_two_programs_and_a_gradient_job_share_all_for_ten_minutes(tmp_path: Path) -> None:
    seconds = float(os.environ.get("ELASTIC_SECONDS", "600"))
    iterations = int(seconds / 0.03)  # Their states grow with each.
    async with running(nodes=2) as (_, client):
        for id in ("counts", "others"):
            await client.submit(program(tmp_path, iterations, id=id))
        gradients = emulated(
            "gradients", "alexnet", workers=2, servers=1, iterations=int(seconds / 0.05),
            compute_s=0.04, bytes_scale=0.004, seed=7,
        )  # fmt: skip
        await client.submit(gradients)
        for id in ("counts", "others"):
            check(await ended(client, id, 4 * seconds + 60.0), iterations)
        record = await ended(client, "gradients", 4 * seconds + 60.0)
        assert (record.state, mismatch(record)) == ("completed", None), record.reason
