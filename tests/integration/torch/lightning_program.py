"""A Lightning script: a model, its data, a Trainer on two devices. It knows nothing of Slackwater,
and prints a digest of its losses and weights."""

import hashlib
import time

import pytorch_lightning as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 200), nn.ReLU(), nn.Dropout(0.1), nn.Linear(200, 200), nn.Linear(200, 10)
        )
        self.losses: list[float] = []

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("validation_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches(seed: int, rows: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=generator)
    y = torch.randint(0, 10, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=seed == 0)


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(7)
    model = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=2, gradient_clip_val=0.5,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, batches(0, 384), batches(1, 64))
    losses = [*model.losses, trainer.callback_metrics["validation_loss"].item()]
    found = hashlib.sha256(repr(losses).encode())
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    print("ended at", found.hexdigest(), flush=True)  # noqa: T201
    time.sleep(0.05)  # Gloo's threads can abort a program that ends at once (torch 2.13).


if __name__ == "__main__":
    main()
