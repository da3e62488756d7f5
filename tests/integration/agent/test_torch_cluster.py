"""The PyTorch binding with the real Agent, over each transport: two workers end where one plain
process does, whatever moves meanwhile; and a script's end is what its job is told."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `torch`: make setup-torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from slackwater.torch import Optimizer  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

STEPS = 30


def network() -> Any:
    made = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.4)
    return model


def batch(step: int) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=made), torch.randint(0, 3, (8,), generator=made)


def sgd(model: Any) -> Any:
    """The stand-in for aggregators knows no other rule."""
    return torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.01)


def train(model: Any, optimizer: Any, share: slice, each: Callable[[int], None]) -> None:
    for step in range(STEPS):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[share]), labels[share]).backward()
        optimizer.step()
        each(step)


def test_two_workers_are_as_one_process_wherever_the_tensors_are(cluster: Any) -> None:
    """Buckets move twice and an aggregator restarts while both train. Memory that is not the
    bucket's any more is spoiled there: a stale view would show."""
    plain = network()
    train(plain, sgd(plain), slice(0, 8), lambda step: None)
    models: dict[int, Any] = {}
    errors: list[BaseException] = []

    def worker(rank: int) -> None:
        try:
            models[rank] = model = network()
            if rank == 1:  # Rank 0's parameters are the job's.
                for parameter in model.parameters():
                    parameter.data.zero_()
            optimizer = Optimizer(
                sgd(model), model,
                job="t", rank=rank, workers=2, url=cluster.url, deadline_s=30.0,
            )  # fmt: skip

            def disturb(step: int) -> None:
                if rank == 0 and step in (8, 16):
                    cluster.do(cluster.move_after_next("a2" if step == 8 else "a1"))
                if rank == 1 and step == 22:
                    cluster.do(cluster.restart("a1"))

            train(model, optimizer, slice(rank * 4, rank * 4 + 4), disturb)
            optimizer.close(result={"rank": rank})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not errors, errors
    for model in models.values():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert float((ours - theirs).detach().abs().max()) < 1e-5
    assert len(cluster.finished) == 2


SCRIPT = """
import torch
import slackwater.torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = slackwater.torch.Optimizer(optimizer, model, deadline_s=20.0)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
{end}
"""


ONE_TRANSPORT = pytest.mark.parametrize("cluster", ["shm"], indirect=True)
"""How a script ends has nothing to do with how bytes move."""


def run_script(url: str, end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)],
        env={**os.environ, "SLACKWATER_URL": url, "SLACKWATER_JOB": "s"},
        capture_output=True,
        text=True,
        timeout=90,
    )


@ONE_TRANSPORT
def test_a_script_that_just_ends_is_done_and_its_last_step_is_in(cluster: Any) -> None:
    done = run_script(cluster.url, "")
    assert done.returncode == 0, done.stderr
    assert len(cluster.finished) == 1
    assert {iteration for _, iteration in cluster.applied} == {1, 2, 3}


@ONE_TRANSPORT
def test_a_script_that_fails_is_not_taken_for_finished(cluster: Any) -> None:
    done = run_script(cluster.url, "raise ValueError('lost')")
    assert done.returncode == 1
    assert "ValueError: lost" in done.stderr
    assert not cluster.finished


@ONE_TRANSPORT
def test_a_script_whose_last_step_is_refused_fails(cluster: Any) -> None:
    """The exit code says so, although nothing after the step looked."""
    end = "(model(torch.ones(2, 4)).sum() * float('nan')).backward()\noptimizer.step()"
    done = run_script(cluster.url, "optimizer.zero_grad()\n" + end)
    assert done.returncode == 1, done.stderr
    assert "gradient" in done.stderr, done.stderr
    assert not cluster.finished
