"""A plain training script, as a user of `slackwater.torch.checkpoint` has one.

python checkpoint_program.py RESULT EPOCHS INTERVAL_S PAUSE_S    with RANK, WORLD_SIZE: of a DDP job
"""

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import slackwater.torch

result, epochs, interval_s, pause_s = (
    Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]),
)  # fmt: skip
torch.set_num_threads(1)
torch.manual_seed(1)
random.seed(2)
np.random.seed(3)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
model = torch.nn.Sequential(
    torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
generator = torch.Generator().manual_seed(4)
data = TensorDataset(
    torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator)
)
trained: torch.nn.Module = model
if ranks > 1:
    dist.init_process_group("gloo")
    trained = DistributedDataParallel(model)
    torch.manual_seed(100 + dist.get_rank())
sampler = DistributedSampler(data) if ranks > 1 else None
loader = DataLoader(data, batch_size=8, shuffle=sampler is None, sampler=sampler)
state = slackwater.torch.checkpoint(
    model=model, optimizer=optimizer, scheduler=scheduler, interval_s=interval_s
)
for epoch in state.epochs(epochs):
    for inputs, targets in state.batches(loader):
        optimizer.zero_grad()
        noise = random.random() + np.random.random()
        torch.nn.functional.mse_loss(trained(inputs) + noise, targets).backward()
        optimizer.step()
        sys.stdout.write(f"iteration {state.iteration} epoch {epoch}\n")
        sys.stdout.flush()
        time.sleep(pause_s)
    scheduler.step()
digits = [value.double().sum().item().hex() for value in model.state_dict().values()]
drawn = [random.random(), float(np.random.random()), torch.rand(1).item()]
result.write_text(f"{state.iteration} {scheduler.get_last_lr()} {digits} {drawn}\n")
