"""The example is a test: two workers and one plain process end at the same parameters."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]


def test_training_with_two_workers_matches_a_single_process() -> None:
    """SGD, momentum and Adam after 200 steps: the largest difference is at most 1e-5, and the model
    has learned something."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_digits.py"), "--steps", "200"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = re.findall(r"^(\w+) +([\d.e+-]+) +([\d.]+)%$", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["sgd", "momentum", "adam"]
    for _, difference, accuracy in rows:
        assert float(difference) <= 1e-5
        assert float(accuracy) > 95.0
