"""The units of a swap device: what they call exists, and systemd understands them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from slackwater.cli.memory import app

ROLE = Path(__file__).resolve().parents[3] / "deploy/ansible/roles/slackwater_swap"
UNITS = ("slackwater-swap-device.service", "slackwater-swap.service")


def unit(name: str) -> str:
    return (ROLE / "files" / name).read_text().replace("\\\n", " ")


def test_the_device_is_started_with_options_that_the_command_has() -> None:
    command = typer.main.get_command(app).commands["export"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    [line] = re.findall(r"^ExecStart=.* memory export (.*)$", unit(UNITS[0]), re.M)
    used = set(re.findall(r"--[a-z-]+", line))
    assert "--swap" in used
    assert used <= known


@pytest.mark.parametrize("name", UNITS)
def test_every_variable_of_a_unit_is_in_the_file_that_it_reads(name: str) -> None:
    template = (ROLE / "templates/swap.env.j2").read_text()
    given = set(re.findall(r"^([A-Z_]+)=", template, re.M))
    assert set(re.findall(r"\$\{([A-Z_]+)\}", unit(name))) <= given
    defaults = re.findall(r"^(\w+):", (ROLE / "defaults/main.yml").read_text(), re.M)
    assert set(re.findall(r"\{\{ (\w+) \}\}", template)) <= {*defaults, "ansible_managed"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    """With commands that this machine has: it looks for them."""
    for name in UNITS:
        text = re.sub(r"/(?:opt|usr|s?bin)/\S*(?:slackwater|nbd-client|modprobe)\b", "/bin/true",
                      unit(name))  # fmt: skip
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in UNITS]
    done = subprocess.run(
        ("systemd-analyze", "verify", *paths),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
