"""The Python client on a live cluster: asynchronous and not, they say the same."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.waiting import eventually

import slackwater
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.embedded.cluster import ClusterOptions, EmbeddedCluster

pytestmark = pytest.mark.live

SAYS = "import os; print('rank', os.environ['SLACKWATER_RANK'], open('data.txt').read())"


@pytest.fixture
async def cluster() -> AsyncIterator[EmbeddedCluster]:
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as made:
        yield made


def spec(id: str, *program: str, workers: int = 1) -> slackwater.JobSpec:
    return slackwater.JobSpec(id=id, program=(sys.executable, *program), workers=workers)


def at_once(url: str, folder: Path) -> None:
    """Do what a script does, without asyncio."""
    with slackwater.Client(url) as client:
        (folder / "data.txt").write_text("17")
        code = folder / "say.py"
        code.write_text(SAYS)
        assert client.submit(spec("say", "say.py", workers=2), workdir=folder) is None
        lines = {(line.rank, line.text) for line in client.logs("say", follow=True)}
        assert lines == {(0, "rank 0 17"), (1, "rank 1 17")}
        (ended,) = client.wait("say", timeout_s=60.0)
        assert (ended.state, ended.verdict) == ("completed", "reached")
        (only,) = client.logs("say", ranks=[1])
        assert only.text == "rank 1 17"
        told = [each.text for each in client.events("say")]
        assert told[-1] == "say completed"
        report = client.report("say")
        assert (report.state, report.events) == ("completed", tuple(told))
        assert [period.state for period in report.periods][-1] == "completed"
        assert report.held_s == pytest.approx(2 * report.ran_s, rel=0.5)
        assert client.job("say").job.state == "completed"
        assert [record.spec.id for record in client.jobs("completed")] == ["say"]
        assert eventually(client.aggregators)[0].record.id == "a1"
        assert [node.heartbeat.node for node in client.nodes()] == ["w1"]
        assert client.rerun("say").run == 1
        client.wait("say", timeout_s=60.0)
        client.delete("say")
        assert client.jobs() == ()
        with pytest.raises(Rejected, match="there is no job"):
            client.report("nosuch")
        first = next(iter(client.events(follow=True)))
        assert "say" in first.text
    client.close()
    with pytest.raises(Rejected, match="the client is closed"):
        client.jobs()


async def test_a_script_submits_watches_and_reads(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    await asyncio.to_thread(at_once, cluster.url, tmp_path)


async def test_the_asynchronous_client_says_the_same(cluster: EmbeddedCluster) -> None:
    async with slackwater.AsyncClient.connect(cluster.url) as client:
        await client.submit(spec("fails", "-c", "print('begun'); raise SystemExit(3)"))
        following = [line.text async for line in client.logs("fails", follow=True)]
        (ended,) = await client.wait("fails", timeout_s=60.0)
        assert (following, ended.state) == (["begun"], "failed")
        (never,) = await client.wait("fails", wanted="completed")
        assert never.verdict == "never"
        report = await client.report("fails")
        assert "3" in report.reason
        assert report.finished_s is not None
        texts = [told.text async for told in client.events("fails", limit=2)]
        assert len(texts) == 2
        await client.submit(spec("held", "-c", "import time; time.sleep(600)"))
        (waits,) = await client.wait("held", timeout_s=0.2)
        assert waits.verdict == "waits"
        await client.cancel("held")


def test_nobody_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="no nats-server answers"):
        slackwater.Client("nats://127.0.0.1:9")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("SLACKWATER_URL", "NATS_URL", "SLACKWATER_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Unavailable, match="no cluster is known"):
        slackwater.Client()
    with pytest.raises(Rejected, match="give one of them"):
        slackwater.Client("nats://127.0.0.1:9", cluster="default")
