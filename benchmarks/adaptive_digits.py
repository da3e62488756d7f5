"""Measure `slackwater.torch.Adaptive` on digits: the same accuracy in less time, without a restart.

A small convolutional network learns scikit-learn's digits, each shifted by up to one pixel (12,933
images; 3,240 others are the test), on one core, by SGD with momentum; its rate falls at 1/2 and 3/4
of the epochs. M0 is 32: the usual batch for a set of this size, and the one by which the rate was
chosen. Adaptive and the fixed batch M0 train in turns, for as many statistical epochs, with the
same seeds; the loader is the same one, with and without `adapt`. Seconds are those of training
alone, without loading torch and without the test. On a CPU a small batch is bound by what a pass
costs whatever its size: growing pays for that reason, as it does on a GPU.

    python benchmarks/adaptive_digits.py [--seeds 3] [--epochs 30]

Goal: accuracy within .5 points of the fixed batch's, in at most .85 of its seconds.
"""

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from figures import Figure, Row, paired, show, this_command, write_json
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import slackwater.torch
from slackwater.agent.adaptive_record import read

GOAL: Final = 0.85
POINTS: Final = 0.5
M0, MOST, RATE = 32, 1024, 0.02
TRAIN: Final = 1437


class Run(NamedTuple):
    """One training."""

    seconds: float
    cpu_s: float
    accuracy: float
    """Percent of the test."""
    iterations: int
    batch: int
    """The last one."""
    changes: int


class Images(TensorDataset):
    """Gives all images of a batch at once: a loader that collates one by one would be measured."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        chosen = torch.tensor(indices)
        return tuple(tensor[chosen] for tensor in self.tensors)


def whole(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return batch


def data() -> tuple[Images, torch.Tensor, torch.Tensor]:
    """Training set, images and labels of the test."""
    found = load_digits()
    images = torch.tensor(found.images / 16.0, dtype=torch.float32)[:, None]
    labels = torch.tensor(found.target)
    moves = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)]
    shifted = [torch.roll(images, move, (2, 3)) for move in moves]
    train = torch.cat([each[:TRAIN] for each in shifted])
    test = torch.cat([each[TRAIN:] for each in shifted])
    return Images(train, labels[:TRAIN].repeat(9)), test, labels[TRAIN:].repeat(9)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    )  # fmt: skip


def train(
    sets: tuple[Images, torch.Tensor, torch.Tensor],
    seed: int,
    epochs: int,
    adapt: bool,
    fit_s: float,
) -> Run:
    images, test, labels = sets
    torch.manual_seed(seed)
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    falls = [epochs // 2, 3 * epochs // 4]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, 0.1)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        begun_s, cpu_s = time.perf_counter(), time.thread_time()
        adaptive = slackwater.torch.Adaptive(
            model, optimizer, images, batch=M0, max_batch=MOST, adapt=adapt, seed=seed,
            fit_s=fit_s, record=record, collate_fn=whole,
        )  # fmt: skip
        for _ in adaptive.epochs(epochs):
            for inputs, targets in adaptive.batches():
                adaptive.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
                adaptive.step()
            scheduler.step()
        seconds, cpu_s = time.perf_counter() - begun_s, time.thread_time() - cpu_s
        changes = [change.batch for change in read(record)]
    with torch.no_grad():
        right = float((model(test).argmax(1) == labels).double().mean())
    differ = sum(a != b for a, b in pairwise(changes))
    return Run(seconds, cpu_s, 100 * right, adaptive.iteration, adaptive.batch, differ)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--fit-s", type=float, default=30.0, help="Seconds between fits.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = data()
    ours, fixed = [], []
    for seed in range(options.seeds):
        for adapt, runs in ((True, ours), (False, fixed)):
            runs.append(train(sets, seed, options.epochs, adapt, options.fit_s))
            print("adaptive" if adapt else "fixed   ", runs[-1], flush=True)
    rows: list[Row] = [
        paired("digits, seconds", [r.seconds for r in ours], [r.seconds for r in fixed], "s",
               "fixed M0", GOAL, lower_is_better=True),
        paired("digits, CPU of the training thread", [r.cpu_s for r in ours],
               [r.cpu_s for r in fixed], "s", "fixed M0", None, lower_is_better=True),
        Figure("digits, accuracy (mean of seeds)", statistics.fmean(r.accuracy for r in ours),
               statistics.fmean(r.accuracy for r in fixed), "%", "fixed M0"),
    ]  # fmt: skip
    show(f"Adaptive on digits, load {os.getloadavg()[0]:.1f}", rows)
    off = rows[2].ours - rows[2].peer if isinstance(rows[2], Figure) else 0.0
    print(f"accuracy: {off:+.2f} points (goal: within {POINTS}); no restart")
    if options.json is not None:
        write_json(options.json, this_command(), rows)
    if any(isinstance(row, Figure) and row.met is False for row in rows) or abs(off) > POINTS:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
