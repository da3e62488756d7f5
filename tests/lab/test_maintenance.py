"""Playbooks for a cluster that works, while jobs run."""

import re
import shutil
import subprocess
import time

import pytest
from tests.lab.conftest import IGNORED
from tests.lab.lab import ROOT, Lab
from tests.lab.load import Load

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800), IGNORED]


def ready(lab: Lab) -> set[str]:
    return {each["heartbeat"]["node"] for each in lab.json("nodes") if each["alive"]}


def test_rotate(lab: Lab, load: Load, measured: list[str]) -> None:
    """All keys, certificates and the token are others; submissions go on meanwhile, by a client
    that reads its key when it connects; the former keys are refused."""
    former = lab.home / "former.nk"
    shutil.copy(lab.secrets / "users/operator.nk", former)
    token = (lab.secrets / "cluster_token").read_text()
    certificate = (lab.secrets / "h1.pem").read_text()
    began_s = time.monotonic()
    played = lab.play("rotate.yml", slackwater_rotate_token=True)
    load.accepts(60.0)
    gap_s = load.gap_s(began_s)
    measured.append(f"rotate.yml: {played.took_s / 60:.1f} min, {gap_s:.1f} s without a new job")
    load.settled()
    assert (lab.secrets / "cluster_token").read_text() != token
    assert (lab.secrets / "h1.pem").read_text() != certificate
    words = ["--tlsca", str(lab.secrets / "ca.pem"), "--nkey", str(former), "nodes"]
    done = subprocess.run(
        [str(ROOT / ".venv/bin/slackwater"), *words, "--url", lab.url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "refuses" in done.stderr


def test_backup_and_restore(lab: Lab, load: Load, measured: list[str]) -> None:
    """The cluster goes on from what was there when it was saved."""
    shutil.rmtree(lab.home / "backups", ignore_errors=True)
    load.accepts(60.0)
    load.settled()
    kept = list(load.acknowledged)
    saved = lab.play("backup.yml")
    (file,) = (lab.home / "backups").glob("*.tar.gz")
    load.accepts(60.0)
    with load.paused():
        restored = lab.play("restore.yml", backup=str(file))
        records = load.records()
        assert set(kept) <= set(records)
        assert all(records[id].state == "completed" for id in kept)
        load.acknowledged = {id: at_s for id, at_s in load.acknowledged.items() if id in records}
    load.accepts(60.0)
    load.settled()
    measured.append(
        f"backup.yml: {saved.took_s:.0f} s; restore.yml: {restored.took_s:.0f} s, "
        f"{file.stat().st_size / 2**20:.1f} MiB"
    )


def test_a_machine_comes_and_goes(lab: Lab, load: Load, measured: list[str]) -> None:
    """h4 joins by an inventory that names it, runs a job, and is taken out while it runs one."""
    inventory = lab.inventory.read_text()
    try:
        joined = inventory.replace(
            "h3 ansible_host=10.77.0.13",
            f"h3 ansible_host=10.77.0.13\nh4 ansible_host={lab['h4'].address}",
        )
        joined = re.sub(r"(\[(?:workers|aggregators)\]\n(?:h\d\n)+)", r"\1h4\n", joined)
        lab.inventory.write_text(joined)
        added = lab.play("site.yml")
        assert "h4" in ready(lab)
        long = f"long-{time.monotonic():.0f}"
        lab.ask(f"submit --id {long} --gpus 8 --workers 8 -- sleep 60")
        until_s = time.monotonic() + 60
        while lab.json(f"job {long}")["state"] != "running":
            assert time.monotonic() < until_s, lab.ask(f"job {long}")
            time.sleep(0.5)
        taken = lab.play("decommission.yml", "-e", "machine=h4")
        until_s = time.monotonic() + 30
        while "h4" in ready(lab):  # It was heard a moment ago.
            assert time.monotonic() < until_s
            time.sleep(0.5)
        assert not lab["h4"].shell("ls /etc/slackwater 2>/dev/null; true").strip()
        measured.append(
            f"a machine joins: {added.took_s / 60:.1f} min, goes: {taken.took_s / 60:.1f} min"
        )
        refused = lab.play("decommission.yml", "-e", "machine=h1", fails=True)
        assert "it is a server of the bus" in refused.text
    finally:
        lab.inventory.write_text(inventory)
    lab.ask(f"cancel {long}", check=False)
    load.accepts(60.0)
    load.settled()


def test_doctor(lab: Lab, load: Load) -> None:
    """It is well, and says so; with a service gone it fails, and says which."""
    assert lab.play("doctor.yml").total("failed") == 0
    lab["h1"].shell("systemctl stop slackwater-controller")
    try:
        played = lab.play("doctor.yml", fails=True)
    finally:
        lab["h1"].shell("systemctl start slackwater-controller")
    assert "no job gets parameters" in played.text
