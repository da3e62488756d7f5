"""A training script on one GPU: `python cuda_program.py ddp|wrapper|device|gradients|elastic`. It
prints a digest of its weights. The first way knows nothing of Slackwater."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 30


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, clip: bool) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(64, 256, generator=generator).cuda()
        y = torch.randint(0, 10, (64,), generator=generator).cuda()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train_virtual_ranks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    import slackwater.torch

    elastic = slackwater.torch.Elastic(optimizer, model, virtual_ranks=4, seed=1)
    generator = torch.Generator().manual_seed(3)
    examples = torch.randn(500, 256, generator=generator).cuda()
    labels = torch.randint(0, 10, (500,), generator=generator).cuda()
    for _ in elastic.iterations(STEPS):
        for _ in elastic.ranks():
            some = elastic.indices(len(examples), 16)
            nn.functional.cross_entropy(model(examples[some]), labels[some]).backward()
        elastic.step()
    elastic.close()


def train_wrapped(model: nn.Module, way: str) -> None:
    import slackwater.torch

    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"aggregate": "gradients"} if way == "gradients" else {}
    device = "cuda" if way == "device" else ""
    optimizer = slackwater.torch.Optimizer(plain, model, device=device, **options)
    train(model, optimizer, slackwater.torch.rank(), clip=way == "gradients")
    optimizer.close()


def main(way: str) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    layers = nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 10)
    model: nn.Module = nn.Sequential(*layers).cuda()
    if way == "ddp":
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        dist.init_process_group("gloo")
        train(DistributedDataParallel(model), plain, dist.get_rank(), clip=True)
        dist.destroy_process_group()
    elif way == "elastic":
        train_virtual_ranks(model, torch.optim.Adam(model.parameters(), lr=0.005))
    else:
        train_wrapped(model, way)
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    sys.stdout.write(f"ended at {hashlib.sha256(weights).hexdigest()[:16]}\n")


if __name__ == "__main__":
    main(sys.argv[1])
