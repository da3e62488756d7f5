"""A context that is in use leads commands and the Python client to its cluster, as its user."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slackwater
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster

pytestmark = pytest.mark.live


async def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLACKWATER_", "NATS_"))}
    return await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "slackwater.cli.main", *words],
        capture_output=True, text=True, timeout=60,
        env={**clean, "XDG_CONFIG_HOME": str(home), "XDG_STATE_HOME": str(home)},
    )  # fmt: skip


async def test_commands_use_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as cluster:
        scheme, _, rest = cluster.url.partition("//")
        secret, _, place = rest.rpartition("@")
        user, _, password = secret.partition(":")
        added = await run(
            tmp_path, "context", "add", "it", "--url", f"{scheme}//{place}", "--user", user,
            "--password", password,
        )  # fmt: skip
        assert added.returncode == 0, added.stderr
        assert (await run(tmp_path, "jobs")).returncode == 69, "it is not in use yet"
        assert (await run(tmp_path, "--context", "it", "jobs")).returncode == 0
        assert (await run(tmp_path, "context", "use", "it")).returncode == 0
        nodes = await run(tmp_path, "nodes")
        assert nodes.returncode == 0, nodes.stderr
        both = await run(tmp_path, "--context", "it", "--cluster", "x", "jobs")
        assert (both.returncode, "give one of them" in both.stderr) == (65, True)
        for name in ("SLACKWATER_URL", "NATS_URL", "SLACKWATER_CLUSTER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        async with slackwater.AsyncClient.connect() as client:
            assert len(await client.nodes()) == 1
