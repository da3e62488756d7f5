"""Jobs with GPUs on real processes: one is paused for another, goes on, and the policy is changed.

It takes some ten seconds: every service, job and command is a process, and a master decides once
it has heard all nodes.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

pytestmark = pytest.mark.live

COMMAND = [sys.executable, "-m", "slackwater.cli.main"]
OWN = ("SLACKWATER", "NATS", "XDG_STATE_HOME")
SAMPLE = Path(__file__).parents[3] / "loadgen" / "samples" / "philly.csv"
SAVES = (
    'trap "echo saving; sleep 0.7; exit 9" TERM; echo gpu $CUDA_VISIBLE_DEVICES; '
    "while :; do sleep .1; done"
)


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Two nodes with two fake GPUs each; the smallest job comes first."""
    folder = Path(tempfile.mkdtemp(prefix="gp-"))  # Sockets' paths must be short.
    made = {k: v for k, v in os.environ.items() if not k.startswith(OWN)} | {
        "XDG_STATE_HOME": str(folder / "home"),
        "TMPDIR": str(folder),
    }
    words = ("up", "--aggregators", "1", "--nodes", "2", "--gpus-per-node", "2", "--json")
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, *words, "--gpu-policy", "sf", "--state-dir", str(folder / "state")],
            stdout=out, stderr=subprocess.DEVNULL, env=made, start_new_session=True,
        )  # fmt: skip
    try:
        eventually(lambda: (folder / "out").read_text().endswith("}\n"), "it is up", 100.0)
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def command(environment: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *words], env=environment, text=True, capture_output=True, timeout=60,
        check=False,
    )  # fmt: skip


MEETS = """
import os, socket, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
rank, world, *place = (int(os.environ[name]) for name in names)
where = "localhost", int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(where) as server:
        met = sorted(server.accept()[0].recv(1)[0] for _ in range(world - 1))
    print("met", met, flush=True)
else:
    while True:
        try:
            with socket.create_connection(where) as there:
                there.send(bytes([rank]))
            break
        except OSError:
            time.sleep(0.05)
print("place", place, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MASTER_ADDR"], flush=True)
"""


def test_a_gang_over_two_nodes_meets_as_under_torchrun(environment: dict[str, str]) -> None:
    """A script that is not there is told before anything starts; four ranks on two nodes then find
    one another by the variables that torchrun sets."""
    script = Path(environment["TMPDIR"], "meets.py")
    words = ("submit", "--id", "gang", "--gpus", "4", "--wait", "--", "python", str(script))
    absent = command(environment, *words)
    assert absent.returncode == 1
    assert re.search(rf"it cannot be started: w[12]: there is no script {script}", absent.stderr)
    nothing = command(environment, "logs", "gang")
    assert "has no log of job gang, rank 0; the job failed: it cannot be started" in nothing.stderr
    assert command(environment, "delete", "gang").returncode == 0
    script.write_text(MEETS)
    done = command(environment, *words)
    assert done.returncode == 0, done.stderr
    logged = command(environment, "logs", "gang").stdout
    assert "met [1, 2, 3]" in logged
    host = socket.gethostname()
    for rank, (local, group) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        where = f"rank {rank} on w{group + 1}"
        assert f"{where} | place [{local}, 2, {group}, 2] {local} {host}" in logged


TRAINS = """
import sys, time
from slackwater import BatchLimits, GoodputReporter
limits = BatchLimits(initial=32, total_max=1024, per_gpu_max=128)
with GoodputReporter(limits, state=sys.argv[1], report_s=1.0) as goodput:
    print("holds", goodput.placement.gpus, flush=True)
    while True:
        per_gpu, steps = goodput.batch_split()
        computing_s = 0.01 + 0.0002 * per_gpu
        time.sleep(computing_s * (steps + 1))
        goodput.saw_iteration(computing_s * (steps + 1), per_gpu, steps, computing_s)
        squared = 1.0 + 5000.0 / per_gpu
        goodput.saw_difference(squared, 2 * (squared - 1.0), per_gpu)
"""


def test_a_job_grows_under_pollux_as_its_program_reports(environment: dict[str, str]) -> None:
    """One GPU first, then two, then more, in rounds of four seconds: its program reports them, and
    keeps what it has learned. It takes half a minute, a restart of its processes each round."""

    def run(*words: str) -> str:
        done = command(environment, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def held() -> int:
        return sum(gpus for _, gpus in json.loads(run("job", "trains", "--json"))["allocation"])

    run("policy", "set", "pollux", "--set", "round_s=4", "--set", "delay_s=0")
    folder = Path(environment["TMPDIR"])
    (folder / "train.py").write_text(TRAINS)
    run("submit", "--id", "trains", "--gpus", "1", "--gpus-max", "4", "--adaptive", "--grace", "1",
        "--", sys.executable, str(folder / "train.py"), str(folder / "learned"))  # fmt: skip
    eventually(lambda: held() > 2, "it grows", 90.0)
    said = [line for line in run("logs", "trains", "--rank", "0").splitlines() if "holds" in line]
    assert said[:2] == ["holds 1", "holds 2"]
    shown = json.loads(run("policy", "show", "--json"))
    assert (shown["policy"], shown["failures"]) == ("pollux", 0)


def test_a_job_is_paused_for_a_smaller_one_and_goes_on_after_it(
    environment: dict[str, str],
) -> None:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return command(environment, *words)

    def submit(id: str, gpus: int, script: str) -> None:
        words = ("submit", "--id", id, "--workers", str(gpus), "--gpus", str(gpus))
        done = run(*words, "--", "/bin/sh", "-c", script)
        assert done.returncode == 0, done.stderr

    def record(id: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(run("job", id, "--json").stdout)
        return found

    nothing = run("what-if", "--gpu-policy", "fifo")
    assert nothing.returncode == 65
    assert "no job with GPUs runs or waits" in nothing.stderr
    check_replay(environment)
    begun_s = time.monotonic()
    submit("big", 4, SAVES)
    eventually(lambda: record("big")["state"] == "running", "big runs", 30.0)
    submit("small", 1, "while [ ! -e $TMPDIR/over ]; do sleep .1; done")
    waits = "held by small (1)"
    eventually(lambda: waits in str(record("big")["reason"]), "big waits for small", 30.0)
    assert record("big")["state"] == "paused"
    said = run("logs", "big").stdout.splitlines()
    for rank in range(4):
        assert f"rank {rank} on w{1 + rank // 2} | saving" in said
    cost_s = record("big")["reallocation_s"]
    assert isinstance(cost_s, float)
    assert 0.7 <= cost_s < time.monotonic() - begun_s
    assert f"another one costs it {cost_s:.3g} s, as measured" in run("job", "big").stdout
    Path(environment["TMPDIR"], "over").touch()
    eventually(lambda: record("big")["state"] == "running", "big goes on", 30.0)
    assert (record("small")["state"], record("big")["attempt"]) == ("completed", 1)
    said = run("logs", "big", "--rank", "0").stdout
    assert said.count("gpu 0") == 2
    assert "saving" in said
    refused = run("policy", "set", "srsf")
    assert refused.returncode == 65
    assert "the time that each job still needs" in refused.stderr
    assert run("policy", "set", "fifo").returncode == 0
    shown = json.loads(run("policy", "show", "--json").stdout)
    assert (shown["policy"], shown["chosen"], shown["gpus_used"]) == ("fifo", True, 4)
    submit("tiny", 1, "sleep 60")
    eventually(lambda: "held by big" in str(record("tiny")["reason"]), "tiny waits for big", 30.0)
    check_what_if(environment)


def check_what_if(environment: dict[str, str]) -> None:
    """Under fifo `tiny` waits for `big`, which holds all GPUs; by size it is the other way."""
    asked = ("what-if", "--gpu-policy", "sf", "--assume-s", "60")
    words = (*asked, "--restart-s", "0")
    answer = json.loads(command(environment, *words, "--json").stdout)
    assert (answer["policy"], answer["other"]) == ("fifo", "sf")
    jobs = {each["id"]: each for each in answer["jobs"]}
    ends_s = {id: (each["ends_s"], each["would_end_s"]) for id, each in jobs.items()}
    assert ends_s == {"big": (60, 120), "tiny": (120, 60)}
    assert (jobs["big"]["state"], jobs["tiny"]["state"]) == ("running", "pending")
    assert all(each["assumed"] for each in answer["jobs"])
    assert sum(number for _, number in jobs["big"]["allocation"]) == 4
    table = command(environment, *words)
    assert table.stdout.splitlines()[0].split() == [
        "JOB", "STATE", "HOLDS", "LEFT", "FIFO", "SF", "DIFF",
    ]  # fmt: skip
    assert table.stdout.splitlines()[-1].split() == ["mean", "-", "-", "-", "1m30s", "1m30s", "0s"]
    assert "taken to be --assume-s 60" in table.stderr
    assert "what a restart costs" in table.stderr
    cost_s = json.loads(command(environment, "job", "big", "--json").stdout)["reallocation_s"]
    answer = json.loads(command(environment, *asked, "--json").stdout)
    assert (answer["restart_s"], answer["restarts_measured"]) == (cost_s, 1)
    said = f"taken to be {cost_s:.3g} s, the median of what was measured of 1 job"
    assert any(said in each for each in answer["not_known"])
    answer = json.loads(command(environment, *asked, "--restart-s", "30", "--json").stdout)
    assert (answer["restart_s"], answer["restarts_measured"]) == (30, 0)
    assert not any("restart" in each for each in answer["not_known"])
    assert answer["mean_would_end_s"] > 90 + 30
    foreign = command(environment, *words, "--set", "fifo.consolidate=no")
    assert "write sf.NAME=VALUE" in foreign.stderr
    for policy, said in (("fifi", "fifo"), ("srsf", "the time that each job still needs")):
        refused = command(environment, "what-if", "--gpu-policy", policy)
        assert refused.returncode in (2, 65), refused
        assert said in refused.stderr
    nobody = command(environment, *words, "--url", "nats://127.0.0.1:9")
    assert nobody.returncode == 69


def check_replay(environment: dict[str, str]) -> None:
    """A trace is not played under another policy than the running cluster has."""
    url = json.loads(Path(environment["TMPDIR"], "out").read_text())["url"]
    refused = subprocess.run(
        [sys.executable, "-m", "slackwater.loadgen.cli.main", "replay", str(SAMPLE), "--url", url,
         "--gpu-policy", "fifo", "--jobs", "1", "--bytes-scale", "0.001",
         "--report", str(Path(environment["TMPDIR"], "report"))],
        env=environment, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 65
    assert "gives GPUs by sf" in refused.stderr
    assert "slackwater policy set fifo" in refused.stderr
