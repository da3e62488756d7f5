"""A small language model, trained from scratch by the Trainer of transformers. It knows nothing of
Slackwater, and prints a digest of its losses and weights."""

import hashlib
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main() -> None:
    torch.set_num_threads(1)
    set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=120, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
            eos_token_id=0,
        )
    )  # fmt: skip
    texts = [torch.randint(1, 120, (16,)) for _ in range(128)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder, use_cpu=True, max_steps=10, per_device_train_batch_size=4,
                gradient_accumulation_steps=2, learning_rate=0.01, logging_steps=1,
                save_strategy="no", report_to="none", disable_tqdm=True, seed=7,
            ),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        )  # fmt: skip
        trainer.train()
    losses = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history[:-1]]
    found = hashlib.sha256(repr(losses).encode())
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    print("ended at", found.hexdigest(), flush=True)  # noqa: T201
    time.sleep(0.05)  # Gloo's threads can abort a program that ends at once (torch 2.13).


if __name__ == "__main__":
    main()
