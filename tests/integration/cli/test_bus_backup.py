"""A bus saved and restored by the commands: what was kept is there again, sequence by sequence."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from slackwater.common.bus.nats import NatsBus
from slackwater.common.bus.server import NatsServer
from slackwater.common.store.base import Entry
from slackwater.common.store.nats import NatsStore

pytestmark = pytest.mark.live


def slackwater(server: NatsServer, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "slackwater.cli.main", "bus", *words],
        env=os.environ | {"SLACKWATER_URL": server.url_of("operator")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    users = ["owner", "operator", "master-m1"]
    with NatsServer(tmp_path / "nats", guarded=True, users=users) as started:
        yield started


async def filled(server: NatsServer, entries: int) -> dict[str, Entry]:
    bus = await NatsBus.connect(server.url_of("master-m1"), "master")
    bucket = await NatsStore(bus).bucket("jobs")
    last = await bucket.last_sequence()
    for n in range(entries):
        last = await bucket.put(f"j{n}", os.urandom(20_000), expected_last=last)
    found, *_ = await bucket.load()
    await bus.close()
    return found


async def test_what_was_saved_is_restored(server: NatsServer, tmp_path: Path) -> None:
    """More than one chunk, over what came since; the sequences, by which writers know that nobody
    else wrote, are the same."""
    saved = await filled(server, 40)
    folder = tmp_path / "saved"
    code, said, _ = await asyncio.to_thread(slackwater, server, "backup", str(folder), "--json")
    assert code == 0
    assert json.loads(said)["streams"]["KV_jobs"] > 40 * 20_000
    assert folder.stat().st_mode & 0o077 == 0
    assert json.loads((folder / "KV_jobs/backup.json").read_text())["config"]["name"] == "KV_jobs"
    assert await filled(server, 3) != saved
    code, _, why = await asyncio.to_thread(slackwater, server, "restore", str(folder))
    assert (code, "--replace" in why) == (65, True), why
    code, said, why = await asyncio.to_thread(
        slackwater, server, "restore", str(folder), "--replace", "--json"
    )
    assert code == 0, why
    assert json.loads(said)["streams"]["KV_jobs"] == 40
    assert await filled(server, 0) == saved


async def test_nothing_is_restored_under_a_running_service(
    server: NatsServer, tmp_path: Path
) -> None:
    await filled(server, 1)
    folder = tmp_path / "saved"
    assert (await asyncio.to_thread(slackwater, server, "backup", str(folder)))[0] == 0
    bus = await NatsBus.connect(server.url_of("master-m1"), "master")

    async def answer(message: Msg) -> None:
        await bus.publish(message.reply, b"{}")

    await bus.client.subscribe("$SRV.PING.master", cb=answer)
    await bus.flush()
    code, _, why = await asyncio.to_thread(slackwater, server, "restore", str(folder), "--replace")
    await bus.close()
    assert code == 65
    assert "a master service runs on this bus: stop all services first" in why


async def test_files_that_were_cut_or_changed_are_refused_by_name(
    server: NatsServer, tmp_path: Path
) -> None:
    kept = await filled(server, 20)
    for name, spoil in (("config", "backup.json"), ("content", "stream.tar.s2")):
        folder = tmp_path / name
        assert (await asyncio.to_thread(slackwater, server, "backup", str(folder)))[0] == 0
        path = folder / "KV_jobs" / spoil
        path.write_bytes(path.read_bytes()[:100])
        code, _, why = await asyncio.to_thread(
            slackwater, server, "restore", str(folder), "--replace"
        )
        assert code == 65, why
        assert "KV_jobs" in why
        assert "Traceback" not in why
    assert await filled(server, 0) == kept  # Nothing was removed for them.
    code, _, why = await asyncio.to_thread(slackwater, server, "restore", str(tmp_path))
    assert (code, "has nothing that `slackwater bus backup` saved" in why) == (65, True)


async def test_a_backup_is_whole_or_not_there(server: NatsServer, tmp_path: Path) -> None:
    await filled(server, 1)
    (tmp_path / "saved").mkdir()
    code, _, why = await asyncio.to_thread(slackwater, server, "backup", str(tmp_path / "saved"))
    assert (code, "exists: name a new folder" in why) == (65, True)
