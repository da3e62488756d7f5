"""`slackwater submit --workdir` and `--venv`: nodes get the code and the packages they lack. Every
service, job and command is a process, which takes some twenty seconds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.venvs import environment as environment_of
from tests.waiting import eventually

from slackwater.common.store.venv_packs import Venv

pytestmark = pytest.mark.live

COMMAND = [sys.executable, "-m", "slackwater.cli.main"]
OWN = ("SLACKWATER", "NATS", "XDG_STATE_HOME")


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Two nodes with a fake GPU each."""
    folder = Path(tempfile.mkdtemp(prefix="wd-"))  # Sockets' paths must be short.
    made = {k: v for k, v in os.environ.items() if not k.startswith(OWN)} | {
        "XDG_STATE_HOME": str(folder / "home"),
        "TMPDIR": str(folder),
    }
    words = ("up", "--aggregators", "1", "--nodes", "2", "--gpus-per-node", "1", "--json")
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


def run(environment: dict[str, str], *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *words], env=environment, text=True, capture_output=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def test_each_rank_runs_a_copy_of_the_code_that_was_sent(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """A gang on two nodes, a job on slots, and a second run after the folder is gone: the same
    bytes; what a program writes stays in its job's copy."""
    code = tmp_path / "code"
    (code / "lib").mkdir(parents=True)
    (code / "lib" / "model.py").write_text("value = 42\n")
    (code / "train.py").write_text(
        "import os, sys\nsys.path.append('lib')\nimport model\n"
        "open('written', 'a').write('x')\n"
        "print('value', model.value, len(open('written').read()), os.getcwd() != sys.argv[1])\n"
    )
    words = ("--workdir", str(code), "--wait", "--", "python", "train.py", str(code))
    out = run(environment, "submit", "--id", "gang", "--gpus", "2", *words)
    assert "value 42" in out
    out = run(environment, "submit", "--id", "slots", "--workers", "1", *words)
    assert "value 42 1 True" in out
    assert not (code / "written").exists()
    shown = [json.loads(run(environment, "job", id, "--json")) for id in ("gang", "slots")]
    first, second = (each["spec"]["code"] for each in shown)
    assert first == second
    assert first[:12] in run(environment, "job", "gang")
    shutil.rmtree(code)
    run(environment, "rerun", "slots")
    run(environment, "wait", "slots")
    assert "value 42 2 True" in run(environment, "logs", "slots")


def test_code_that_cannot_be_sent_is_refused_at_once(
    environment: dict[str, str], tmp_path: Path
) -> None:
    def refused(*words: str) -> str:
        return run(environment, "submit", *words, code=2)

    run_true = ("--", "true")
    assert "is not a folder" in refused("--workdir", str(tmp_path / "absent"), *run_true)
    assert "no file that is not ignored" in refused("--workdir", str(tmp_path), *run_true)
    (tmp_path / "train.py").write_text("")
    beside = refused("--workdir", str(tmp_path), "--folder", "/", *run_true)
    assert "give a folder within the code" in beside


def test_each_rank_runs_in_the_virtual_environment_that_was_sent(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """A gang on two nodes with code that was sent, too, a program of the environment, and a second
    run after the environment is gone: the same copies, which a program cannot tell from its own."""
    venv, code = tmp_path / "venv", tmp_path / "code"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    Venv(venv).packages.joinpath("only_there.py").write_text("value = 42\n")
    tool = venv / "bin" / "tool"
    tool.write_text(f"#!{venv}/bin/python\nimport only_there, sys\nprint('tool', sys.prefix)\n")
    tool.chmod(0o755)
    code.mkdir()
    (code / "train.py").write_text(
        "import only_there, os, sys\n"
        "print('value', only_there.value, sys.prefix == os.environ['VIRTUAL_ENV'], sys.prefix)\n"
    )
    given = ("--venv", str(venv), "--wait")
    program = ("--workdir", str(code), "--", "python", "train.py")
    out = run(environment, "submit", "--id", "packages", "--gpus", "2", *given, *program)
    assert "storing the virtual environment for the nodes" in out
    printed = run(environment, "logs", "packages")
    assert printed.count("value 42 True") == 2
    digest = json.loads(run(environment, "job", "packages", "--json"))["spec"]["venv"]
    assert f"{digest[:12]}, sent to its nodes" in run(environment, "job", "packages")
    out = run(environment, "submit", "--id", "tool", "--workers", "1", *given, "--", "tool")
    assert "storing" not in out
    assert f"venvs/{digest[:32]}" in run(environment, "logs", "tool")
    shutil.rmtree(venv)
    run(environment, "rerun", "packages")
    run(environment, "wait", "packages")
    assert run(environment, "logs", "packages").count("value 42 True") == 4


def test_a_node_without_the_interpreter_fails_the_job_by_name(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The gang's node says so before anything starts, another job's when its rank is to start."""
    venv, words = environment_of(tmp_path / "venv", tmp_path / "base"), ("--", "python", "-c", "")
    for id, size in (("on-gpu", "--gpus"), ("on-slot", "--workers")):
        run(environment, "submit", "--id", id, size, "1", "--wait", "--venv", str(venv), *words)
    (tmp_path / "base").rename(tmp_path / "hidden")
    for id in ("on-gpu", "on-slot"):
        run(environment, "rerun", id)
        assert "failed" in run(environment, "wait", id)
        told = " ".join(run(environment, "job", id).split())
        assert "its virtual environment cannot be had: it needs Python 3.11" in told
        assert "install it there, or submit the job with a --venv whose interpreter its" in told
