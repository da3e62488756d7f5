"""Train scikit-learn's digits so that the result does not depend on how many workers there are.

    slackwater submit --id elastic --workers 2 --workers-min 1 --workers-max 4 --restarts 3 \
        -- python examples/train_elastic.py
    slackwater scale elastic --workers 4
    slackwater job elastic --journal
    slackwater replay elastic           # the same in one process: to the same bits
    python examples/train_elastic.py    # alone: the same digest

Whatever happens to the job, it prints the same digest at its end.
"""

import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import slackwater.torch

VIRTUAL_RANKS = 4
BATCH = 16
TRAINED_ON = 1500
EPOCHS = 8
SECONDS = float(os.environ.get("ITERATION_S", "0"))
"""Seconds that an iteration takes at least, for those who want to watch."""


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16.0
    labels = torch.tensor(digits.target)
    torch.manual_seed(1)  # The first parameters are rank 0's.
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    elastic = slackwater.torch.Elastic(optimizer, model, virtual_ranks=VIRTUAL_RANKS, seed=1)
    for _ in elastic.iterations(EPOCHS * TRAINED_ON // (VIRTUAL_RANKS * BATCH)):
        for _ in elastic.ranks():
            some = elastic.indices(TRAINED_ON, BATCH)
            functional.cross_entropy(model(images[some]), labels[some]).backward()
        elastic.step()
        time.sleep(SECONDS)
    digest = elastic.digest()
    model.eval()
    with torch.no_grad():
        right = model(images[TRAINED_ON:]).argmax(1) == labels[TRAINED_ON:]
    accuracy = right.float().mean().item()
    if slackwater.torch.rank() == 0:
        print(f"accuracy {accuracy:.3f}, digest {digest}")
    elastic.close({"accuracy": accuracy, "digest": digest})


if __name__ == "__main__":
    main()
