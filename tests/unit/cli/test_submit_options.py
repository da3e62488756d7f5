"""Options of `submit`: a program's environment, and what is a job file or a command."""

import shutil
from pathlib import Path

import pytest
from tests.venvs import environment as environment_of

from slackwater.cli.commands import app
from slackwater.cli.submit import environment, saving
from slackwater.console.outcome import Usage
from slackwater.console.program import answered


def test_variables_are_given_or_taken_from_ones_own() -> None:
    own = {"HOME": "/home/ann", "EMPTY": ""}
    given = ["A=1", "B=x=y", "C=", "HOME", "EMPTY"]
    found = {"A": "1", "B": "x=y", "C": "", "HOME": "/home/ann", "EMPTY": ""}
    assert environment(given, own) == found


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("1A=2", "letters, digits and _"),
        ("=2", "letters, digits and _"),
        ("A B=2", "letters, digits and _"),
        ("SLACKWATER_RANK=2", "does not begin with SLACKWATER_"),
        ("ABSENT", "you have no such variable; give ABSENT=VALUE"),
    ],
)
def test_what_cannot_be_a_variable_is_refused(word: str, said: str) -> None:
    with pytest.raises(Usage, match=said):
        environment([word], {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "a command comes after --: slackwater submit -- train.py"),
        (["python", "train.py"], "'python train.py' is not a job file"),
        (["--gpus", "2", "job.txt"], "whose name ends in .yaml, .yml, .toml, .json"),
        (["job.yaml", "job.toml"], "'job.yaml job.toml' is not a job file"),
        (["absent.yaml"], "'absent.yaml': there is no such job file"),
        (["--"], "nothing stands after --"),
        (["--memory", "8Q", "--", "true"], "--memory '8Q': write a size such as 64G"),
        ([], "nothing to submit: give -- COMMAND, JOB_FILE or --model NAME"),
    ],
)
def test_a_job_file_a_command_or_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(app, ["submit", *words], "slackwater") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith("error: ")
    assert said in told


def test_a_job_file_and_a_command_are_one_too_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("id: a\nprogram: ['true']\n")
    assert answered(app, ["submit", str(file), "--", "true"], "slackwater") == 2
    assert answered(app, ["submit", str(file), "--file", str(file)], "slackwater") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "beside -- COMMAND: it says that itself" in told
    assert "give one job file" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--venv", "{}/absent", "--", "python", "a.py"], "is not a virtual environment"),
        (["--venv", "{}", "--", "python", "a.py"], "it has no pyvenv.cfg"),
        (["--venv", "{}/venv", "--", "python", "a.py"], "needs Python 3.77"),
        (["--venv", "{}", "--model", "vgg19"], "--venv beside --model vgg19"),
        (["--venv", "{}", "--", "{}/bin/python", "a.py"], "give -- python, which nodes find"),
    ],
)
def test_an_environment_that_cannot_be_sent_is_refused_at_once(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment_of(tmp_path / "venv", tmp_path / "base", "3.77")
    shutil.rmtree(tmp_path / "base")
    given = [word.format(tmp_path) for word in words]
    assert answered(app, ["submit", *given], "slackwater") == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("every", "fraction", "named"),
    [
        ("soon", 1.0, "--save-every 'soon': write how long.*; or auto"),
        ("0", 1.0, "--save-every '0': give a time, such as 5m, or auto"),
        ("auto", 0.5, "--save-every auto saves all of it each time: leave --save-fraction out"),
    ],
)
def test_how_often_to_save_is_a_time_or_left_to_the_controller(
    tmp_path: Path, every: str, fraction: float, named: str
) -> None:
    options = {
        "save_to": tmp_path, "save_every": "auto", "save_fraction": 1.0, "save_dtype": "float32"
    }  # fmt: skip
    assert saving(options) == {"save_to": str(tmp_path), "save_every_s": 0.0}
    assert saving({**options, "save_every": "1m"})["save_every_s"] == 60.0
    rounded = {**options, "save_every": "", "save_fraction": 0.5, "save_dtype": "bfloat16"}
    assert saving(rounded)["save_dtype"] == "bfloat16"
    with pytest.raises(Usage, match=named):
        saving({**options, "save_every": every, "save_fraction": fraction})
