"""A job without an Agent on real processes: what its ranks send is watched, told and shown.

It takes some twenty seconds: ranks are watched once they have lasted, for twenty iterations.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

COMMAND = [sys.executable, "-m", "slackwater.cli.main"]
OWN = ("SLACKWATER", "NATS", "XDG_STATE_HOME")
PROGRAM = Path(__file__).parents[1] / "services" / "worker" / "traffic_jobs.py"
SIZES = [4_110_418, 671_088, 163_840, 94_370, 94_370, 20_000]
pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(os.geteuid() != 0, reason="packets and calls need root"),
]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """One node with four fake GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="slw-"))  # Sockets' paths must be short.
    made = {k: v for k, v in os.environ.items() if not k.startswith(OWN)} | {
        "XDG_STATE_HOME": str(folder / "home"),
        "TMPDIR": str(folder),
    }
    words = ("up", "--aggregators", "1", "--gpus-per-node", "4", "--json")
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, *words, "--state-dir", str(folder / "state")],
            stdout=out, stderr=subprocess.DEVNULL, env=made, start_new_session=True,
        )  # fmt: skip
    try:
        eventually(lambda: (folder / "out").read_text().endswith("}\n"), "it is up", 100.0)
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def command(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [*COMMAND, *words], env=environment, text=True, capture_output=True, timeout=60, check=True
    )
    return done.stdout


def test_a_job_of_parameter_servers_shows_its_tensors(environment: dict[str, str]) -> None:
    program = ["python", str(PROGRAM), "ranks", f"{environment['TMPDIR']}/address"]
    command(
        environment, "submit", "--id", "ps", "--workers", "4", "--gpus", "4", "--", *program,
        ",".join(map(str, SIZES)),
    )  # fmt: skip

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(command(environment, "job", "ps", "--json"))
        return found

    eventually(lambda: record()["traffic"] is not None, "its traffic is known", 90.0)
    found = record()
    traffic = found["traffic"]
    assert traffic["by"] in ("calls", "pauses")
    if traffic["by"] == "calls":
        assert traffic["sizes_bytes"] == sorted(SIZES, reverse=True)
        assert traffic["bytes_per_iteration"] == sum(SIZES)
    assert traffic["rank"] == 0
    assert found["skew"] == traffic["skew"] == pytest.approx(max(SIZES) / sum(SIZES), abs=0.08)
    assert "Sends:" in command(environment, "job", "ps")
