"""A checkpoint of a plain training script: how long training stands still, and until it is durable.

`slackwater.torch.checkpoint` beside torch.save with fsync, and beside torch's own asynchronous
checkpoints (torch.distributed.checkpoint.async_save), which are synced afterwards, of the same
state, to the same disk, in turns. A thread counts meanwhile in pure Python: how much slower it is
while a checkpoint is written behind says what the writer takes of the interpreter's lock.

    python benchmarks/checkpoint.py [--mib 512] [--rounds 5] [--folder FOLDER] [--json FILE]
"""

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from figures import Figure, show, spread, write_json

import slackwater.torch

BLOCKED_S_MAX = 0.15
"""Goal for 512 MiB, on one core (DESIGN: live jobs)."""
PARTS = 16


def build(mib: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model and an optimiser with one state of its size, together so many MiB."""
    elements = int(mib * 2**20 / 8 / PARTS)
    model = torch.nn.Module()
    for number in range(PARTS):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(elements)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def sync(folder: Path) -> None:
    for path in (*(p for p in folder.rglob("*") if p.is_file()), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def by_torch_save(folder: Path, state: dict[str, Any]) -> tuple[float, float]:
    begun_s = time.perf_counter()
    torch.save(state, folder / "state.pt")
    sync(folder)
    took_s = time.perf_counter() - begun_s
    return took_s, took_s


def by_async_save(folder: Path, state: dict[str, Any]) -> tuple[float, float]:
    begun_s = time.perf_counter()
    saving = dcp.async_save(state, checkpoint_id=str(folder / "async"))
    blocked_s = time.perf_counter() - begun_s
    saving.result()
    sync(folder)
    return blocked_s, time.perf_counter() - begun_s


def by_ours(ours: Any) -> tuple[float, float]:
    ours.step()
    begun_s = time.perf_counter()
    ours.save()
    blocked_s = time.perf_counter() - begun_s
    ours._written()
    return blocked_s, time.perf_counter() - begun_s


class Counter:
    """Counts in Python while something else is done."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count)

    def _count(self) -> None:
        number, begun_s = 0, time.perf_counter()
        while not self._stop.is_set():
            number += 1
        self.rate = number / (time.perf_counter() - begun_s)

    def __enter__(self) -> "Counter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(mib: float, rounds: int, where: Path) -> list[Figure]:
    torch.set_num_threads(1)
    model, optimizer = build(mib)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ours = slackwater.torch.checkpoint(
        folder=where / "ours", interval_s=1e9, model=model, optimizer=optimizer
    )
    by_ours(ours)  # Its place is made by the first iteration.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    took: dict[str, list[tuple[float, float]]] = {"ours": [], "save": [], "async": []}
    slower = []
    for _ in range(rounds):
        for name, way in (("save", by_torch_save), ("async", by_async_save)):
            folder = Path(tempfile.mkdtemp(dir=where))
            took[name].append(way(folder, state))
            shutil.rmtree(folder)
        took["ours"].append(by_ours(ours))
        with Counter() as alone:
            time.sleep(0.5)
        ours.step()
        ours.save()
        with Counter() as beside:
            ours._written()
        slower.append(beside.rate / alone.rate)
    dist.destroy_process_group()
    size = f"{mib:g} MiB"
    blocked = [each[0] for each in took["ours"]]
    mine_s = statistics.median(blocked)
    figures = [
        Figure(
            f"{size}: training blocked", mine_s, BLOCKED_S_MAX * mib / 512, "s", "the goal", 1.0,
            lower_is_better=True, spread=spread(blocked),
        )
    ]  # fmt: skip
    for name, peer in (("save", "torch.save + fsync"), ("async", "dcp.async_save")):
        for number, what in enumerate(("training blocked", "until durable")):
            mine, theirs = ([each[number] for each in took[of]] for of in ("ours", name))
            ratios = tuple(a / b for a, b in zip(mine, theirs, strict=True))
            figures.append(
                Figure(
                    f"{size}: {what}", statistics.median(mine), statistics.median(theirs), "s",
                    peer, lower_is_better=True, spread=spread(mine), ratios=ratios,
                )
            )  # fmt: skip
    rate = statistics.median(slower)
    name = f"{size}: Python beside the writer"
    figures.append(Figure(name, rate, 1.0, "of its rate", "alone", spread=spread(slower)))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=512.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(options.mib, options.rounds, Path(folder))
    show("Checkpoints of a plain script", figures)
    if options.json:
        write_json(options.json, "python benchmarks/checkpoint.py", figures)


if __name__ == "__main__":
    main()
