"""A worker of DiLoCo. Its arguments: exchanges, the rank and the step at which its first process
kills itself (-1: none), seconds that rank 1 takes for a step, and a folder."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch
from torch import nn

import slackwater.torch
from slackwater.schemas.tensors import DType

EXCHANGES, KILLED, AT = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
LAG_S, FOLDER = float(sys.argv[4]), Path(sys.argv[5])
EVERY = 4
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
optimizer = slackwater.torch.DiLoCo(
    model, inner, outer, sync_every=EVERY, fragments=2, total_momentum=True,
    gradient_dtype=msgspec.convert(os.environ["DTYPE"], DType),
)  # fmt: skip
rank = optimizer.agent.rank
weights = torch.randn(20, 4, generator=torch.Generator().manual_seed(9))
killed = FOLDER / "killed"
while optimizer.steps < EXCHANGES * EVERY:
    step = optimizer.steps
    if rank == KILLED and step >= AT and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    drawn = torch.Generator().manual_seed(10_000 * rank + step)
    inputs = torch.randn(64, 20, generator=drawn)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs @ weights).backward()
    optimizer.step()
    (FOLDER / f"steps-{rank}").write_text(str(optimizer.steps))
    time.sleep(LAG_S if rank == 1 else 0.01)
ended_s = time.monotonic()  # All processes of a machine read one clock.
optimizer.synchronize()
inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(7))
loss = nn.functional.mse_loss(model(inputs), inputs @ weights).item()
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()
told = {"loss": loss, "ended_s": ended_s, "digest": hashlib.sha256(flat).hexdigest()}
(FOLDER / f"result-{rank}.json").write_text(json.dumps(told))
optimizer.close()
