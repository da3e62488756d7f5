"""A script whose optimiser aggregators have no rule for: it clips, scales its loss and accumulates.

Its arguments: the steps, and the one before which rank 1's first process kills itself (0: none),
with the folder of its checkpoints.
"""

import hashlib
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import slackwater.torch

STEPS, KILLED_AT = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
rank, size = slackwater.torch.rank(), slackwater.torch.size()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adamax(model.parameters(), lr=5e-3)
saved = None
if os.environ.get("SLACKWATER_JOB"):
    optimizer = slackwater.torch.Optimizer(optimizer, model, aggregate="gradients")
    if KILLED_AT:
        torch.distributed.init_process_group("gloo")
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=5)
if KILLED_AT and os.environ.get("SLACKWATER_JOB"):
    killed = Path(sys.argv[3], "killed")
    saved = slackwater.torch.checkpoint(
        folder=sys.argv[3], model=model, optimizer=optimizer, scaler=scaler, interval_s=1000.0
    )
made = torch.Generator().manual_seed(1)
inputs = torch.randn(512, 20, generator=made)
labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
for step in range(STEPS) if saved is None else saved.steps(STEPS):
    if step == KILLED_AT - 3 and saved is not None:
        saved.save()
    if saved is not None and step == KILLED_AT and rank == 1 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    for half in range(2):
        first = (step * 64 + half * 32) % 512
        mine = slice(first + rank, first + 32, size)
        with optimizer.no_sync() if not half and hasattr(optimizer, "no_sync") else nullcontext():
            loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
            scaler.scale(8 * loss).backward()  # The first ones overflow.
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 8.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
whole = nn.functional.cross_entropy(model(inputs), labels).item()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
sys.stdout.write(f"loss {whole:.6f} ended at {digest.hexdigest()}\n")
