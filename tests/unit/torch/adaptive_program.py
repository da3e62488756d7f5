"""A training script that adapts its batch, as a user has one.

python adaptive_program.py WAY RESULT    WAY: alone, ddp, wrapper; torchrun's variables say the rest

It trains until its batch has grown and it has GPUS_WANTED ranks, and two statistical epochs more.
Each rank leaves a JSON file with its decisions by iteration, and digests of its weights and
examples.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import slackwater.torch

way, result = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(1)
inner = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model: torch.nn.Module = inner
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
if way == "ddp" and dist.is_initialized():
    model = DistributedDataParallel(model)
if way == "wrapper":
    optimizer = slackwater.torch.Optimizer(optimizer, model, noise=True)
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
generator = torch.Generator().manual_seed(2)
inputs = torch.randn(2048, 32, generator=generator)
targets = inputs[:, :1] + torch.randn(2048, 1, generator=generator)
state = Path(os.environ["CHECKPOINT"]) if "CHECKPOINT" in os.environ else None
adaptive = slackwater.torch.Adaptive(
    model, optimizer, TensorDataset(torch.arange(2048), inputs, targets),
    batch=16, max_batch=512, fit_s=2.0, report_s=1.0, record=f"{result}.jsonl",
)  # fmt: skip
kept = None
if state is not None and way != "wrapper":
    kept = slackwater.torch.checkpoint(
        folder=state, model=inner, optimizer=optimizer, adaptive=adaptive, interval_s=1.0
    )
began, seen, decisions, last = adaptive.iteration, hashlib.sha256(), {}, None
until_s = time.monotonic() + 100.0
for epoch in adaptive.epochs(1_000_000):
    for numbers, xs, ys in adaptive.batches():
        seen.update(numbers.numpy().tobytes())
        adaptive.backward(torch.nn.functional.mse_loss(model(xs), ys))
        if adaptive.step() and kept is not None:
            kept.step()
        decisions[adaptive.iteration] = [adaptive.batch, adaptive.decision.rate]
    enough = adaptive.batch > 16 and ranks >= int(os.environ.get("GPUS_WANTED", "1"))
    if last is None and (enough or time.monotonic() > until_s):
        last = epoch + 2
    agreed = torch.tensor(last or 0)
    if dist.is_initialized():
        dist.broadcast(agreed, 0)
    if 0 < int(agreed) <= epoch:
        break
adaptive.close()
if kept is not None:
    kept.close()
if way == "wrapper":
    optimizer.close()
if dist.is_initialized():
    dist.barrier()  # A rank that is still told the end aborts if the other's sockets close on it.
    dist.destroy_process_group()
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in inner.parameters()))
Path(f"{result}.{rank}").write_text(
    json.dumps(
        {
            "began": began, "decisions": decisions, "weights": weights.hexdigest(),
            "examples": seen.hexdigest(), "noise": adaptive.noise_scale, "folded": adaptive._folded,
            "rate": optimizer.param_groups[0]["lr"],
        }
    )
)  # fmt: skip
