"""A service as a process: exit codes, one line for every expected error, SIGTERM."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slackwater.common.shell.config import write_config

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).with_name("toy_service.py")


def _run(tmp_path: Path, values: dict[str, Any], **environment: str) -> tuple[int, list[str]]:
    config = tmp_path / "toy.toml"
    write_config(config, values)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | environment,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"id": "t1", "buckt": "x"}, "unknown key buckt; the nearest is bucket"),
        (
            {"id": "t1", "metrics_port": "many"},
            "metrics_port = 'many': give a whole number",
        ),
        ({"id": "not an id"}, "id = 'not an id'"),
        ({}, "key id is missing"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_code_78(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    code, lines = _run(tmp_path, values)
    assert code == 78
    assert len(lines) == 1
    assert said in lines[0]
    assert str(tmp_path / "toy.toml") in lines[0]


def test_no_configuration_file_is_code_78(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--config", str(tmp_path / "none.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 78
    assert "is the path right?" in done.stderr


def test_nobody_at_the_url_is_one_line_and_code_75(tmp_path: Path) -> None:
    code, lines = _run(tmp_path, {"id": "t1", "url": "nats://127.0.0.1:1"})
    assert code == 75
    assert len(lines) == 1
    assert "nats://127.0.0.1:1" in lines[0]


def test_an_unknown_failpoint_is_code_78(tmp_path: Path) -> None:
    code, lines = _run(tmp_path, {"id": "t1"}, SLACKWATER_FAILPOINTS="toy.nowhere=kill@1")
    assert code == 78
    assert len(lines) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_with_code_0(lab: Any, signum: int) -> None:
    await lab.supervisor.start_units([lab.spec()])
    answers = [
        asyncio.ensure_future(lab.ask("add", lab.toy.Add(command="c", account=f"a{n}", amount=1)))
        for n in range(200)
    ]
    await asyncio.wait(answers, timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
    lab.supervisor.kill("t1", signum)
    unit = lab.supervisor.units["t1"]
    async with asyncio.timeout(10.0):
        await unit.ended.wait()
    assert (unit.status.state, unit.status.restarts) == ("stopped", 0)
    told = await asyncio.gather(*answers, return_exceptions=True)
    stored = await lab.stored()
    sums = [answer for answer in told if isinstance(answer, lab.toy.Sum)]
    assert len(sums) > 0
    assert {answer.account for answer in sums} == set(stored)  # Begun is finished, and answered.
