"""A training loop with Hugging Face Accelerate. It knows nothing of Slackwater, and prints a digest
of its losses and weights."""

import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(accelerator: Accelerator) -> str:
    layers = nn.Sequential(
        nn.Linear(64, 200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(200, 200), nn.Linear(200, 10)
    )
    rows = TensorDataset(torch.randn(384, 64), torch.randint(0, 10, (384,)))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    model, optimizer, batches, schedule = accelerator.prepare(
        layers, optimizer, DataLoader(rows, batch_size=16, shuffle=True), schedule
    )
    losses = []
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss).mean().item())
    found = hashlib.sha256(repr(losses).encode())
    for value in accelerator.unwrap_model(model).state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    set_seed(7)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    print("ended at", train(accelerator), flush=True)  # noqa: T201
    accelerator.free_memory()  # A model that is freed after its group can dead-lock (torch 2.13).
    accelerator.end_training()


if __name__ == "__main__":
    main()
