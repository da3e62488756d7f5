"""Train a small network on scikit-learn's digits, through Slackwater and without, and compare.

    python examples/train_digits.py                        # starts a cluster of its own
    python examples/train_digits.py --url nats://host:4222 # uses a running one

For each update rule two worker processes train one model: each computes the gradient of its half of
every batch, `agent.step` pushes it and gives back the parameters after the mean of both was
applied. The same batches then train the same model in one plain process. Both must end at the same
parameters, up to the rounding of float32 sums.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from slackwater import Agent
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.schemas.tensors import UpdateRule

BATCH = 128
HIDDEN = 32
WORKERS = 2
RULES = {
    "sgd": UpdateRule(name="sgd", learning_rate=0.5),
    "momentum": UpdateRule(name="momentum", learning_rate=0.05, momentum=0.9),
    "adam": UpdateRule(name="adam", learning_rate=0.005),
}
LARGEST_DIFFERENCE = 1e-5

Tensors = dict[str, np.ndarray]


def data() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 64 pixels, and their digits as one-hot rows."""
    digits = load_digits()
    return (digits.data / 16.0).astype(np.float32), np.eye(10, dtype=np.float32)[digits.target]


def initial_parameters() -> Tensors:
    rng = np.random.default_rng(1)
    return {
        "hidden.weight": rng.normal(0.0, 0.125, (64, HIDDEN)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "output.weight": rng.normal(0.0, 0.18, (HIDDEN, 10)).astype(np.float32),
        "output.bias": np.zeros(10, np.float32),
    }


def batches(steps: int) -> list[np.ndarray]:
    """Return the images of each step: the same in every process."""
    rng = np.random.default_rng(2)
    return [rng.choice(1797, BATCH, replace=False) for _ in range(steps)]


def probabilities(p: Tensors, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The forward pass: hidden activations and softmax."""
    hidden = np.tanh(images @ p["hidden.weight"] + p["hidden.bias"])
    logits = hidden @ p["output.weight"] + p["output.bias"]
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def gradients(p: Tensors, images: np.ndarray, labels: np.ndarray) -> Tensors:
    """The backward pass: the gradient of the mean cross-entropy of these images."""
    hidden, softmax = probabilities(p, images)
    at_logits = (softmax - labels) / np.float32(len(images))
    at_hidden = (at_logits @ p["output.weight"].T) * (1.0 - hidden**2)
    return {
        "hidden.weight": images.T @ at_hidden,
        "hidden.bias": at_hidden.sum(axis=0),
        "output.weight": hidden.T @ at_logits,
        "output.bias": at_logits.sum(axis=0),
    }


def train_with_agent(rule: UpdateRule, steps: int) -> Tensors:
    """One worker: its share of every batch. Who and how many it is, the environment says."""
    images, labels = data()
    with Agent(tensors=initial_parameters(), servers=1, update=rule, model="digits") as agent:
        parameters = agent.parameters()
        for chosen in batches(steps)[agent.iteration :]:  # A rank that is started again goes on.
            mine = np.array_split(chosen, agent.workers)[agent.rank]
            parameters = agent.step(gradients(parameters, images[mine], labels[mine]))
        return {name: value.copy() for name, value in parameters.items()}


def train_alone(rule: UpdateRule, steps: int) -> Tensors:
    """The textbook, in one process."""
    images, labels = data()
    p = initial_parameters()
    m = {name: np.zeros_like(value) for name, value in p.items()}
    v = {name: np.zeros_like(value) for name, value in p.items()}
    rate = np.float32(rule.learning_rate)
    for step, chosen in enumerate(batches(steps), start=1):
        for name, g in gradients(p, images[chosen], labels[chosen]).items():
            if rule.name == "sgd":
                p[name] -= rate * g
            elif rule.name == "momentum":
                m[name] = np.float32(rule.momentum) * m[name] + g
                p[name] -= rate * m[name]
            else:
                b1, b2 = np.float32(rule.beta1), np.float32(rule.beta2)
                m[name] = b1 * m[name] + (1 - b1) * g
                v[name] = b2 * v[name] + (1 - b2) * g * g
                corrected = v[name] / np.float32(1 - rule.beta2**step)
                mean = m[name] / np.float32(1 - rule.beta1**step)
                p[name] -= rate * mean / (np.sqrt(corrected) + np.float32(rule.epsilon))
    return p


def accuracy(p: Tensors) -> float:
    images, labels = data()
    _, softmax = probabilities(p, images)
    return float((softmax.argmax(axis=1) == labels.argmax(axis=1)).mean())


async def train_in_processes(url: str, rule: str, steps: int, folder: Path) -> Tensors:
    """Two worker processes of this very file; rank 0 leaves the parameters in a file."""
    saved = folder / f"{rule}.npz"
    command = [sys.executable, __file__, "--worker", rule, "--steps", str(steps)]
    processes = [
        await asyncio.create_subprocess_exec(
            *command,
            env={
                **os.environ,
                "SLACKWATER_URL": url,
                "SLACKWATER_JOB": f"digits-{rule}-{os.getpid()}",
                "SLACKWATER_RANK": str(rank),
                "SLACKWATER_WORKERS": str(WORKERS),
                "DIGITS_SAVE": str(saved),
            },
        )
        for rank in range(WORKERS)
    ]
    codes = [await process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"train_digits: {rule}: the workers ended with {codes}")
    with np.load(saved) as archive:
        return {name: archive[name] for name in archive.files}


async def compare(url: str | None, steps: int) -> int:
    """The number of rules whose parameters differ by too much."""
    failed = 0
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if url is None:
            options = ClusterOptions(controllers=1, aggregators=4)
            url = (await stack.enter_async_context(EmbeddedCluster(options))).url
        print(f"{'rule':10s} {'largest difference':>20s} {'accuracy':>10s}   after {steps} steps")
        for name, rule in RULES.items():
            shared = await train_in_processes(url, name, steps, folder)
            alone = train_alone(rule, steps)
            largest = max(float(np.abs(shared[k] - alone[k]).max()) for k in alone)
            failed += not largest <= LARGEST_DIFFERENCE
            print(f"{name:10s} {largest:20.2e} {accuracy(shared):10.1%}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", help="of a running cluster's bus; default: a cluster of its own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--worker", choices=sorted(RULES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.worker is None:
            return 1 if asyncio.run(compare(options.url, options.steps)) else 0
        parameters = train_with_agent(RULES[options.worker], options.steps)
    except SlackwaterError as error:
        sys.stderr.write(f"train_digits: {error}\n")
        return 1
    if os.environ["SLACKWATER_RANK"] == "0":
        np.savez(os.environ["DIGITS_SAVE"], **parameters)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
