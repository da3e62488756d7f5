"""Where a rank's program stands: by real processes, started as ranks are, and a signal."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.waiting import eventually

from slackwater.schemas.hangs import STACK_CHARS_MAX
from slackwater.services.master.hangs import stands
from slackwater.services.worker import stacks

SLEEPS = """
import time
def somewhere():
    print("there", flush=True)
    time.sleep(600)
somewhere()
"""


@contextmanager
def running(path: Path, *command: str, **more: str) -> Iterator["subprocess.Popen[str]"]:
    given = {**os.environ, **more}
    environment = {**given, **stacks.environment(path, given)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_python_program_tells_where_it_stands_and_goes_on(tmp_path: Path) -> None:
    script, path = tmp_path / "train.py", tmp_path / "stacks"
    script.write_text(SLEEPS)
    with running(path, sys.executable, str(script)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        for _ in range(2):
            look = stacks.look([process.pid], path)
            assert stands(look.stack) == f"{script}:5 somewhere"
            assert (look.state, look.why) == ("S", "")
            assert look.cores < 0.1
        assert process.poll() is None


def test_the_stack_is_that_of_the_program_under_a_shell(tmp_path: Path) -> None:
    script, path = tmp_path / "train.py", tmp_path / "stacks"
    script.write_text(SLEEPS)
    with running(path, "/bin/sh", "-c", f"{sys.executable} {script}; true") as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        look = stacks.look([shell.pid, *map(int, children)], path)
        assert stands(look.stack).endswith("train.py:5 somewhere")
        os.kill(int(children[0]), signal.SIGKILL)


def test_a_program_that_is_not_python_is_not_harmed(tmp_path: Path) -> None:
    """The signal would end a process that does not handle it."""
    with running(tmp_path / "stacks", "sleep", "600") as process:
        look = stacks.look([process.pid], tmp_path / "stacks")
        assert (look.state, look.stack) == ("S", "")
        assert "it is not Python" in look.why
        assert process.poll() is None


def test_a_stopped_process_is_told_as_such(tmp_path: Path) -> None:
    with running(tmp_path / "stacks", "sleep", "600") as process:
        process.send_signal(signal.SIGSTOP)
        stopped = Path(f"/proc/{process.pid}/stat")
        eventually(lambda: stopped.read_text().rpartition(")")[2].split()[0] == "T")
        look = stacks.look([process.pid], tmp_path / "stacks")
        assert (look.state, look.why) == ("T", "its process was stopped by a signal")


def test_one_that_computes_is_seen_to(tmp_path: Path) -> None:
    with running(tmp_path / "stacks", sys.executable, "-c", "while True: pass") as process:
        eventually(lambda: stacks.look([process.pid], tmp_path / "stacks").cores > 0.2)


def test_a_file_of_any_size_is_read_at_its_end_alone(tmp_path: Path) -> None:
    """Regression: a rank that wrote gigabytes into it had the worker service read them all."""
    path = tmp_path / "stacks"
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    with path.open("ab") as file:
        file.write(b"the end")
    found = stacks.last_text(path)
    assert found.endswith("the end")
    assert len(found) <= STACK_CHARS_MAX


def test_the_interpreter_s_own_customisation_still_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('its own', flush=True)\n")
    command = sys.executable, "-c", SLEEPS
    with running(tmp_path / "stacks", *command, PYTHONPATH=str(own)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "its own\n"
        assert process.stdout.readline() == "there\n"
        assert stands(stacks.look([process.pid], tmp_path / "stacks").stack).endswith("somewhere")


@pytest.mark.parametrize("stack", ["", "no frames\n", "Thread 0x1 (most recent call first):\n"])
def test_a_stack_without_frames_names_no_place(stack: str) -> None:
    assert stands(stack) == ""
