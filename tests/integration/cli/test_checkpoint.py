"""`slackwater checkpoint` and `submit --from`, on a cluster of real processes.

A cluster takes seconds to start, and each command half a second.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.cli.test_job_commands import run, until_ended, until_iterating

from slackwater.common.base.checkpoint_folder import TORCH, CheckpointFolder, newest_of_buckets
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.loadgen.replay.workload import emulated

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


async def submit(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Submit a program, to a bus without services."""
    arguments = [sys.executable, "-m", "slackwater.cli.main", "submit", "--id", "j", "--url", url]
    return await asyncio.to_thread(
        subprocess.run, [*arguments, *words, "--", "true"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


async def test_a_job_is_saved_while_it_trains_and_what_cannot_be_is_said(tmp_path: Path) -> None:
    """Each refusal names what is wrong and what helps."""
    folder = tmp_path / "saved"
    async with (
        EmbeddedCluster(ClusterOptions(controllers=1, aggregators=2)) as cluster,
        connect(cluster.url) as client,
    ):
        spec = emulated(
            "k1", "alexnet", workers=2, servers=1, iterations=3000, compute_s=0.02,
            bytes_scale=0.01, seed=1,
        )  # fmt: skip
        await client.submit(spec)
        await until_iterating(client, "k1")
        made = await run(cluster, "checkpoint", "k1", "--out", str(folder))
        assert made.returncode == 0, made.stderr
        assert made.stdout.startswith("job k1 is saved at iteration ")
        assert made.stdout.endswith(f"slackwater submit --from {folder} ...\n")
        told = await run(cluster, "checkpoint", "k1", "--out", str(folder), "--json")
        document = json.loads(told.stdout)
        assert (document["phase"], document["written"]) == ("done", document["buckets"])
        assert newest_of_buckets(folder)[0].iteration == document["iteration"]

        (tmp_path / "file").write_text("")
        refused = await run(cluster, "checkpoint", "k1", "--out", str(tmp_path / "file"))
        assert refused.returncode == 65
        assert "is not saved: a" in refused.stderr
        assert "File exists" in refused.stderr
        nobody = await run(cluster, "checkpoint", "k2", "--out", str(folder))
        assert (nobody.returncode, nobody.stdout) == (65, "")
        assert "there is no job k2" in nobody.stderr

        other = await run(
            cluster, "submit", "--model", "resnet50", "--workers", "1", "--iterations", "3",
            "--bytes-scale", "0.01", "--id", "other", "--from", str(folder),
        )  # fmt: skip
        assert other.returncode == 0, other.stderr
        failed = await until_ended(client, "other")
        assert failed.state == "failed"
        assert "the checkpoint of job k1 has 16 tensors, this one has" in failed.reason
        await client.cancel("k1")
        await until_ended(client, "k1")
        ended = await run(cluster, "checkpoint", "k1", "--out", str(folder))
        assert ended.returncode == 65
        assert "job k1 has no parameters in aggregators: it was cancelled" in ended.stderr


async def test_a_folder_that_has_nothing_to_begin_with_is_refused_at_once(
    bus: str, tmp_path: Path
) -> None:
    """Before anything is stored, where the folder is seen from here."""
    nothing = await submit(bus, "--from", str(tmp_path))
    assert nothing.returncode == 2
    assert "has no whole checkpoint; `slackwater checkpoint JOB` makes one" in nothing.stderr
    CheckpointFolder(tmp_path).write(3, 0, 1, TORCH, lambda path: path.touch())
    own = await submit(bus, "--from", str(tmp_path))
    assert own.returncode == 2
    assert f"submit with --checkpoint {tmp_path}, and the program itself goes on" in own.stderr
    alone = await submit(bus, "--save-every", "5s")
    assert alone.returncode == 2
    assert "add --save-to FOLDER" in alone.stderr
