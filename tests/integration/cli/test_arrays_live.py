"""Arrays and jobs that come after others, on a live cluster."""

import asyncio
import json
import subprocess
import sys

import pytest

from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster

pytestmark = pytest.mark.live


async def run(cluster: EmbeddedCluster, *words: str) -> subprocess.CompletedProcess[str]:
    at = words.index("--") if "--" in words else len(words)
    command = [sys.executable, "-m", "slackwater.cli.main", *words[:at], "--url", cluster.url]
    return await asyncio.to_thread(
        subprocess.run, [*command, *words[at:]], capture_output=True, text=True, timeout=90
    )


async def test_an_array_runs_some_at_a_time_and_the_last_comes_after_it() -> None:
    """Takes some seconds: a cluster and eight short jobs."""
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as cluster:
        submit = ("submit", "--workers", "1")
        echo = ("--", "sh", "-c", "echo $ARRAY_INDEX of $ARRAY_COUNT, {index}")
        done = await run(cluster, *submit, "--id", "s", "--array", "2-7%2", "--wait", *echo)
        assert done.returncode == 0, done.stderr
        assert "6 of 6 jobs completed" in done.stdout
        assert "6 jobs are stored: s-2 to s-7" in done.stderr
        assert (await run(cluster, "logs", "s-5")).stdout == "5 of 6, 5\n"
        listed = json.loads((await run(cluster, "jobs", "--all", "--json")).stdout)
        times = {job["spec"]["id"]: job for job in listed}
        assert times["s-4"]["started_s"] >= times["s-2"]["finished_s"]
        assert times["s-5"]["started_s"] >= times["s-3"]["finished_s"]
        slow = ("--", "sh", "-c", "sleep 9; exit 1")
        await run(cluster, *submit, "--id", "first", *slow)
        await run(cluster, *submit, "--id", "then", "--after", "first", "--", "true")
        after = ("--after", "first", "--after-any")
        await run(cluster, *submit, "--id", "anyway", *after, "--", "true")
        shown = await run(cluster, "job", "then")
        assert "waits for job first to complete" in shown.stdout
        ended = await run(cluster, "wait", "then", "anyway", "--json")
        states = {each["job"]: each["state"] for each in json.loads(ended.stdout)}
        assert states == {"then": "cancelled", "anyway": "completed"}
        wrong = await run(cluster, *submit, "--id", "x", "--after", "nosuch", "--", "true")
        assert (wrong.returncode, "there is no job nosuch" in wrong.stderr) == (65, True)
        bad = await run(cluster, *submit, "--array", "9-1", "--", "true")
        assert (bad.returncode, "write it as 0-9" in bad.stderr) == (2, True)
