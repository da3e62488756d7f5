"""A worker's identity, and the message to a program that was started without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.agent import Agent
from slackwater.agent.identity import identify, rank_of, workers_of, write_result
from slackwater.common.base.errors import Rejected

SCRIPT = """
from slackwater import Agent

Agent(tensors={"w": (2,)})
"""


def started(tmp_path: Path, script: str = SCRIPT, **environment: str) -> tuple[int, str]:
    """The exit code and what a program says that is started by hand."""
    path = tmp_path / "train.py"
    path.write_text(script)
    own = {key: text for key, text in os.environ.items() if not key.startswith("SLACKWATER_")}
    done = subprocess.run(
        [sys.executable, "train.py", "--epochs", "3"],
        cwd=tmp_path,
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def test_a_program_that_nobody_submitted_trains_alone_and_is_told_how_to_submit_it(
    tmp_path: Path,
) -> None:
    code, said = started(tmp_path)
    assert code == 0
    (line,) = said.splitlines()
    assert "trains alone" in line
    assert "`slackwater submit -- python train.py --epochs 3`" in line


def test_a_binding_trains_alone_as_well(tmp_path: Path) -> None:
    """Importing torch takes seconds on a busy machine."""
    pytest.importorskip("torch")
    script = (
        "import torch, slackwater.torch\nmodel = torch.nn.Linear(2, 2)\n"
        "o = slackwater.torch.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
        "assert (slackwater.torch.rank(), slackwater.torch.size()) == (0, 1)\n"
        "before = model.weight.detach().clone()\n"
        "model(torch.ones(1, 2)).sum().backward()\no.step()\no.synchronize()\n"
        "torch.testing.assert_close(model.weight, before - 0.1)\n"
    )
    code, said = started(tmp_path, script)
    assert code == 0, said
    assert said.startswith("slackwater: no job is named")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "variable", ["SLACKWATER_RANK", "SLACKWATER_WORKERS", "RANK", "WORLD_SIZE", "SLURM_PROCID"]
)
def test_a_damaged_environment_is_one_line_that_names_the_variable(
    tmp_path: Path, variable: str
) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "2"}
    if variable.startswith("SLURM"):
        launcher = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    code, said = started(tmp_path, SLACKWATER_JOB="j", **{**launcher, variable: "x"})
    assert code == 78
    (line,) = said.splitlines()
    assert line.startswith(f"slackwater: {variable} is 'x': it must be a whole number")


def test_a_rank_beyond_the_workers_is_one_line(tmp_path: Path) -> None:
    code, said = started(tmp_path, SLACKWATER_JOB="j", SLACKWATER_RANK="2")
    assert code == 78
    assert said.startswith("slackwater: rank 2 of 1 workers; ranks count from 0")
    assert len(said.splitlines()) == 1


def test_a_missing_url_is_one_line(tmp_path: Path) -> None:
    code, said = started(tmp_path, SLACKWATER_JOB="j")
    assert code == 78
    (line,) = said.splitlines()
    assert "give url=, or set SLACKWATER_URL" in line


@pytest.mark.parametrize(
    "launcher", [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}]
)
def test_processes_that_a_launcher_started_do_not_each_train_alone(
    tmp_path: Path, launcher: dict[str, str]
) -> None:
    code, said = started(tmp_path, **launcher)
    assert code == 78
    (line,) = said.splitlines()
    assert "2 workers, but no job" in line
    assert "SLACKWATER_JOB" in line


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, (2, 3)),
        ({"RANK": "1"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4", "SLACKWATER_RANK": "0"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4", "SLACKWATER_WORKERS": "5"}, (0, 5)),
        ({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, (1, 4)),
    ],
)
def test_a_launchers_variables_count_where_ours_are_absent(
    environment: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLACKWATER_RANK", "SLACKWATER_WORKERS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = identify("j", None, None)
    assert (found.rank, found.workers) == (rank_of(), workers_of()) == expected


def test_another_error_keeps_its_traceback(tmp_path: Path) -> None:
    script = SCRIPT.replace("Agent(", "try:\n    Agent(").strip()
    code, said = started(tmp_path, f"{script}\nexcept Exception:\n    pass\nraise KeyError('mine')")
    assert code == 1
    assert "Traceback" in said
    assert "KeyError: 'mine'" in said


def test_what_the_program_gives_counts_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Put back at the end.
    monkeypatch.setenv("SLACKWATER_JOB", "theirs")
    monkeypatch.setenv("SLACKWATER_RANK", "1")
    monkeypatch.setenv("SLACKWATER_WORKERS", "3")
    monkeypatch.setenv("SLACKWATER_RESULT", "/r")
    assert identify(None, None, None) == ("theirs", 1, 3, "/r")
    assert identify("mine", 0, 2) == ("mine", 0, 2, None)
    with pytest.raises(Rejected, match="rank 3 of 3 workers"):
        identify(None, 3, None)
    with pytest.raises(Rejected, match="ranks count from 0"):
        Agent(tensors={"w": (2,)}, rank=-1)


def test_a_result_never_takes_a_devices_place(tmp_path: Path) -> None:
    """A program of root's with SLACKWATER_RESULT=/dev/null made a file of the machine's /dev/null.
    A link to it stands in for it here."""
    null, file = tmp_path / "null", tmp_path / "result.json"
    null.symlink_to(os.devnull)
    for path in (null, file, file):
        write_result(path, "3")
    assert null.is_symlink()
    assert file.read_text() == "3"
    assert sorted(tmp_path.iterdir()) == [null, file]
