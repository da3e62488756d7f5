"""The wrapper that leaves the optimiser in the program, against plain PyTorch over the same global
batch: one worker here, and two in threads of this process."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.torch.test_torch_optimizer import (
    LOOSE,
    OPTIMIZERS,
    Attending,
    Tied,
    batches,
    difference,
    fresh,
    loss_of,
    sgd,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from slackwater.common.base.errors import Rejected
from slackwater.torch import Optimizer

torch.set_num_threads(1)
BATCHES = 8
Batch = tuple[torch.Tensor, torch.Tensor]
Loop = Callable[[nn.Module, Any, list[Batch]], None]


def wrapped(optimizer: Any, model: nn.Module, **options: Any) -> Any:
    return Optimizer(optimizer, model, aggregate="gradients", **options)


def together(work: Callable[[int], None], workers: int = 2) -> None:
    """Do the work of each rank in a thread; raise the first error."""
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # Handed on below.
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def halves(batch: Batch, rank: int) -> Batch:
    return batch[0][rank::2], batch[1][rank::2]


def both(
    loop: Loop,
    kind: Callable[[Any], Any] = sgd,
    model: Callable[[], nn.Module] = Attending,
    **options: Any,
) -> tuple[nn.Module, list[nn.Module], Any]:
    """Train a plain model on whole batches and two workers' models on halves of them."""
    plain = fresh(model)
    inner = kind(plain.parameters())
    loop(plain, inner, batches(BATCHES))
    models = [fresh(model) for _ in range(2)]
    models[1].load_state_dict({k: v + 1 for k, v in models[1].state_dict().items()})
    kinds = [kind(one.parameters()) for one in models]
    made: dict[int, Any] = {}

    def work(rank: int) -> None:
        optimizer = wrapped(kinds[rank], models[rank], job="two", rank=rank, workers=2, **options)
        made[rank] = optimizer
        loop(models[rank], optimizer, [halves(batch, rank) for batch in batches(BATCHES)])

    together(work)
    return plain, models, made[0]


def simple(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def clipping(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def scaling(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """The first scale overflows; so do two later steps, on one worker's examples alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if number in (3, 5) and 11 in batch[1]:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update(scaler.get_scale() / 2**60 if number == 0 else None)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("loop", [simple, clipping])
def test_two_workers_train_as_plain_pytorch(loop: Loop, overlap: bool) -> None:
    """The norm that clips is that of the mean over all workers."""
    plain, models, optimizer = both(loop, overlap=overlap)
    assert difference(models[0], models[1]) == 0.0
    assert difference(plain, models[0]) < LOOSE
    assert optimizer.iteration == optimizer.agent.iteration == BATCHES


def test_workers_skip_the_same_steps_of_a_grad_scaler() -> None:
    plain, models, _ = both(scaling)
    assert difference(models[0], models[1]) == 0.0
    assert difference(plain, models[0]) < LOOSE


ANY = OPTIMIZERS | {
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3, amsgrad=True),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=1e-3),
    "rprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, centered=True, momentum=0.5),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("kind", ANY)
def test_any_optimiser_steps_as_by_itself(kind: str) -> None:
    """One worker: to the bit. The layer that is never used is left alone, as in plain PyTorch."""
    plain, ours = fresh(Tied), fresh(Tied)
    train(plain, ANY[kind](plain.parameters()))
    train(ours, wrapped(ANY[kind](ours.parameters()), ours))
    assert difference(plain, ours) == 0.0
    assert ours.unused.weight.grad is None  # type: ignore[union-attr]


def accumulating(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """Steps of one, two and three passes."""
    order = list(data)
    for passes in (1, 2, 3, 2):
        optimizer.zero_grad()
        for left in range(passes - 1, -1, -1):
            batch = order.pop(0)
            if left and hasattr(optimizer, "no_sync"):
                with optimizer.no_sync():
                    (loss_of(model, batch) / passes).backward()
            else:
                (loss_of(model, batch) / passes).backward()
        optimizer.step()


def always_exchanging(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for batch in (first, second):
            (loss_of(model, batch) / 2).backward()
        optimizer.step()


def without_the_last_exchange(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """A step exchanges what no pass has."""
    for batch in data:
        optimizer.zero_grad()
        if hasattr(optimizer, "no_sync"):
            with optimizer.no_sync():
                loss_of(model, batch).backward()
        else:
            loss_of(model, batch).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "options", "exchanges"),
    [
        (accumulating, {}, 4),
        (always_exchanging, {}, 8),
        (always_exchanging, {"backward_passes_per_step": 2}, 4),
        (without_the_last_exchange, {}, 8),
    ],
)
def test_gradients_may_be_accumulated(loop: Loop, options: Any, exchanges: int) -> None:
    plain, models, optimizer = both(loop, **options)
    assert difference(models[0], models[1]) == 0.0
    assert difference(plain, models[0]) < LOOSE
    assert optimizer.iteration == exchanges


def test_nothing_is_exchanged_twice() -> None:
    """Regression: `synchronize` after a step exchanged its gradients again, which a worker that
    called it alone would have waited for."""
    ours = fresh(Attending)
    optimizer = wrapped(sgd(ours.parameters()), ours)
    train(ours, optimizer, steps=2)
    optimizer.synchronize()
    assert optimizer.iteration == 2
    optimizer.zero_grad()
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.iteration == 2, "there is none"


def test_gradients_that_the_program_sets_are_exchanged() -> None:
    """Put in the place of others, `synchronize` sees them; written into them, `step` does."""
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    kinds = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]

    def work(rank: int) -> None:
        weight = models[rank].weight
        optimizer = wrapped(kinds[rank], models[rank], job="two", rank=rank, workers=2)
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, 2.0 * rank)
        optimizer.synchronize()
        assert torch.equal(weight.grad, torch.ones_like(weight))
        optimizer.step()
        weight.grad.fill_(4.0 * rank)
        optimizer.step()
        assert optimizer.iteration == 2
        assert torch.allclose(weight, before - 3.0)

    together(work)


class Branching(nn.Module):
    """One of two heads, by the first word: workers may take different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 12) for _ in range(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words).mean(dim=1)
        return self.heads[int(words[0, 0]) % 2](x)  # type: ignore[no-any-return]


def test_a_gradient_that_no_worker_has_stays_none() -> None:
    """A head that one worker reached has its mean with zero on both; one that none did, none."""
    seen: dict[int, list[list[bool]]] = {0: [], 1: []}
    models = [fresh(Branching) for _ in range(2)]
    kinds = [torch.optim.Adam(one.parameters(), lr=0.02) for one in models]

    def work(rank: int) -> None:
        model = models[rank]
        optimizer = wrapped(kinds[rank], model, job="two", rank=rank, workers=2)
        for batch in batches(BATCHES):
            optimizer.zero_grad()
            loss_of(model, halves(batch, rank)).backward()
            seen[rank].append([head.weight.grad is not None for head in model.heads])  # type: ignore[union-attr]
            optimizer.step()

    together(work)
    assert seen[0] == seen[1]
    assert [True, True, False] in seen[0], "two workers took two heads"
    assert all(not reached[2] for reached in seen[0])
    assert difference(models[0], models[1]) == 0.0


def test_a_gradient_of_zeros_is_one() -> None:
    """A dead unit's is zero, or -0, and momentum goes on, as in plain PyTorch."""
    results = []
    for wrap in (lambda o, m: o, wrapped):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for scale in (1.0, -0.0, -0.0):
            optimizer.zero_grad()
            (model(torch.ones(1, 1)) * scale).sum().backward()
            optimizer.step()
        results.append(float(model.weight.detach()))
    assert results[0] == results[1] != 0.9


class Checkpointed(Attending):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x = checkpoint(lambda y: self.attention(y, y, y)[0], x, use_reentrant=True)
        return self.output(x.mean(dim=1))  # type: ignore[no-any-return]


def test_reentrant_checkpoints_work() -> None:
    """Their backward pass is several, and each exchanges."""
    plain, models, _ = both(clipping, model=Checkpointed)
    assert difference(models[0], models[1]) == 0.0
    assert difference(plain, models[0]) < LOOSE


def test_groups_may_come_later_and_be_frozen_and_thawed() -> None:
    def make(parameters: Any) -> Any:
        return torch.optim.SGD(list(parameters)[:2], lr=0.1, momentum=0.9)

    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
        parameters = list(model.parameters())
        simple(model, optimizer, data[:3])
        parameters[0].requires_grad_(False)
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.05})
        simple(model, optimizer, data[3:6])
        parameters[0].requires_grad_(True)
        simple(model, optimizer, data[6:])

    plain, models, optimizer = both(loop, make)
    assert difference(models[0], models[1]) == 0.0
    assert difference(plain, models[0]) < LOOSE
    with pytest.raises(Rejected, match="may be frozen afterwards"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_parameter_that_was_frozen_when_wrapped_trains_once_it_is_not() -> None:
    model = nn.Linear(2, 1, bias=False).requires_grad_(False)
    optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = model.weight.clone()
    model.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer.iteration == 1
    optimizer.step()
    assert torch.allclose(model.weight, before - 0.1)


def test_states_are_saved_and_loaded_as_plain_pytorchs() -> None:
    """Half of the way alone, half in a job, the last half alone again: as if never interrupted."""
    make = ANY["amsgrad"]
    plain, ours = fresh(), fresh()
    straight = make(plain.parameters())
    for _ in range(3):
        train(plain, straight, steps=4)
    first = make(ours.parameters())
    train(ours, first, steps=4)
    fresh_one = make(ours.parameters())
    joined = wrapped(fresh_one, ours)
    joined.load_state_dict(first.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(joined, 100)
    train(ours, joined, steps=4, scheduler=schedule)
    last = make(ours.parameters())
    last.load_state_dict(joined.state_dict())
    joined.close()
    train(ours, last, steps=4)
    assert difference(plain, ours) == 0.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_gradients_travel_in_fewer_bytes(dtype: Any, local: Any) -> None:
    plain, ours = fresh(Attending), fresh(Attending)
    train(plain, sgd(plain.parameters()), steps=4)
    optimizer = wrapped(sgd(ours.parameters()), ours, gradient_dtype=dtype)
    size = local.made.gradient_buffer("output.weight").itemsize
    assert size == (4 if dtype == "int8" else 2), "8 bits are packed once a bucket is whole"
    train(ours, optimizer, steps=4)
    assert 0.0 < difference(plain, ours) < 2e-2


def test_a_closure_is_evaluated_by_the_optimiser() -> None:
    plain, ours = fresh(Attending), fresh(Attending)
    for model, optimizer in (
        (plain, torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=3)),
        (ours, wrapped(torch.optim.LBFGS(ours.parameters(), lr=0.1, max_iter=3), ours)),
    ):
        for batch in batches(3):

            def closure(model: Any = model, each: Any = optimizer, batch: Any = batch) -> Any:
                each.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert difference(plain, ours) == 0.0


def test_a_pass_that_failed_is_found_out() -> None:
    """Regression by design: gradients of two passes would be in one sum."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
            raise MemoryError

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped_one = wrapped(sgd(model.parameters()), model)
    with pytest.raises(MemoryError):
        model[1](Fails.apply(model[0](torch.ones(1, 2)))).sum().backward()
    with pytest.raises(Rejected, match="failed half-way"):
        model(torch.ones(1, 2)).sum().backward()
    assert wrapped_one.iteration == 0


def test_what_gradients_cannot_be_is_refused(local: Any) -> None:
    ours = fresh(Attending)
    with pytest.raises(Rejected, match='"updates" or "gradients"'):
        Optimizer(sgd(ours.parameters()), ours, aggregate="sums")  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="is not the model's"):
        wrapped(sgd(ours.parameters()), fresh(Tied))
    double = nn.Linear(2, 2).double()
    with pytest.raises(Rejected, match=r"torch\.float64"):
        wrapped(sgd(double.parameters()), double)
    with pytest.raises(Rejected, match="asynchronous"):
        wrapped(sgd(ours.parameters()), ours, consistency="asynchronous")
    sparse = nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Flatten(), nn.Linear(16, 12))
    wrapped(torch.optim.SGD(sparse.parameters(), lr=0.1), sparse, job="sparse")
    with pytest.raises(Rejected, match=r"0\.weight: its gradient is sparse"):
        loss_of(sparse, batches(1)[0]).backward()


def test_a_job_of_another_run_is_refused(local: Any) -> None:
    ours = fresh(Attending)
    train(ours, wrapped(sgd(ours.parameters()), ours), steps=2)
    with pytest.raises(Rejected, match="sums of another run"):
        wrapped(sgd(ours.parameters()), ours)
    assert local.made.left


def test_after_the_end_a_step_is_refused(local: Any) -> None:
    ours = fresh(Attending)
    optimizer = wrapped(sgd(ours.parameters()), ours)
    train(ours, optimizer, steps=2)
    optimizer.close(result={"loss": 1.0})
    assert local.made.closed == {"loss": 1.0}
    loss_of(ours, batches(1)[0]).backward()
    with pytest.raises(Rejected, match="closed"):
        optimizer.step()
    optimizer.close()
