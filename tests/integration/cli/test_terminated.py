"""A command that is terminated stops what it started and leaves no folder behind."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.waiting import eventually

pytestmark = pytest.mark.live


def test_sigterm_ends_a_replay_as_ctrl_c_does(tmp_path: Path) -> None:
    """Sent as soon as the embedded cluster's folder is there, while its services start. That folder
    holds sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="term-") as short:
        terminate(tmp_path, Path(short))


def terminate(tmp_path: Path, folders: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text("job_id,num_gpu,submission_time,duration\na,2,0,600\n")
    words = [
        "replay", str(trace), "--bytes-scale", "0.01", "--aggregators", "1", "--controllers", "1",
        "--report", str(tmp_path / "report"),
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "slackwater.loadgen.cli.main", *words],
        env={**os.environ, "TMPDIR": str(folders)}, stderr=subprocess.PIPE, text=True,
    ) as replay:  # fmt: skip
        eventually(
            lambda: replay.poll() is not None or list(folders.glob("slackwater-*")),
            "its cluster's folder is there", 60.0,
        )  # fmt: skip
        replay.send_signal(signal.SIGTERM)
        _, said = replay.communicate(timeout=60)
    assert replay.returncode == 130, said
    assert "interrupted" in said
    assert list(folders.iterdir()) == []
