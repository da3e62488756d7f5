"""`loadgen`'s commands: all are listed, and each loads what it needs."""

import subprocess
import sys

import pytest

from slackwater.console.program import answered
from slackwater.loadgen.cli.commands import app


def test_every_command_is_listed_with_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert answered(app, ["--help"], "loadgen") == 0
    said = capsys.readouterr().out
    for name in ("demo", "experiment", "replay", "memory", "simulate", "audit", "generate"):
        assert f" {name} " in said
    assert "65 bad input" in said


@pytest.mark.parametrize(("command", "foreign"), [("simulate", "nats"), ("audit", "nats")])
def test_a_command_loads_no_library_of_another(command: str, foreign: str) -> None:
    program = (
        "import sys, typer; from slackwater.loadgen.cli.commands import app; "
        f"typer.main.get_command(app).get_command(None, {command!r}); "
        f"sys.exit({foreign!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
