"""Who a worker is, and what a program hears that was started without anybody saying so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.agent import Agent
from slackwater.agent.identity import identify, number
from slackwater.common.errors import Rejected

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


def test_a_program_that_nobody_submitted_is_told_how_to_in_one_line(tmp_path: Path) -> None:
    code, said = started(tmp_path)
    assert code == 1
    (line,) = said.splitlines()
    assert "SLACKWATER_JOB is not set" in line
    assert "`slackwater submit --id NAME -- python train.py --epochs 3`" in line


def test_a_binding_says_it_as_well(tmp_path: Path) -> None:
    """Importing torch takes seconds on a busy machine."""
    pytest.importorskip("torch")
    script = (
        "import torch, slackwater.torch\nmodel = torch.nn.Linear(2, 2)\n"
        "slackwater.torch.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)\n"
    )
    code, said = started(tmp_path, script)
    assert code == 1
    assert said.startswith("slackwater: this process is not a worker of a job")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("variable", ["SLACKWATER_RANK", "SLACKWATER_WORKERS"])
def test_a_damaged_environment_is_one_line(tmp_path: Path, variable: str) -> None:
    code, said = started(tmp_path, SLACKWATER_JOB="j", **{variable: "x"})
    assert code == 1
    (line,) = said.splitlines()
    assert line.startswith(f"slackwater: {variable} is 'x': it must be a whole number")


def test_a_missing_url_is_one_line(tmp_path: Path) -> None:
    code, said = started(tmp_path, SLACKWATER_JOB="j")
    assert code == 1
    (line,) = said.splitlines()
    assert "give url=, or set SLACKWATER_URL" in line


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
    assert number("SLACKWATER_NOTHING", 7) == 7
    with pytest.raises(Rejected, match="rank 3 of 3 workers"):
        identify(None, 3, None)
    with pytest.raises(Rejected, match="ranks count from 0"):
        Agent(tensors={"w": (2,)}, rank=-1)
