"""`slackwater nodes` on a cluster of real processes, whose worker services pose as two machines.

The cluster takes seconds to start, and each command half a second.
"""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
OPTIONS = ClusterOptions(controllers=1, aggregators=1, nodes=2, gpus_per_node=4)


async def run(url: str, *words: str) -> str:
    arguments = [sys.executable, "-m", "slackwater.cli.main", words[0], "--url", url, *words[1:]]
    done = await asyncio.to_thread(
        subprocess.run, arguments, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


async def until(url: str, wanted: Any) -> list[dict[str, Any]]:
    for _ in range(60):
        found: list[dict[str, Any]] = json.loads(await run(url, "nodes", "--json"))
        if wanted(found):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(found)


async def test_nodes_tell_what_they_have_and_what_jobs_hold() -> None:
    async with EmbeddedCluster(OPTIONS) as cluster:
        found = await until(cluster.url, lambda found: len(found) == 2)
        assert [info["heartbeat"]["node"] for info in found] == ["w1", "w2"]
        for info in found:
            beat = info["heartbeat"]
            assert info["alive"]
            assert [gpu["type"] for gpu in beat["gpus"]] == ["fake"] * 4
            assert beat["cores"] >= 1
            assert beat["memory_bytes"] > 2**28
        await run(cluster.url, "submit", "--id", "a", "--workers", "2", "--", "sleep", "60")
        found = await until(cluster.url, lambda found: sum(n["slots_used"] for n in found) == 2)
        assert sorted(info["jobs"] for info in found) == [0, 1]
        await run(cluster.url, "cancel", "a")
        await until(cluster.url, lambda found: not any(n["jobs"] for n in found))
        table = await run(cluster.url, "nodes")
        assert "fake 0/4" in table
