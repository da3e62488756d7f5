"""DiLoCo against its published algorithms, written out in plain PyTorch, step by step."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.unit.torch.test_torch_gradients import together
from torch import nn

from slackwater.common.base.errors import GradientRefused, Rejected
from slackwater.common.domains.slots.packed import pack, unpack
from slackwater.schemas.tensors import DType
from slackwater.torch import DiLoCo
from slackwater.torch.diloco import _divided, _parts

torch.set_num_threads(1)
EVERY, STEPS, WORKERS = 4, 16, 2
Batch = tuple[torch.Tensor, torch.Tensor]


def fresh() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
        nn.Linear(8, 2),
    )  # fmt: skip


def batch(step: int, rank: int) -> Batch:
    drawn = torch.Generator().manual_seed(1000 * rank + step)  # Threads share the other one.
    inputs = torch.randn(5, 6, generator=drawn)
    return inputs, inputs[:, :2].sin() + 0.1 * rank


def inner_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def outer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def trained_once(model: nn.Module, inner: Any, data: Batch) -> None:
    inner.zero_grad()
    nn.functional.mse_loss(model(data[0]), data[1]).backward()
    inner.step()


class Published:
    """Streaming DiLoCo, algorithm 2; with one fragment, no delay and mix 1 it is DiLoCo's
    algorithm 1. All workers' models, and the outer optimiser, in one process."""

    def __init__(self, fragments: int, delay: int, mix: float, dtype: DType) -> None:
        self.models = [fresh() for _ in range(WORKERS)]
        self.inners = [inner_of(model) for model in self.models]
        self.outer_model = fresh()
        self.outer = outer_of(self.outer_model.parameters())
        divided = _divided(self.outer_model, _parts(self.outer_model, self.outer), fragments)
        self.fragments = [[part.name for part in fragment] for fragment in divided]
        self.delay, self.mix, self.dtype = delay, mix, dtype
        self.sent: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.seen: list[list[torch.Tensor]] = []

    def parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return dict(model.named_parameters())

    def run(self, steps: int) -> None:
        span = EVERY // len(self.fragments)
        for step in range(1, steps + 1):
            for rank, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
                trained_once(model, inner, batch(step, rank))
            with torch.no_grad():
                if self.delay and step > self.delay and (step - self.delay) % span == 0:
                    self.receive(((step - self.delay) // span - 1) % len(self.fragments))
                if step % span == 0:
                    index = (step // span - 1) % len(self.fragments)
                    self.send(index)
                    if not self.delay:
                        self.receive(index)
            self.seen.append([p.detach().clone() for p in self.models[0].parameters()])

    def send(self, index: int) -> None:
        outer = self.parameters(self.outer_model)
        names = self.fragments[index]
        self.sent[index] = [
            dict(zip(names, self.rounded([outer[n] - own[n] for n in names]), strict=True))
            for own in map(self.parameters, self.models)
        ]

    def rounded(self, changes: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Round a fragment's changes to what they travel as."""
        if self.dtype != "int8":
            return [change.to(getattr(torch, self.dtype)).float() for change in changes]
        flat = torch.cat([change.reshape(-1) for change in changes])
        sizes = [change.numel() for change in changes]
        parts = torch.from_numpy(unpack(pack(flat.numpy()))).split(sizes)
        return [part.reshape(one.shape) for part, one in zip(parts, changes, strict=True)]

    def receive(self, index: int) -> None:
        outer = self.parameters(self.outer_model)
        self.outer.zero_grad()
        for name in self.fragments[index]:
            changes = [sent[name] for sent in self.sent[index]]
            outer[name].grad = torch.stack(changes).mean(0)
        self.outer.step()  # Parameters without a gradient stay as they are.
        for model in self.models:
            own = self.parameters(model)
            for name in self.fragments[index]:
                own[name].lerp_(outer[name], self.mix)


def ours(
    steps: int, seen: list[list[torch.Tensor]] | None = None, **options: Any
) -> list[nn.Module]:
    """Train the workers in threads; `seen` takes rank 0's parameters after each step."""
    models = [fresh() for _ in range(WORKERS)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(1.0)  # Rank 0's are the job's.

    def work(rank: int) -> None:
        model = models[rank]
        optimizer = DiLoCo(
            model, inner_of(model), outer_of(model.parameters()), sync_every=EVERY,
            job="apart", rank=rank, workers=WORKERS, **options,
        )  # fmt: skip
        for step in range(1, steps + 1):
            data = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(data[0]), data[1]).backward()
            optimizer.step()
            if rank == 0 and seen is not None:
                seen.append([p.detach().clone() for p in model.parameters()])
        assert optimizer.steps == steps
        optimizer.close()
        assert optimizer.exchanges == steps // EVERY

    together(work)
    return models


@pytest.mark.parametrize(
    ("fragments", "delay", "mix"), [(1, 0, 1.0), (2, 0, 1.0), (4, 0, 1.0), (2, 1, 1.0), (2, 1, 0.5)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_step_is_the_published_one(
    fragments: int, delay: int, mix: float, dtype: DType
) -> None:
    published = Published(fragments, delay, mix, dtype)
    published.run(STEPS)
    seen: list[list[torch.Tensor]] = []
    models = ours(STEPS, seen, fragments=fragments, delay=delay, mix=mix, gradient_dtype=dtype)
    for step, (mine, theirs) in enumerate(zip(seen, published.seen, strict=True), 1):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=2e-6 if dtype == "float32" else 2e-3), step
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), "the workers end with the job's parameters"


def test_local_sgd_is_an_outer_step_of_rate_1() -> None:
    """Stich 2018: the mean of what the workers have after H steps."""
    models = [fresh() for _ in range(WORKERS)]
    for rank, model in enumerate(models):
        inner = inner_of(model)
        for step in range(1, EVERY + 1):
            trained_once(model, inner, batch(step, rank))
    mean = [
        torch.stack(list(each)).mean(0)
        for each in zip(*(model.parameters() for model in models), strict=True)
    ]
    found: dict[int, list[torch.Tensor]] = {}
    own = [fresh() for _ in range(WORKERS)]

    def work(rank: int) -> None:
        model = own[rank]
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DiLoCo(
            model, inner_of(model), outer, sync_every=EVERY, gradient_dtype="float32",
            job="local-sgd", rank=rank, workers=WORKERS,
        )  # fmt: skip
        for step in range(1, EVERY + 1):
            data = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(data[0]), data[1]).backward()
            optimizer.step()
        found[rank] = [p.detach().clone() for p in model.parameters()]
        optimizer.close()

    together(work)
    for rank in range(WORKERS):
        for a, b in zip(found[rank], mean, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-6)


def alone(**options: Any) -> DiLoCo:
    """Make one without a job."""
    model = options.pop("model", None) or fresh()
    outer = options.pop("outer", None) or outer_of(model.parameters())
    return DiLoCo(model, inner_of(model), outer, **{"sync_every": EVERY, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 5, "fragments": 2}, "that the number of fragments divides"),
        ({"fragments": 9}, "the model has 8 tensors"),
        ({"delay": 4}, "delay=4: give 0 to 3"),
        ({"fragments": 4, "delay": 1}, "delay=1: give 0 to 0"),
        ({"mix": 0.0}, "mix=0.0"),
        ({"outer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)}, "not among the outer"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Rejected, match=says):
        alone(**options)


def test_fragments_may_be_modules() -> None:
    model = fresh()
    halves = [model[:3], model[3:]]
    divided = _divided(model, _parts(model, outer_of(model.parameters())), halves)
    assert [[part.name for part in each] for each in divided] == [
        ["0.weight", "0.bias", "2.weight", "2.bias"], ["4.weight", "4.bias", "6.weight", "6.bias"],
    ]  # fmt: skip
    with pytest.raises(Rejected, match=r"no fragment has 4\.weight"):
        _divided(model, _parts(model, outer_of(model.parameters())), halves[:1])
    with pytest.raises(Rejected, match="fragment 1 has no trainable parameter"):
        _divided(model, _parts(model, outer_of(model.parameters())), [model, model[:1]])


@pytest.mark.parametrize("count", range(1, 9))
def test_even_fragments_hold_each_tensor_once(count: int) -> None:
    model = fresh()
    divided = _divided(model, _parts(model, outer_of(model.parameters())), count)
    assert len(divided) == count
    assert all(divided)
    names = [part.name for fragment in divided for part in fragment]
    assert names == [name for name, _ in model.named_parameters()]


def test_alone_it_trains_by_the_same_rules_and_a_broken_change_is_refused() -> None:
    optimizer = alone(gradient_dtype="float32")
    model: Any = optimizer.inner.param_groups[0]["params"]
    before = copy.deepcopy(model)
    for step in range(EVERY):
        for parameter in model:
            parameter.grad = torch.full_like(parameter, float(step))
        optimizer.step()
    assert optimizer.exchanges == 1
    assert not torch.equal(before[0], model[0])
    with torch.no_grad():
        model[0].fill_(float("nan"))
    for _ in range(EVERY - 1):
        optimizer.zero_grad()
        optimizer.step()
    with pytest.raises(GradientRefused):
        optimizer.step()
    with pytest.raises(Rejected, match="cannot be copied"):
        copy.deepcopy(optimizer)


def a_closure(calls: list[int]) -> Callable[[], float]:
    def closure() -> float:
        calls.append(1)
        return 0.5

    return closure


def test_a_step_may_be_given_a_closure_and_ends_with_close() -> None:
    optimizer = alone()
    calls: list[int] = []
    assert optimizer.step(a_closure(calls)) == 0.5
    assert calls == [1]
    assert optimizer.param_groups is optimizer.inner.param_groups
    optimizer.close()
    optimizer.close()
    with pytest.raises(Rejected, match="closed"):
        optimizer.step()


def test_values_that_were_received_early_are_not_received_again() -> None:
    optimizer = alone(delay=2, gradient_dtype="float32")
    parameters: Any = optimizer.inner.param_groups[0]["params"]
    for step in range(EVERY):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float(step + 1))
        optimizer.step()
    optimizer.synchronize()
    synchronized = [p.detach().clone() for p in parameters]
    for _ in range(2):
        optimizer.step()
    assert not torch.equal(parameters[0], synchronized[0]), "what was trained since stays"
