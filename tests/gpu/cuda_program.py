"""A training script on one GPU, in three ways: `python cuda_program.py ddp|wrapper|device`. It
prints a digest of its weights. The first knows nothing of Slackwater."""

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


def main(way: str) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model: nn.Module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if way == "ddp":
        dist.init_process_group("gloo")
        train(DistributedDataParallel(model), plain, dist.get_rank(), clip=True)
        dist.destroy_process_group()
    else:
        import slackwater.torch

        device = "cuda" if way == "device" else ""
        optimizer = slackwater.torch.Optimizer(plain, model, device=device)
        train(model, optimizer, slackwater.torch.rank(), clip=False)
        optimizer.close()
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    sys.stdout.write(f"ended at {hashlib.sha256(weights).hexdigest()[:16]}\n")


if __name__ == "__main__":
    main(sys.argv[1])
