"""Logs, events and exit code of a job on a real cluster, which all survive kills of the worker
service and of nats-server.

Each of these takes some seconds: commands are processes, and so is every service.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.waiting import eventually

pytestmark = pytest.mark.live

COMMAND = [sys.executable, "-m", "slackwater.cli.main"]
OWN = ("SLACKWATER", "NATS", "XDG_STATE_HOME")


@dataclass
class Site:
    process: "subprocess.Popen[bytes]"
    folder: Path
    environment: dict[str, str]

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*COMMAND, *words], env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *words], env=self.environment, text=True, capture_output=True, timeout=60,
            check=False,
        )  # fmt: skip

    def shell(self, id: str, script: str, workers: int = 1) -> None:
        done = self.run(
            "submit", "--id", id, "--workers", str(workers), "--", "/bin/sh", "-c", script
        )
        assert done.returncode == 0, done.stderr

    def kill(self, word: str) -> None:
        """kill -9 the process below `up` that has the word in its command line; return when
        another has it."""
        first = self._pid(word)
        assert first, f"no {word} runs"
        os.kill(first, signal.SIGKILL)
        eventually(lambda: self._pid(word) not in (0, first), f"{word} comes back", 60.0)

    def _pid(self, word: str) -> int:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(word in part for part in child.cmdline()[:4]):
                    return child.pid
            except psutil.Error:
                continue
        return 0


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="ev-"))  # Sockets' paths must be short.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(OWN)} | {
        "XDG_STATE_HOME": str(folder / "home"),
        "TMPDIR": str(folder),
    }
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [*COMMAND, "up", "--aggregators", "1", "--json", "--state-dir", str(folder / "state")],
            stdout=out, stderr=err, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        eventually(lambda: (folder / "out").read_text().endswith("}\n"), "it is up", 100.0)
        yield Site(process, folder, environment)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def test_waiting_for_a_job_shows_its_lines_and_ends_with_its_code(site: Site) -> None:
    """Two ranks; one fails, the other is told to end: the code is that of the first."""
    script = "echo hello; test $SLACKWATER_RANK = 0 && sleep 60; echo no such file >&2; exit 42"
    done = site.run("submit", "--wait", "--id", "w1", "--workers", "2", "--", "sh", "-c", script)
    assert done.returncode == 42, done.stderr
    lines = done.stdout.splitlines()
    assert {"rank 0 | hello", "rank 1 | hello", "rank 1 | no such file"} <= set(lines)
    assert "job w1 failed: rank 1" in done.stderr
    good = site.run("submit", "--wait", "--id", "w2", "--workers", "1", "--", "echo", "well done")
    assert (good.returncode, good.stdout) == (0, "well done\n")


def test_an_interrupted_wait_leaves_the_job_running(site: Site) -> None:
    waiting = site.begin(
        "submit", "--wait", "--id", "w3", "--workers", "1", "--", "sh", "-c", "echo up; sleep 300"
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "up\n"
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert "job w3 goes on: `slackwater logs -f w3` shows it again" in said
    record = json.loads(site.run("job", "w3", "--json").stdout)
    assert record["state"] == "running"
    cancelled = site.begin("logs", "-f", "w3")
    site.run("cancel", "w3")
    assert cancelled.communicate(timeout=60)[0].splitlines()[0] == "up"
    assert cancelled.returncode == 0


def test_a_follower_sees_each_line_once_through_kills(site: Site) -> None:
    """The worker service and nats-server are killed while a job prints; both come back."""
    count = 120
    script = f"for i in $(seq {count}); do echo line $i of $SLACKWATER_RANK; sleep 0.1; done"
    site.shell("f1", script, workers=2)
    following = site.begin("logs", "-f", "f1")
    telling = site.begin("events", "-f", "f1", "--json")
    eventually(lambda: "line 5 " in site.run("logs", "f1", "--rank", "0").stdout, "it prints", 60.0)
    site.kill("services.worker")
    site.kill("nats-server")
    shown, _ = following.communicate(timeout=100)
    assert following.returncode == 0
    for rank in (0, 1):
        prefix = f"rank {rank} | "
        mine = [line.removeprefix(prefix) for line in shown.splitlines() if line.startswith(prefix)]
        assert mine == [f"line {n} of {rank}" for n in range(1, count + 1)]
    assert telling.stdout is not None
    facts = []
    while not facts or not facts[-1].endswith(".completed"):
        facts.append(json.loads(telling.stdout.readline())["subject"])
    assert [fact.rsplit(".", 1)[-1] for fact in facts] == ["pending", "running", "completed"]
    telling.send_signal(signal.SIGINT)
    telling.communicate(timeout=60)
    assert telling.returncode == 130


def test_logs_after_the_end_and_what_there_is_none_of(site: Site) -> None:
    site.shell("e1", "seq 5; echo of rank $SLACKWATER_RANK", workers=2)
    assert site.run("wait", "e1", "--timeout", "60").returncode == 0
    site.kill("services.worker")
    shown = site.run("logs", "e1", "--rank", "1").stdout
    assert shown == "1\n2\n3\n4\n5\nof rank 1\n"
    tail = site.run("logs", "e1", "--tail", "2").stdout.splitlines()
    assert tail == ["rank 0 | 5", "rank 0 | of rank 0", "rank 1 | 5", "rank 1 | of rank 1"]
    found = site.run("logs", "e1", "--rank", "0", "--tail", "1", "--json").stdout
    assert json.loads(found) == {"rank": 0, "node": "w1", "line": "of rank 0"}
    described = site.run("job", "e1").stdout
    assert "rank 1 | of rank 1" in described
    assert "e1 completed" in described
    for words, code, why in (
        (("logs", "nobody"), 65, "no job nobody"),
        (("logs", "e1", "--rank", "2"), 2, "has 2"),
        (("logs", "a.b"), 2, "JOB 'a.b': give letters"),
        (("events", "a.b"), 2, "JOB 'a.b': give letters"),
        (("events", "--since", "soon"), 2, "such as 90s, 10m"),
    ):
        refused = site.run(*words)
        assert refused.returncode == code, words
        assert why in refused.stderr
        assert "Traceback" not in refused.stderr


def test_events_tell_the_story_of_a_job(site: Site) -> None:
    site.shell("s1", "exit 7")
    site.run("wait", "s1", "--timeout", "60")
    told = site.run("events", "s1").stdout.splitlines()
    assert [line.split(" ", 1)[1].split(" (")[0] for line in told] == [
        "s1 is submitted", "s1 runs on w1", "s1 failed",
    ]  # fmt: skip
    assert all(line[2] == line[5] == ":" for line in told), "clock times"
    newest = json.loads(site.run("events", "--limit", "1", "--json").stdout)
    assert newest["subject"].startswith("sw.v1.evt.")
    assert newest["fact"] is not None


def test_tap_prints_raw_messages_with_times_of_the_day(site: Site) -> None:
    tapping = site.begin("tap", "sw.v1.evt.job.*.pending", "--count", "1")
    number = 0
    while tapping.poll() is None and number < 20:  # Until it listens.
        number += 1
        site.shell(f"t{number}", "true")
    shown, _ = tapping.communicate(timeout=60)
    time_of_day = r"\d\d:\d\d:\d\d"
    subject = r"sw\.v1\.evt\.job\.t\d+\.pending"
    assert re.fullmatch(rf'{time_of_day} {subject} \{{.*"at_s":"{time_of_day}".*\}}', shown.strip())
