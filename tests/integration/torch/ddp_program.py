"""A plain DistributedDataParallel script, in the ways in which scripts use it: `python
ddp_program.py CASE`. It knows nothing of Slackwater, and prints a digest of its losses and weights.
"""

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "12"))
PACE_S = float(os.environ.get("PACE_S", "0"))


class Scaled(nn.Module):
    """A convolution in another memory format, a scalar, and a layer that is seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seldom = nn.Linear(4 * 36, 6)
        self.head = nn.Linear(4 * 36, 6)

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        x = x.view(-1, 3, 8, 8).to(memory_format=torch.channels_last)
        found = self.norm(self.convolution(x)).relu().flatten(1) * self.scale
        return self.seldom(found) if seldom else self.head(found)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(192, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 6))


def batches(rank: int, steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        yield (
            torch.randn(8, 192, generator=generator),
            torch.randint(0, 6, (8,), generator=generator),
        )


class Run:
    """One rank's training, with its losses."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []

    def backward(self, x: torch.Tensor, y: torch.Tensor, **options: Any) -> None:
        loss = nn.functional.cross_entropy(self.model(x, **options), y)
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(PACE_S)


def clipping() -> Run:
    run = Run(dense())
    for x, y in batches(run.rank):
        run.backward(x, y)
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.step()
    return run


def accumulating() -> Run:
    run = Run(dense(), gradient_as_bucket_view=True, bucket_cap_mb=1)
    for number, (x, y) in enumerate(batches(run.rank)):
        whole = number % 3 == 2
        with contextlib.nullcontext() if whole else run.model.no_sync():
            run.backward(x, y)
        if whole:
            run.step()
    return run


def uneven() -> Run:
    """One rank has fewer batches; `join` lets it take part in the others' reductions."""
    run = Run(dense())
    with run.model.join():
        for x, y in batches(run.rank, STEPS - 4 * run.rank):
            run.backward(x, y)
            run.step()
    return run


def unused() -> Run:
    run = Run(Scaled(), find_unused_parameters=True)
    for number, (x, y) in enumerate(batches(run.rank)):
        run.backward(x, y, seldom=number % 2 == 1)
        run.step()
    return run


def overflowing() -> Run:
    """Loss scaling: an iteration whose gradients are not finite is skipped by all ranks."""
    run, skipped = Run(dense()), 0
    for number, (x, y) in enumerate(batches(run.rank)):
        bad = number in (3, 4) and run.rank == 1
        run.backward(x * float("inf") if bad else x, y)
        finite = all(torch.isfinite(p.grad).all() for p in run.model.parameters())
        skipped += not finite
        run.step() if finite else run.optimizer.zero_grad()
    assert skipped == 2
    return run


def static() -> Run:
    run = Run(dense(), static_graph=True)
    for x, y in batches(run.rank):
        run.backward(x, y)
        run.backward(x.flip(0), y)
        run.step()
    return run


def own_hook() -> Run:
    """A script that compresses gradients itself."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    run = Run(dense())
    run.model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    for x, y in batches(run.rank):
        run.backward(x, y)
        run.step()
    return run


def doubles() -> Run:
    run = Run(dense().double())
    for x, y in batches(run.rank):
        run.backward(x.double(), y)
        run.step()
    return run


def two_models() -> Run:
    first, second = Run(dense()), Run(dense())
    for x, y in batches(first.rank):
        for run in (first, second):
            run.backward(x, y)
            run.step()
    second.losses += first.losses
    return second


def group_first() -> Run:
    """Models that are freed after their groups, which have just gathered something."""
    run = Run(dense())
    for number in range(30):
        group = dist.new_group()
        model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        model(torch.ones(2, 4) * number).sum().backward()
        dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group, model
    return run


def sparse() -> Run:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.EmbeddingBag(50, 6, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words((x * 100).long() % 50)

    run = Run(Words())
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for x, y in batches(run.rank):
        run.backward(x, y)
        run.step()
    return run


CASES: dict[str, Callable[[], Run]] = {
    each.__name__: each
    for each in (
        clipping, accumulating, uneven, unused, overflowing, static, own_hook, doubles, two_models,
        sparse, group_first,
    )
}  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    torch.set_num_threads(1)
    run = CASES[sys.argv[1]]()
    found = hashlib.sha256(repr(run.losses).encode())
    for value in run.model.state_dict().values():
        found.update(value.detach().contiguous().numpy().tobytes())
    print("ended at", found.hexdigest(), flush=True)  # noqa: T201
    del run  # A group that a model's end destroys can dead-lock with its own threads (torch 2.13).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
