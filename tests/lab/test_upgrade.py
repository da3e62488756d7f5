"""From the version before to this one, under load."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from tests.lab.conftest import IGNORED
from tests.lab.lab import ROOT, Lab
from tests.lab.load import Load

# Two releases are built and compiled: seven minutes.
pytestmark = [pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(2400), IGNORED]


def former(folder: Path) -> Path:
    """Check out the commit that CHANGELOG names as the version before."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(r"upgrades from is commit ([0-9a-f]{12})", text)
    assert found is not None
    words = ["git", "-C", str(ROOT), "archive", found[1]]
    packed = subprocess.run(words, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"commit {found[1]} is not in this checkout: {packed.stderr.decode()[:200]}")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def test_upgrade(lab: Lab, tmp_path: Path, measured: list[str]) -> None:
    """Bare machines get the version before; a job trains there while each service is upgraded. Its
    ranks are of the former version until it ends."""
    wheels = lab.home / "former.tar"
    lab.pack(former(tmp_path / "former"), wheels)
    lab.start()
    lab.play("site.yml", slackwater_wheelhouse=str(wheels), slackwater_data_plane="clear")
    with Load(lab) as load:
        load.accepts(60.0)
        lab.ask(
            "submit --id training --model alexnet --workers 2 --iterations 1000000 "
            "--bytes-scale 0.02 --servers 1 --restarts 10"
        )
        began_s = time.monotonic()
        played = lab.play("upgrade.yml", slackwater_data_plane="both")
        load.accepts(60.0)
        gap_s = load.gap_s(began_s)
        measured.append(f"upgrade.yml: {played.took_s / 60:.1f} min, {gap_s:.1f} s without a job")
        load.settled()
        assert [each for each in lab.checks() if each["what"] == "versions"] == []
        before = lab.json("job training")
        assert before["state"] == "running"
        assert before["attempt"] == 0
        again = lab.play("upgrade.yml", slackwater_data_plane="both")
        assert "slackwater_services : Restart it" in again.text
        assert again.total("changed") == 0
