"""`slackwater launch`: a program as a job, on the cluster that is up, else on one of its own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

PROGRAM = """
import os, socket, sys
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:  # The ranks meet as those of torch.distributed do.
    with socket.create_server(where) as server:
        for _ in range(world - 1):
            server.accept()[0].close()
else:
    while True:
        try:
            socket.create_connection(where).close()
            break
        except ConnectionRefusedError:
            pass
print("rank", rank, "of", world, os.environ.get("MINE"), os.getcwd(), flush=True)
sys.exit(int(sys.argv[1]))
"""


class Launcher:
    """Somebody in a folder of their own, without a cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(PROGRAM)
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLACKWATER_", "NATS_"))
        } | {"XDG_STATE_HOME": str(folder / "home"), "TMPDIR": str(folder)}

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "slackwater.cli.main", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment,
            cwd=self.folder,
        )  # fmt: skip

    def run(self, *words: str) -> tuple[int, str, str]:
        """Return the exit code and what was printed."""
        process = self.start(*words)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """List what runs with this folder as its own."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == str(self.folder):
                    found.append(process)
            except psutil.Error:
                continue  # It has ended, or is another user's.
        return found


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Its folder's name is short: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="slw-") as folder:
        made = Launcher(Path(folder))
        yield made
        for process in made.processes():
            process.kill()


def test_ranks_meet_on_a_cluster_of_their_own_which_ends_with_them(launcher: Launcher) -> None:
    code, out, err = launcher.run(
        "launch", "--workers", "3", "--env", "MINE=yes", "--", "python", "train.py", "0"
    )
    assert code == 0, err
    here = str(launcher.folder)
    told = [f"rank {rank} | rank {rank} of 3 yes {here}" for rank in range(3)]
    assert sorted(out.splitlines()) == told
    assert "no cluster is up: this run has one of its own" in err
    assert "completed after" in err
    eventually(lambda: not launcher.processes(), "all of it ended", 10.0)


def test_it_ends_as_the_program_does(launcher: Launcher) -> None:
    code, _, err = launcher.run("launch", "--", "python", "train.py", "3")
    assert code == 3
    assert "ended with exit code 3" in err


def test_it_runs_on_the_cluster_that_is_up(launcher: Launcher) -> None:
    try:
        code, _, err = launcher.run("up", "--detach", "--aggregators", "1")
        assert code == 0, err
        code, out, err = launcher.run("launch", "--id", "mine", "--", "python", "train.py", "0")
        assert (code, len(out.splitlines())) == (0, 2), err
        assert "no cluster is up" not in err
        assert "completed" in launcher.run("jobs")[1]
        code, out, err = launcher.run("launch", "--id", "mine", "--", "python", "train.py", "0")
        assert (code, out) == (65, ""), "nothing ran: the old output must not pass for new"
        assert "nothing new was started; `slackwater rerun mine` runs it again" in err
    finally:
        launcher.run("down", "--force")


def test_ctrl_c_cancels_the_job_and_ends_the_cluster(launcher: Launcher) -> None:
    program = "import time; print('there', flush=True); time.sleep(600)"
    process = launcher.start("launch", "--", "python", "-c", program)
    assert process.stdout is not None
    assert process.stdout.readline().endswith("there\n")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "is cancelled" in err
    assert "Traceback" not in err
    eventually(lambda: not launcher.processes(), "all of it ended", 10.0)


def test_what_cannot_be_launched_is_refused_with_the_remedy(launcher: Launcher) -> None:
    for words, said in (
        (("launch", "train.py"), "a command comes after --: slackwater launch -- python train.py"),
        (("launch",), "the command comes after --: slackwater launch -- python train.py"),
        (("launch", "--choose-hosts", "--", "python"), "an elastic program chooses"),
        (("launch", "--aggregate", "perhaps", "--", "python"), "aggregate"),
    ):
        code, _, err = launcher.run(*words)
        assert code == 2, err
        assert said in err


CHOOSES = """
import time
from slackwater import elastic
from slackwater.elastic import Bsp, Table


class Waits(elastic.App):
    executors = 8
    tables = {"w": Table(1, 1)}
    driver = Bsp(120)

    class Executor(elastic.Executor):
        def run(self, ctx, task):
            time.sleep(0.04)
            ctx.update("w", [[1]])

    def finish(self, tables, result):
        return {**result, "updates": float(tables["w"][0, 0])}


elastic.launch(Waits())
"""


def test_an_elastic_program_chooses_its_number_of_hosts(launcher: Launcher) -> None:
    """Takes some 20 s: a set of measurements takes two, and hosts take a while to come."""
    (launcher.folder / "waits.py").write_text(CHOOSES)
    code, out, err = launcher.run("launch", "waits.py", "--hosts", "1:4", "--choose-hosts")
    assert code == 0, out + err
    assert re.search(r"an iteration takes .* asks for", out), out
    assert "8 executors on 1 host)" in out
    assert "8 executors on 4 hosts)" in out
    assert '"updates": 960.0' in out, "each task counts once"
