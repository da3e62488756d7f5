"""The demo that `make run` plays, whole: real services, processes and bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_demonstration_ends_well_and_leaves_a_report(tmp_path: Path) -> None:
    """Six jobs train for a hundred seconds. What a busy machine cannot show is a remark."""
    done = subprocess.run(
        [
            sys.executable, "-m", "slackwater.loadgen.cli.main", "demo", "--json",
            "--report", str(tmp_path / "report"),
        ],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert len(summary["jobs"]) == 6
    assert all(job["state"] == "completed" and job["equal"] for job in summary["jobs"])
    assert summary["servers_asked_max"] > summary["aggregators_max"] or summary["remarks"]
    assert "resnet152-2 arrives: 2 workers, asks for 2 servers" in done.stderr
    assert (tmp_path / "report" / "index.html").stat().st_size > 50_000
    told = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert told["failures"] == []
