"""The first hour with Slackwater, as README tells it: a cluster, a script of one's own, a rank that
dies, and the end of it all."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
SCRIPT = """
import sys, time
import numpy as np
from slackwater import Agent

w = np.zeros(1000, np.float32)
with Agent(tensors={"w": w}) as agent:
    for step in range(agent.iteration, int(sys.argv[1])):
        print("step", step)
        time.sleep(0.02)
        w = agent.step({"w": w - 1.0}, learning_rate=0.1)["w"]
"""


class Newcomer:
    """Somebody in a folder of their own, who knows the command and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLACKWATER_", "NATS_"))
        } | {"XDG_STATE_HOME": str(folder / "home"), "TMPDIR": str(folder)}

    def slackwater(self, *words: str, code: int = 0) -> str:
        """Return what the command says, which has to end with that exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "slackwater.cli.main", *words],
            capture_output=True, text=True, timeout=100, env=self._environment,
            cwd=self.folder / "mine",
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{words}: {done.returncode}, not {code}: {said}"
        assert "Traceback" not in said
        return said

    def job(self, id: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.slackwater("job", id, "--json"))
        return told

    def until_training(self, id: str) -> None:
        """Its ranks print: they are past their imports."""
        eventually(lambda: "step 3" in self.slackwater("logs", id), f"{id} trains", 60.0)

    def kill_rank(self, id: str, rank: int) -> None:
        """kill -9 its program, as the kernel or a colleague may."""
        mine = {"SLACKWATER_JOB": id, "SLACKWATER_RANK": str(rank)}
        programs = [
            process
            for process in psutil.process_iter(["cmdline"])
            if "train.py" in (process.info["cmdline"] or ())
            and Path(process.info["cmdline"][0]).name != "sh"
            and mine.items() <= process.environ().items()
            and self.folder / "mine" == Path(process.cwd())
        ]
        assert len(programs) == 1, programs
        programs[0].send_signal(signal.SIGKILL)


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    folder = Path(tempfile.mkdtemp(prefix="new-"))  # Sockets' paths must be short.
    (folder / "mine").mkdir()
    (folder / "mine" / "train.py").write_text(SCRIPT)
    somebody = Newcomer(folder)
    try:
        yield somebody
    finally:
        if list((folder / "home").glob("slackwater/clusters/*/cluster.json")):
            somebody.slackwater("down", "--force")
        shutil.rmtree(folder, ignore_errors=True)


def test_a_newcomers_first_hour(newcomer: Newcomer) -> None:
    """One test of some forty seconds: the cluster costs several of them, each of two dozen commands
    half of one, and a rank of the job that dies is missed and started again in a few."""
    slackwater = newcomer.slackwater
    assert "try: slackwater submit" in slackwater("up", "-d", "--aggregators", "1")
    program = ("--", "python", "train.py")

    # A rank dies, and may be started again.
    submit = ("submit", "--workers", "2", "--servers", "1")
    assert slackwater(*submit, "--id", "again", "--restarts", "1", *program, "1000") == (
        "job again is stored\n"
    )
    assert slackwater(*submit, "--id", "once", *program, "100000") == "job once is stored\n"
    for id in ("again", "once"):
        newcomer.until_training(id)
    assert re.search(r"^once +running ", slackwater("jobs"), re.MULTILINE)
    assert "2 running, 0 pending" in slackwater("top", "--once")
    newcomer.kill_rank("again", 1)

    # Another may not: it fails, and says of what.
    newcomer.kill_rank("once", 0)
    assert "job once has failed" in slackwater("wait", "once", "--for", "completed", code=1)
    told = slackwater("job", "once")
    assert re.search(r"Reason: +rank 0 on w1 was killed by signal 9 \(SIGKILL\)\n", told)
    assert f"Folder:       {newcomer.folder}/mine\n" in told
    assert "once failed (rank 0 on w1 was killed by signal 9 (SIGKILL))" in slackwater("events")
    slackwater("rerun", "once")
    slackwater("cancel", "once")
    slackwater("wait", "once", "--for", "cancelled")
    slackwater("delete", "once")
    assert "there is no job once" in slackwater("job", "once", code=65)

    # Its id is free, for a job that begins at its beginning.
    assert "rank 0 | step 2" in slackwater(*submit, "--id", "once", "--wait", *program, "3")
    told = slackwater("job", "once")
    assert "once is submitted" in told
    assert "SIGKILL" not in told, "that was another job"

    # The first one has gone on where it was, in the meantime.
    slackwater("wait", "again", "--for", "completed")
    assert newcomer.job("again")["restarts"] == {"1": 1}
    assert "rank 1 on w1 was killed by signal 9 (SIGKILL); it is started again" in slackwater(
        "events", "again"
    )
    lines = slackwater("logs", "again", "--rank", "1").splitlines()
    assert lines.count("step 0") == 1, "it did not begin anew"
    assert lines[-1] == "step 999"

    # The option before the command is the one that is meant.
    assert "no cluster 'blue' runs here" in slackwater("--cluster", "blue", "down", code=65)
    assert "cluster default is down" in slackwater("down")
    assert "no cluster runs here" in slackwater("status")
