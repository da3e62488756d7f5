"""A program of virtual ranks: dropout, draws of numpy, a few hundred iterations.

python elastic_program.py FOLDER RULE ITERATIONS
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import slackwater.torch

folder, rule, iterations = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.manual_seed(3)
model = nn.Sequential(
    nn.Linear(64, 200), nn.LayerNorm(200), nn.ReLU(), nn.Dropout(0.3), nn.Linear(200, 300),
    nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, 10),
)  # fmt: skip
made = {
    "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda: torch.optim.Adam(model.parameters(), lr=0.002),
}
elastic = slackwater.torch.Elastic(
    made[rule](), model, virtual_ranks=4, seed=11, folder=folder,
    transport="tcp" if os.environ.get("ONLY_TCP") else None,
)  # fmt: skip
generator = torch.Generator().manual_seed(5)
images = torch.randn(500, 64, generator=generator)
labels = torch.randint(0, 10, (500,), generator=generator)
scheduler = torch.optim.lr_scheduler.StepLR(elastic, 50, 0.5)
for iteration in elastic.iterations(iterations, scheduler):
    for _ in elastic.ranks():
        some = elastic.indices(len(images), 8)
        noise = torch.from_numpy(np.random.randn(8, 64).astype(np.float32))
        nn.functional.cross_entropy(model(images[some] + 0.1 * noise), labels[some]).backward()
    elastic.step()
    if elastic.agent.rank == 0:
        (folder / "reached").write_text(str(iteration + 1))
    if (folder / "slowly").exists():
        time.sleep(0.15)  # Others change the job meanwhile.
elastic.close({"digest": elastic.digest()})
