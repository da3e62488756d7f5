"""Train a small network on scikit-learn's digits with a batch that follows what training shows.

    python examples/train_adaptive.py                                 # alone
    torchrun --nproc-per-node 2 examples/train_adaptive.py            # DistributedDataParallel
    slackwater submit --workers 2 -- python train_adaptive.py         # aggregators add gradients up

Each epoch's line says the batch, the factor on the learning rate, and the noise scale. A run that
was stopped goes on from --checkpoint FOLDER.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import slackwater.torch

TRAIN = 1437


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-batch", type=int, default=512)
    parser.add_argument("--record", type=Path, help="A file for every change of the batch.")
    parser.add_argument("--checkpoint", type=Path, help="A folder to save to and go on from.")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    inner = model = network()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, max(1, options.epochs // 3), 0.3)
    adaptive = slackwater.torch.Adaptive(
        model, optimizer, TensorDataset(images[:TRAIN], labels[:TRAIN]),
        batch=options.batch, max_batch=options.max_batch, record=options.record,
    )  # fmt: skip
    state = None
    if options.checkpoint is not None:
        state = slackwater.torch.checkpoint(
            folder=options.checkpoint, model=inner, optimizer=optimizer, scheduler=scheduler,
            adaptive=adaptive,
        )  # fmt: skip
    for epoch in adaptive.epochs(options.epochs):
        for inputs, targets in adaptive.batches():
            adaptive.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            if adaptive.step() and state is not None:
                state.step()
        scheduler.step()
        with torch.no_grad():
            right = (inner(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
        now = adaptive.decision
        print(
            f"epoch {epoch}: {right:.1%}, batch {adaptive.batch}, rate x {now.rate:.2f}, "
            f"efficiency {now.efficiency:.2f}, noise scale {adaptive.noise_scale or 0:.0f}",
            flush=True,
        )
    if state is not None:
        state.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
