"""Commands for jobs, on a cluster of real processes: list, watch, wait, cancel, run again, delete;
every answer is true, and every exit code one for scripts.

Each test has a cluster of its own, which takes seconds to start, and runs a dozen commands of half
a second each; the replay of a trace takes some twenty seconds.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.replay import workload
from slackwater.loadgen.replay.workload import emulated
from slackwater.loadgen.traces import read
from slackwater.loadgen.traces.select import select
from slackwater.schemas.jobs import JobRecord, JobSpec

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
TRACE = "job_id,num_gpu,submission_time,duration\na,1,0,60\n"


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=2)) as made:
        yield made


async def run(
    cluster: EmbeddedCluster, *words: str, program: str = "cli.main"
) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", f"slackwater.{program}", *words]
    at = words.index("--") if "--" in words else len(words)
    arguments[3 + at : 3 + at] = ["--url", cluster.url]
    return await asyncio.to_thread(
        subprocess.run, arguments, capture_output=True, text=True, timeout=60
    )


async def until_iterating(client: Client, id: str) -> None:
    for _ in range(600):
        progress = (await client.job_info(id)).progress
        if progress is not None and progress.iteration > 5 and progress.aggregators:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(await client.job_info(id))


async def until_ended(client: Client, id: str) -> JobRecord:
    for _ in range(600):
        if (record := await client.job(id)).finished_s and record.released:
            return record
        await asyncio.sleep(0.1)
    raise AssertionError(await client.job(id))


async def test_a_job_is_watched_cancelled_run_again_and_deleted(cluster: EmbeddedCluster) -> None:
    async with connect(cluster.url) as client:
        empty = await run(cluster, "jobs")
        assert (empty.returncode, empty.stdout) == (0, "")
        assert "There are no jobs" in empty.stderr
        spec = emulated(
            "k1", "alexnet", workers=2, servers=1, iterations=3000, compute_s=0.05,
            bytes_scale=0.01, seed=1,
        )  # fmt: skip
        await client.submit(spec)
        await until_iterating(client, "k1")
        await watched(cluster)
        ended = await run(cluster, "cancel", "k1")
        assert (ended.returncode, ended.stdout) == (0, "job k1 is cancelled\n")
        again = await run(cluster, "cancel", "k1")
        assert again.returncode == 0
        assert again.stdout.startswith("job k1 was cancelled ")
        rerun = await run(cluster, "rerun", "k1")
        assert (rerun.returncode, rerun.stdout) == (0, "job k1 runs again: this is its run 2\n")
        await until_iterating(client, "k1")
        live = await run(cluster, "delete", "k1")
        assert live.returncode == 65
        assert "`slackwater cancel k1` ends it" in live.stderr
        gone = await run(cluster, "delete", "--force", "k1")
        assert (gone.returncode, gone.stdout) == (0, "job k1 is deleted\n")
        assert (await run(cluster, "job", "k1")).returncode == 65


async def watched(cluster: EmbeddedCluster) -> None:
    listed = await run(cluster, "jobs")
    heads, row = (line.split() for line in listed.stdout.splitlines())
    assert heads[:4] == ["JOB", "STATE", "AGE", "PROGRESS"]
    assert row[:2] == ["k1", "running"]
    assert row[3].endswith("/3,000")
    assert row[5] == "it/s"
    (found,) = json.loads((await run(cluster, "jobs", "-o", "json")).stdout)
    assert found["spec"]["servers"] == 1
    assert found["spec"]["program"][:3] == ["python", "-m", "slackwater.loadgen.emulate"]
    assert found["progress"]["iteration"] > 5
    assert found["progress"]["aggregators"]
    assert found["submitted"].endswith("Z")
    assert (await run(cluster, "jobs", "-o", "name")).stdout == "k1\n"
    one = json.loads((await run(cluster, "job", "k1", "--json")).stdout)
    assert [rank["rank"] for rank in one["progress"]["ranks"]] == [0, 1]
    described = (await run(cluster, "job", "k1")).stdout
    assert "Aggregators:  a" in described
    assert "0     " in described.partition("RANK")[2]
    seen = json.loads((await run(cluster, "top", "--json")).stdout)
    assert [job["spec"]["id"] for job in seen["jobs"]] == ["k1"]
    assert len(seen["aggregators"]) == 2
    waits = await run(cluster, "wait", "k1", "--timeout", "0.2")
    assert (waits.returncode, waits.stderr) == (75, "not reached within 0.2 s\n")
    running = await run(cluster, "wait", "k1", "--for", "running")
    assert (running.returncode, running.stdout) == (0, "job k1 is running\n")


PROGRAM = """
import os, time, numpy as np
from slackwater import Agent
from slackwater.schemas.tensors import UpdateRule
rule = UpdateRule(name="momentum", learning_rate=1.0, momentum=0.5)
with Agent(tensors={"w": np.zeros(1000, np.float32)}, servers=1, update=rule) as agent:
    print("begins at", agent.iteration, flush=True)
    while agent.iteration < int(os.environ["STEPS"]):
        time.sleep(0.02)
        found = agent.step({"w": np.full(1000, -1.0, np.float32)})
    print("ends with", found["w"][0], flush=True)
"""


async def test_a_job_that_is_paused_goes_on_where_it_was(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """Two ranks that save nothing are paused and resumed: their parameters and momentum stay in
    the aggregators, and the last parameters are those of 800 undisturbed steps."""
    script = tmp_path / "steps.py"
    script.write_text(PROGRAM)
    async with connect(cluster.url) as client:
        submitted = await run(
            cluster, "submit", "--id", "p1", "--workers", "2", "--env", "STEPS=800",
            "--time-limit", "10m", "--", "python", str(script),
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stderr
        await until_iterating(client, "p1")
        refused = await run(cluster, "hold", "p1")
        assert refused.returncode == 65
        assert "`slackwater pause p1` stops it" in refused.stderr
        paused = await run(cluster, "pause", "p1", "--wait", "--timeout", "20")
        assert (paused.returncode, paused.stderr) == (0, "")
        assert paused.stdout.splitlines()[-1] == "job p1 is paused"
        info = await client.job_info("p1")
        assert (info.job.held, info.job.allocation) == (True, ())
        assert info.progress is not None
        assert info.progress.speed == 0.0
        described = (await run(cluster, "job", "p1")).stdout
        assert "`slackwater resume p1` lets it go on" in described
        again = await run(cluster, "pause", "p1", "nobody", "--json")
        assert again.returncode == 65
        found = {each["job"]: each for each in json.loads(again.stdout)}
        assert (found["p1"]["state"], found["p1"]["changed"]) == ("paused", False)
        assert "there is no job nobody" in found["nobody"]["error"]
        resumed = await run(cluster, "resume", "p1")
        assert resumed.stdout.startswith("job p1 goes on as soon as there is room"), resumed.stderr
        ended = await until_ended(client, "p1")
        assert ended.state == "completed", ended.reason
        logged = (await run(cluster, "logs", "p1", "--rank", "0")).stdout.split("\n")
        assert logged[0] == "begins at 0"
        assert int(logged[2].removeprefix("begins at ")) > 5
        assert logged[3] == "ends with 1598.0"
        over = await run(cluster, "pause", "p1")
        assert over.returncode == 65
        assert "has completed" in over.stderr


async def test_a_submission_says_what_it_did(cluster: EmbeddedCluster) -> None:
    """The id is made and printed; a repeated one starts nothing; another spec names the remedy."""
    async with connect(cluster.url) as client:
        made = await run(cluster, "submit", "--workers", "1", "--", "sh", "-c", "exit 3")
        assert made.returncode == 0
        assert made.stdout.startswith("job sh-")
        id = made.stdout.split()[1]
        waited = await run(cluster, "wait", id, "--for", "completed")
        assert waited.returncode == 1
        assert f"job {id} has failed: it cannot become completed any more" in waited.stdout
        await until_ended(client, id)
        same = await run(
            cluster, "submit", "--id", id, "--workers", "1", "--", "sh", "-c", "exit 3"
        )
        assert same.returncode == 0
        assert "has failed: nothing new was started" in same.stdout
        other = await run(cluster, "submit", "--id", id, "--", "true")
        assert other.returncode == 65
        assert f"`slackwater rerun {id}`" in other.stderr
        cancel = await run(cluster, "cancel", id)
        assert cancel.returncode == 1
        assert "nothing to cancel" in cancel.stderr
        copy = await run(cluster, "rerun", id, "--id", "copy")
        assert (copy.returncode, copy.stdout) == (0, "job copy is stored\n")
        assert (await client.job("copy")).spec.program == ("sh", "-c", "exit 3")


async def test_a_trace_is_played_again_under_another_prefix(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    """Before anything is submitted, the jobs that exist are named, and the option."""
    trace = f"{tmp_path}/trace.csv"
    with open(trace, "w") as file:  # noqa: ASYNC230 (a test's own small file)
        file.write(TRACE)
    rows = select(read(Path(trace)).jobs)
    (job,) = workload.from_trace(
        rows, time_scale=0.02, compute_scale=0.5, bytes_scale=0.01, seed=1
    ).jobs
    async with connect(cluster.url) as client:
        await client.submit(JobSpec(id=job.spec.id))
        words = [
            "replay", trace, "--time-scale", "0.02", "--bytes-scale", "0.01", "--report",
            f"{tmp_path}/report",
        ]  # fmt: skip
        again = await run(cluster, *words, program="loadgen.cli.main")
        assert again.returncode == 65
        assert f"job {job.spec.id} exists on this cluster and is pending" in again.stderr
        assert "--prefix NAME" in again.stderr
        bad = await run(cluster, *words, "--prefix", "a.b", program="loadgen.cli.main")
        assert bad.returncode == 2
        assert "--prefix 'a.b'" in bad.stderr
        second = await run(cluster, *words, "--prefix", "b", program="loadgen.cli.main")
        assert second.returncode == 0, second.stderr
        assert (await client.job(f"b-{job.spec.id}")).state == "completed"


async def test_many_jobs_are_listed_in_pages_and_only_the_last_ended_are_shown(
    cluster: EmbeddedCluster,
) -> None:
    async with connect(cluster.url) as client:
        for number in range(14):
            await client.submit(JobSpec(id=f"e{number}", iterations=1))
            await client.cancel(f"e{number}")
        await client.submit(JobSpec(id="waits"))
        shown = (await run(cluster, "jobs", "-o", "name")).stdout.split()
        assert shown == ["waits", *(f"e{number}" for number in range(13, 3, -1))]
        listed = await run(cluster, "jobs")
        assert "4 more jobs are not shown; --all shows those that ended." in listed.stderr
        everything = await run(cluster, "jobs", "--all", "-o", "name", "--sort", "id")
        assert everything.stdout.split() == [*(f"e{number}" for number in range(14)), "waits"]
        assert len(json.loads((await run(cluster, "jobs", "--json")).stdout)) == 15
        deleted = await run(cluster, "delete", "e1", "nosuch", "e2")
        assert deleted.returncode == 65
        assert deleted.stdout == "job e1 is deleted\njob e2 is deleted\n"
