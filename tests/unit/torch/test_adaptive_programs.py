"""Scripts that adapt their batch, as processes. Each starts Python with torch, which takes seconds,
and trains until its first fit."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")

from slackwater.agent.adaptive_record import read

PROGRAM = Path(__file__).with_name("adaptive_program.py")
WAIT_S = 170.0
pytestmark = pytest.mark.timeout(180)


def run(way: str, ranks: int, result: Path) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), way, str(result)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(WAIT_S) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(ranks)]


def test_one_process_fits_beside_its_training_and_grows_its_batch(tmp_path: Path) -> None:
    (found,) = run("alone", 1, tmp_path / "result")
    batches = [batch for batch, _ in found["decisions"].values()]
    assert batches[0] == 16
    assert max(batches) > 16, "it may shrink again where the machine's times change"
    assert found["rate"] == 0.01, "the scheduler's rate is back"
    changes = read(tmp_path / "result.jsonl")
    assert changes[-1].goodput is not None
    assert changes[-1].batch == batches[-1]


def test_replicas_of_ddp_decide_alike_and_keep_the_same_weights(tmp_path: Path) -> None:
    """Plain DistributedDataParallel over gloo, outside a job: rank 0 alone fits."""
    first, second = run("ddp", 2, tmp_path / "result")
    assert first["decisions"] == second["decisions"]
    assert first["weights"] == second["weights"]
    assert first["examples"] != second["examples"]
    grown = max(batch for batch, _ in first["decisions"].values())
    assert grown > 16, "it may shrink again where the machine's times change"
