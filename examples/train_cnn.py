"""Train a small convolutional network on scikit-learn's digits with PyTorch and two workers.

    python examples/train_cnn.py                           # starts a cluster of its own
    python examples/train_cnn.py --url nats://host:4222    # submits itself to a running one
    slackwater submit --id cnn --workers 2 --servers 1 -- python examples/train_cnn.py
    python examples/train_cnn.py --plain                   # the same script without Slackwater

`train` is an ordinary training script; three of its lines are Slackwater's. What follows it only
starts the script as a job where nobody else has.
"""

import argparse
import asyncio
import os
import sys
from contextlib import AsyncExitStack

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import slackwater.torch  # 1: the binding
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec

GLOBAL_BATCH = 60
TRAINED_ON = 1500
POLL_S = 0.2
SPILLED_BYTES_MAX = 1 << 30
SCRIPT = os.path.realpath(__file__)
OPTIMIZERS = {
    "sgd": lambda parameters, scale: torch.optim.SGD(parameters, lr=0.1 * scale, momentum=0.9),
    "nesterov": lambda parameters, scale: torch.optim.SGD(
        parameters, lr=0.1 * scale, momentum=0.9, nesterov=True, weight_decay=1e-4
    ),
    "adam": lambda parameters, scale: torch.optim.Adam(parameters, lr=0.005 * scale),
    "adamw": lambda parameters, scale: torch.optim.AdamW(parameters, lr=0.005 * scale),
    "adagrad": lambda parameters, scale: torch.optim.Adagrad(parameters, lr=0.03 * scale),
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def datasets() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    return (
        TensorDataset(images[:TRAINED_ON], labels[:TRAINED_ON]),
        TensorDataset(images[TRAINED_ON:], labels[TRAINED_ON:]),
    )


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    training, test = datasets()
    if options.spill is not None:  # Each epoch reads back what was prepared once.
        training = slackwater.torch.Prepared(
            training, memory_bytes=options.spill, disk_bytes=SPILLED_BYTES_MAX
        )
    model = network()
    workers = slackwater.torch.size()
    # Where each push is an update of its own there are `workers` times as many, so each is smaller.
    scale = 1.0 if options.consistency == "synchronous" else 1.0 / workers
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), scale)
    if not options.plain:
        optimizer = slackwater.torch.Optimizer(optimizer, model)  # 2: steps are the aggregators'
    sampler = DistributedSampler(training, workers, slackwater.torch.rank())  # 3: a share each
    loader = DataLoader(training, batch_size=GLOBAL_BATCH // workers, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    done = 0 if options.plain else optimizer.iteration  # Above 0: this rank was started again.
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if done > 0:
                done -= 1
                continue
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        images, labels = test.tensors
        accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    print(f"accuracy {accuracy:.1%} after {options.epochs} epochs")
    if options.spill is not None:
        print("samples prepared {missing}, read back {found}".format_map(training.figures()))
    if not options.plain:
        optimizer.close(result={"accuracy": round(accuracy, 4), "steps": optimizer.iteration})
    if options.save and slackwater.torch.rank() == 0:
        torch.save(model.state_dict(), options.save)


async def run_as_job(options: argparse.Namespace) -> int:
    """Submit this script, with its own arguments, and wait for its end."""
    spec = JobSpec(
        id=f"cnn-{options.optimizer}-{os.getpid()}",
        model="digits-cnn",
        workers=options.workers,
        consistency=options.consistency,
        staleness=options.staleness,
        program=("python", SCRIPT, *sys.argv[1:]),
    )
    async with AsyncExitStack() as stack:
        url = options.url
        if url is None:
            cluster = EmbeddedCluster(ClusterOptions(controllers=1, aggregators=4))
            await stack.enter_async_context(cluster)
            url = cluster.url
        client = await stack.enter_async_context(connect(url, "train-cnn"))
        await client.submit(spec)
        record = await client.job(spec.id)
        while record.state not in TERMINAL_STATES:
            await client.clock.sleep_until(client.clock.now_s() + POLL_S)
            record = await client.job(spec.id)
    for rank, result in sorted(record.results.items()):
        print(f"rank {rank}: {result}")
    print(f"job {spec.id}, {spec.workers} workers, {spec.consistency}: {record.state}")
    if record.reason:
        print(record.reason)
    return 0 if record.state == "completed" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", help="rank 0 leaves the parameters in this file")
    parser.add_argument("--plain", action="store_true", help="one process, no Slackwater")
    parser.add_argument(
        "--spill",
        type=int,
        metavar="BYTES",
        help="keep prepared samples in so much memory, and further ones on disk",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--consistency", default="synchronous")
    parser.add_argument("--staleness", type=int, default=0, help="bound of stale-synchronous")
    parser.add_argument("--url", help="of a running cluster's bus; default: a cluster of its own")
    options = parser.parse_args()
    try:
        if options.plain or "SLACKWATER_JOB" in os.environ:
            train(options)
            return 0
        return asyncio.run(run_as_job(options))
    except SlackwaterError as error:
        sys.stderr.write(f"train_cnn: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
