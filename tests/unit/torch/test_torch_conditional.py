"""Layers that some steps leave out: pushed as zeros, whatever shares a bucket with them.

What is compared with is plain PyTorch whose missing gradients are zeros, as DDP's are with
`find_unused_parameters` where another worker reached them: momentum and decay go on.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slackwater.torch import Optimizer

torch.set_num_threads(1)
LAYERS = 4
STEPS = 10
ROUNDING = 1e-5

SMALL, OWN, DEFAULT = 256, 4, 1 << 20
"""Sizes of buckets: a weight, or several biases; each tensor its own; all of the model in one."""
every_layout = pytest.mark.parametrize("local", [SMALL, OWN, DEFAULT], indirect=True)

RULES: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3),
}


class Skipping(nn.Module):
    """Stochastic depth: residual layers of which a step may leave out any, and a head that reads
    what is left. The head has a parameter of its own and a child, so that it waits for both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        self.head = Head()
        made = torch.Generator().manual_seed(3)  # The global one is of all threads.
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.4)

    def forward(self, x: torch.Tensor, left_out: frozenset[int]) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index not in left_out:
                x = x + torch.tanh(layer(x))
        return self.head(x, LAYERS in left_out)  # type: ignore[no-any-return]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.output = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, left_out: bool) -> torch.Tensor:
        x = x * self.scale
        return x if left_out else self.output(x)


def left_out(step: int, rank: int = 0) -> frozenset[int]:
    """Random layers, none of them or (at step 3) as many as there are."""
    draw = random.Random(1000 * rank + step)
    everything = range(LAYERS + 1)
    return frozenset(everything if step == 3 else (i for i in everything if draw.random() < 0.4))


def loss_of(model: nn.Module, step: int, rank: int, out: frozenset[int]) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(8, 6, generator=made)
    labels = torch.randint(0, 6, (8,), generator=made)
    return functional.cross_entropy(model(inputs, out), labels)


def plain(kind: str, workers: int, outs: Callable[[int, int], frozenset[int]]) -> nn.Module:
    """The mean of the workers' gradients, zeros where a worker has none."""
    model = Skipping()
    optimizer = RULES[kind](model.parameters())
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(workers):
            optimizer.zero_grad()
            loss_of(model, step, rank, outs(step, rank)).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                if parameter.grad is not None:
                    total += parameter.grad
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total / workers
        optimizer.step()
    return model


def ours(
    kind: str, rank: int, outs: Callable[[int, int], frozenset[int]], **options: Any
) -> nn.Module:
    model = Skipping()
    optimizer = Optimizer(RULES[kind](model.parameters()), model, rank=rank, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank, outs(step, rank)).backward()
        optimizer.step()
    assert optimizer.iteration == STEPS
    optimizer.close()
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    return max(
        float((a - b).detach().abs().max())
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("wait", ["forward", "step"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", RULES)
@every_layout
def test_a_layer_that_a_step_leaves_out_is_pushed_as_zeros(
    local: Any, kind: str, overlap: bool, wait: Any
) -> None:
    expected = plain(kind, 1, left_out)
    model = ours(kind, 0, left_out, overlap=overlap, wait=wait)
    assert difference(model, expected) < ROUNDING


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
@every_layout
def test_workers_may_leave_out_different_layers(local: Any, kind: str, overlap: bool) -> None:
    """One of them, or each its own."""

    def outs(step: int, rank: int) -> frozenset[int]:
        return frozenset() if rank == 1 and step < STEPS // 2 else left_out(step, rank)

    expected = plain(kind, 2, outs)
    with ThreadPoolExecutor(2) as pool:
        options = {"workers": 2, "overlap": overlap}
        ranks = [pool.submit(ours, kind, rank, outs, **options) for rank in range(2)]
        models = [rank.result(60) for rank in ranks]
    for model in models:
        assert difference(model, expected) < ROUNDING


@pytest.mark.parametrize("consistency", ["asynchronous", "stale-synchronous"])
@every_layout
def test_layers_may_be_left_out_where_nobody_waits_for_all(local: Any, consistency: str) -> None:
    """Alone, such a worker trains as plain PyTorch; with another, each push counts once."""
    how = {"consistency": consistency, "staleness": int(consistency == "stale-synchronous")}
    expected = plain("momentum", 1, left_out)
    assert difference(ours("momentum", 0, left_out, job="alone", **how), expected) < ROUNDING
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(ours, "sgd", rank, left_out, job="both", workers=2, **how)
            for rank in range(2)
        ]
        for rank in ranks:
            rank.result(60)
    for bucket in range(len(local.cluster.jobs["both"].layouts)):
        slots = local.cluster.slots("both", bucket)
        assert slots.applied() == [STEPS, STEPS]
        assert slots.version == 2 * STEPS


@every_layout
def test_a_second_forward_may_need_what_the_first_left_out(local: Any) -> None:
    """A step trains the head's child alone, and then looks at the whole model: the head waits for
    its own parameter, its child's are pushed by then."""
    expected, model = Skipping(), Skipping()
    inner = RULES["sgd"](expected.parameters())
    wrapped = Optimizer(RULES["sgd"](model.parameters()), model)
    for step in range(STEPS):
        losses = []
        for each, optimizer in ((expected, inner), (model, wrapped)):
            optimizer.zero_grad()
            each.head.output(torch.full((8, 6), step / STEPS)).square().mean().backward()
            with torch.no_grad():
                losses.append(float(loss_of(each, step, 0, frozenset())))
            optimizer.step()
        assert losses[0] == pytest.approx(losses[1], abs=ROUNDING)
    wrapped.synchronize()
    assert difference(model, expected) < ROUNDING


def test_what_nobody_reaches_still_moves_by_its_momentum(local: Any) -> None:
    """Plain PyTorch leaves a parameter alone whose gradient is None; here, and wherever zeros are
    summed, it coasts. The guide says so."""
    model, untouched = Skipping(), Skipping()
    optimizer = Optimizer(RULES["momentum"](model.parameters()), model)
    inner = RULES["momentum"](untouched.parameters())
    nothing, first = frozenset[int](), frozenset({0})
    for out in (nothing, first):
        for each, stepper in ((model, optimizer), (untouched, inner)):
            stepper.zero_grad()
            loss_of(each, 1, 0, out).backward()
            stepper.step()
    optimizer.synchronize()
    ours, theirs = model.layers[0].weight, untouched.layers[0].weight
    start = Skipping().layers[0].weight
    assert float((ours - theirs).detach().abs().max()) > 100 * ROUNDING
    moved_once = (theirs - start).detach()  # -lr * g; the second step adds 0.9 of it, and decay.
    assert torch.allclose((ours - start).detach(), 1.9 * moved_once, atol=1e-3)
