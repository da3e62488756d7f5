"""The example of adaptive batches is a test: it trains, says its batch, and goes on when it is
started again. It starts Python with torch twice, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "train_adaptive.py")

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]


def train(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def test_it_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder = ("--checkpoint", str(tmp_path / "state"))
    first = train("--epochs", "6", *folder)
    assert [line.partition(":")[0] for line in first] == [f"epoch {n}" for n in range(6)]
    assert "batch 16, rate x 1.00" in first[0]
    again = train("--epochs", "8", *folder)
    assert [line.partition(":")[0] for line in again] == ["epoch 6", "epoch 7"]
