"""The wrapped optimiser against the plain one, and what it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slackwater.common.base.errors import GradientRefused, Rejected
from slackwater.torch import DistributedOptimizer, Optimizer, rank, size

torch.set_num_threads(1)
LOOSE = 1e-5
"""Rounding: our rules and PyTorch's take the same expressions in another order. (Adam divides what
should be a gradient of zero, as an attention's key bias has, by its own noise: hence a large eps.)
"""


class Tied(nn.Module):
    """An embedding that is its own output layer, a normalisation, a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.norm = nn.LayerNorm(6)
        self.output = nn.Linear(6, 12)
        self.output.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.embedding(words)).mean(dim=1))  # type: ignore[no-any-return]


class Attending(nn.Module):
    """nn.MultiheadAttention reads its child's parameters without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.output = nn.Linear(8, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        x, _ = self.attention(x, x, x)
        return self.output(x.mean(dim=1))  # type: ignore[no-any-return]


class Functional(nn.Module):
    """Reads a child's parameters on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.hidden = nn.Linear(6, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words).mean(dim=1)
        return functional.linear(x, self.hidden.weight, self.hidden.bias)


def batches(count: int, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 12, (8, 4), generator=made),
            torch.randint(0, 12, (8,), generator=made),
        )
        for _ in range(count)
    ]


def fresh(kind: Callable[[], nn.Module] = Tied) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, optimizer: Any, steps: int = 12, scheduler: Any = None) -> None:
    for batch in batches(steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def difference(one: nn.Module, other: nn.Module) -> float:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "decayed": lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.05),
    "momentum": sgd,
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    # A softmax does not feel its keys' bias: a small epsilon would blow up that rounding.
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "nadam": lambda p: torch.optim.NAdam(
        p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.01, eps=1e-3, momentum_decay=0.1
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=0.01, eps=1e-3),
    "rmsprop with momentum": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.8, eps=1e-3),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.005, momentum=0.5, centered=True, eps=1e-3),
}


@pytest.mark.parametrize("model", [Tied, Attending, Functional])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_worker_trains_as_plain_pytorch(kind: str, model: Callable[[], nn.Module]) -> None:
    """Unused parameters aside: a plain optimiser skips them, here they get zeros, and decay."""
    plain, ours = fresh(model), fresh(model)
    for both in (plain, ours):
        if isinstance(both, Tied):
            del both.unused
    train(plain, OPTIMIZERS[kind](plain.parameters()))
    wait: Any = "step" if model is Functional else "forward"
    train(ours, Optimizer(OPTIMIZERS[kind](ours.parameters()), ours, wait=wait))
    assert difference(plain, ours) < LOOSE


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("wait", ["forward", "step"])
def test_however_it_is_told_to_move_bytes(in_place: bool, overlap: bool, wait: Any) -> None:
    plain, ours = fresh(), fresh()
    train(plain, sgd(plain.parameters()))
    optimizer = Optimizer(
        sgd(ours.parameters()), ours, in_place=in_place, overlap=overlap, wait=wait
    )
    train(ours, optimizer)
    assert difference(plain, ours) < LOOSE


def test_an_average_after_the_step_is_plain_pytorchs_where_the_step_waits() -> None:
    """Regression: without a wait, the average is silently of the step before (training.md)."""
    plain, ours = fresh(), fresh()
    averages = [torch.optim.swa_utils.AveragedModel(model) for model in (plain, ours)]
    wrapped = Optimizer(sgd(ours.parameters()), ours, wait="step")
    for model, optimizer, average in zip(
        (plain, ours), (sgd(plain.parameters()), wrapped), averages, strict=True
    ):
        for _ in range(3):
            train(model, optimizer, steps=1)
            average.update_parameters(model)
    assert difference(averages[0], averages[1]) < LOOSE


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


@pytest.mark.parametrize("kind", ["momentum", "adam"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_schedulers_work_on_it(schedule: str, kind: str) -> None:
    """One cycle moves the momentum, or beta 1, too."""
    plain, ours = fresh(Attending), fresh(Attending)
    optimizer = OPTIMIZERS[kind](plain.parameters())
    train(plain, optimizer, scheduler=SCHEDULERS[schedule](optimizer))
    wrapped = Optimizer(OPTIMIZERS[kind](ours.parameters()), ours)
    train(ours, wrapped, scheduler=SCHEDULERS[schedule](wrapped))
    assert difference(plain, ours) < LOOSE
    assert wrapped.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("option", ["betas", "momentum_decay"])
def test_nadams_momentum_stays_as_it_was(option: str) -> None:
    """Its product over all steps is computed from their number."""
    ours = fresh(Attending)
    optimizer = Optimizer(torch.optim.NAdam(ours.parameters(), lr=0.02, eps=1e-3), ours)
    train(ours, optimizer, steps=2)
    optimizer.param_groups[0][option] = (0.5, 0.999) if option == "betas" else 0.1
    with pytest.raises(Rejected, match=r'nadam.*aggregate="gradients"'):
        train(ours, optimizer, steps=1)


def test_groups_keep_their_hyper_parameters(local: Any) -> None:
    def grouped(model: nn.Module) -> Any:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() == 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "lr": 0.05}],
            lr=0.01,
            eps=1e-3,
        )

    plain, ours = fresh(Attending), fresh(Attending)
    train(plain, grouped(plain))
    train(ours, Optimizer(grouped(ours), ours))
    assert difference(plain, ours) < LOOSE
    order = [local.made.group(name) for name in local.made.tensors]
    assert order == sorted(order), "neighbours of a group are put together"
    assert set(order) == {0, 1}


def test_pushes_come_with_backward_and_waits_with_forward(local: Any) -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    log = local.made.log
    log.clear()
    batch = batches(1)[0]
    loss = loss_of(ours, batch)
    assert not log, "nothing to wait for yet"
    loss.backward()
    assert [line for line in log if line.startswith("push output")] == log[:2], "last layer first"
    assert len(log) == len(local.made.tensors)
    assert log[-1] == "push embedding.weight"
    log.clear()
    optimizer.step()
    assert not log, "a step waits for nobody"
    loss_of(ours, batch)
    assert log[0] == "wait embedding.weight"
    assert sorted(log) == sorted(f"wait {name}" for name in local.made.tensors)


def test_backward_passes_may_be_accumulated() -> None:
    plain, ours = fresh(), fresh()
    inner = sgd(plain.parameters())
    optimizer = Optimizer(sgd(ours.parameters()), ours, backward_passes_per_step=2)
    stepper = [(plain, inner), (ours, optimizer)]
    for first, second in zip(batches(6, 1), batches(6, 2), strict=True):
        for model, each in stepper:
            each.zero_grad()
            for batch in (first, second):
                (loss_of(model, batch) / 2).backward()
            each.step()
    del plain.unused, ours.unused
    assert difference(plain, ours) < LOOSE


def test_more_passes_than_announced_are_refused() -> None:
    ours = fresh()
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    loss_of(ours, batches(1)[0]).backward()
    with pytest.raises(Rejected, match="backward_passes_per_step is 1"):
        loss_of(ours, batches(1)[0]).backward()
    assert optimizer.iteration == 0


def test_unused_parameters_are_pushed_as_zeros(local: Any) -> None:
    ours = fresh()
    before = ours.unused.weight.detach().clone()  # type: ignore[union-attr]
    train(ours, Optimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours), steps=2)
    ours.state_dict()
    assert local.made.version("unused.weight") == 2
    assert torch.equal(ours.unused.weight, before)  # type: ignore[union-attr,arg-type]


def test_frozen_parameters_stay_out_of_it(local: Any) -> None:
    ours = fresh(Attending)
    ours.embedding.weight.requires_grad_(False)  # type: ignore[operator,union-attr]
    before = ours.embedding.weight.clone()  # type: ignore[operator,union-attr]
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    train(ours, optimizer, steps=3)
    assert "embedding.weight" not in local.made.tensors
    assert torch.equal(ours.embedding.weight, before)  # type: ignore[union-attr,arg-type]
    ours.embedding.weight.requires_grad_(True)  # type: ignore[operator,union-attr]
    loss_of(ours, batches(1)[0]).backward()
    with pytest.raises(Rejected, match="unfrozen"):
        optimizer.step()


def test_freezing_later_is_refused() -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    ours.output.weight.requires_grad_(False)  # type: ignore[operator,union-attr]
    loss_of(ours, batches(1)[0]).backward()
    with pytest.raises(Rejected, match=r"output\.weight was frozen"):
        optimizer.step()


def test_gradients_are_clipped_before_they_are_pushed() -> None:
    plain, ours = fresh(Attending), fresh(Attending)
    inner = sgd(plain.parameters())
    optimizer = Optimizer(sgd(ours.parameters()), ours, overlap=False)
    for batch in batches(6):
        for model, each in ((plain, inner), (ours, optimizer)):
            each.zero_grad()
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            each.step()
    assert difference(plain, ours) < LOOSE


def test_gradients_that_change_after_they_were_pushed_are_refused() -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    loss_of(ours, batches(1)[0]).backward()
    torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
    with pytest.raises(Rejected, match="overlap=False"):
        optimizer.step()


def test_rates_that_change_after_gradients_were_pushed_are_refused() -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    loss_of(ours, batches(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(Rejected, match=r"learning_rate of group 0 became 0\.05"):
        optimizer.step()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_gradients_travel_in_fewer_bytes(dtype: Any, local: Any) -> None:
    """Rounded once, on the way into the slot."""
    plain, ours = fresh(Attending), fresh(Attending)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), steps=4)
    optimizer = Optimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours, gradient_dtype=dtype)
    size = local.made.gradient_buffer("output.weight").itemsize
    assert size == (4 if dtype == "int8" else 2), "8 bits are packed once a bucket is whole"
    train(ours, optimizer, steps=4)
    assert 0.0 < difference(plain, ours) < (5e-3 if dtype == "int8" else 2e-3)


def test_a_half_precision_model_has_whole_master_copies(local: Any) -> None:
    ours = fresh(Attending).to(torch.bfloat16)
    optimizer = Optimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours)
    slot = local.made.gradient_buffer("output.weight")
    assert slot.dtype == "uint16", "bfloat16 as its bits"
    train(ours, optimizer, steps=3)
    optimizer.synchronize()
    name, parameter = next(iter(ours.named_parameters()))
    master = local.made.master(name)
    assert master.dtype == "float32"
    assert parameter.dtype == torch.bfloat16
    assert torch.equal(parameter, torch.from_numpy(master).to(torch.bfloat16))


def test_checkpoints_have_the_last_step(local: Any) -> None:
    plain, ours = fresh(Attending), fresh(Attending)
    train(plain, sgd(plain.parameters()))
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    train(ours, optimizer)
    saved = copy.deepcopy(ours.state_dict())
    assert max(float((saved[k] - v).abs().max()) for k, v in plain.state_dict().items()) < LOOSE
    weight = saved["output.weight"]
    assert weight.untyped_storage().nbytes() == weight.nbytes, "nothing but the tensor is saved"
    with pytest.raises(Rejected, match="before the optimiser is wrapped"):
        ours.load_state_dict(saved)
    groups = optimizer.state_dict()
    assert set(groups["state"][0]) == {"momentum_buffer"}
    groups["state"] = {}
    groups["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(groups)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(Rejected, match="before that is wrapped"):
        optimizer.load_state_dict({"state": {0: {}}, "param_groups": []})


def test_a_copied_model_is_a_model_of_its_own() -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    average = copy.deepcopy(ours)
    before = copy.deepcopy(average.state_dict())
    train(ours, optimizer)
    optimizer.synchronize()
    after = average.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(Rejected, match="cannot be copied"):
        copy.deepcopy(optimizer)


def test_parameters_that_are_read_without_a_wait_are_found_out() -> None:
    ours = fresh(Functional)
    with pytest.raises(Rejected, match=r'hidden.* give wait="step"'):
        train(ours, Optimizer(sgd(ours.parameters()), ours), steps=2)


def test_the_program_may_not_write_parameters() -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    train(ours, optimizer, steps=2)
    optimizer.synchronize()
    with torch.no_grad():
        ours.output.weight.clamp_(-0.1, 0.1)  # type: ignore[operator,union-attr]
    with pytest.raises(Rejected, match=r"output\.weight was written to"):
        train(ours, optimizer, steps=2)


def test_a_model_that_is_converted_later_is_refused() -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours, in_place=False)
    train(ours, optimizer, steps=1)
    ours.half()
    with pytest.raises(Rejected, match=r"became torch\.float16"):
        optimizer.synchronize()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Flatten(), nn.Linear(16, 12))
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(Rejected, match=r"0\.weight: its gradient is sparse"):
        loss_of(model, batches(1)[0]).backward()
    assert optimizer.iteration == 0


def test_a_grad_scaler_is_refused() -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours, overlap=False)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(ours, batches(1)[0])).backward()
    with pytest.raises(Rejected, match="GradScaler"):
        scaler.step(optimizer)


def test_a_step_may_be_given_a_closure() -> None:
    plain, ours = fresh(Attending), fresh(Attending)
    inner = sgd(plain.parameters())
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    for batch in batches(4):
        losses = []
        for model, each in ((plain, inner), (ours, optimizer)):

            def closure(model: Any = model, each: Any = each, batch: Any = batch) -> torch.Tensor:
                each.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            losses.append(float(each.step(closure).detach()))
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert difference(plain, ours) < LOOSE


def test_after_the_end_the_model_is_the_programs_own(local: Any) -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    train(ours, optimizer, steps=3)
    optimizer.close(result={"loss": 1.0})
    assert local.made.closed == {"loss": 1.0}
    values = copy.deepcopy(ours.state_dict())
    for bucket in range(len(local.cluster.jobs["local"].layouts)):
        for version in range(2):
            local.cluster.slots("local", bucket).parameters(version).fill(9.0)
    assert difference(ours, ours) == 0.0
    assert all(torch.equal(values[name], value) for name, value in ours.state_dict().items())
    ours.load_state_dict(values)
    with pytest.raises(Rejected, match="closed"):
        optimizer.step()
    optimizer.close()


def test_what_the_aggregators_refuse_comes_with_the_next_wait(local: Any) -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    train(ours, optimizer, steps=1)
    (loss_of(ours, batches(1)[0]) * float("nan")).backward()
    optimizer.step()
    with pytest.raises(GradientRefused, match="nan"):
        loss_of(ours, batches(1)[0])


def test_another_optimiser_than_the_jobs_is_named_with_its_rank(local: Any) -> None:
    """Regression: it said "was submitted with", though no spec named a rule and rank 0 had."""
    ours = fresh(Attending)
    local.cluster.rule = "adam"
    with pytest.raises(
        Rejected, match=r"rule adam, as its spec or the rank that .*rank 0's .*is mom"
    ):
        Optimizer(sgd(ours.parameters()), ours)
    assert local.made.left


def test_what_is_no_job_is_refused_at_once() -> None:
    ours = fresh(Attending)
    with pytest.raises(Rejected, match="at least 1"):
        Optimizer(sgd(ours.parameters()), ours, backward_passes_per_step=0)
    with pytest.raises(Rejected, match="wait is 'never'"):
        Optimizer(sgd(ours.parameters()), ours, wait="never")  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="is not the model's"):
        Optimizer(sgd(ours.parameters()), fresh(Tied))
    double = nn.Linear(2, 2).double()
    with pytest.raises(Rejected, match=r"torch\.float64"):
        Optimizer(sgd(double.parameters()), double)
    lazy = nn.LazyLinear(2)
    with pytest.raises(Rejected, match="no shape yet"):
        Optimizer(sgd(lazy.parameters()), lazy)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(Rejected, match="no trainable parameter"):
        Optimizer(sgd(frozen.parameters()), frozen)
    optimizer = Optimizer(sgd(ours.parameters()), ours)
    with pytest.raises(Rejected, match="no group can be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_who_this_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACKWATER_RANK", raising=False)
    monkeypatch.delenv("SLACKWATER_WORKERS", raising=False)
    assert (rank(), size()) == (0, 1)
    monkeypatch.setenv("SLACKWATER_RANK", "3")
    monkeypatch.setenv("SLACKWATER_WORKERS", "4")
    assert (rank(), size()) == (3, 4)
    assert DistributedOptimizer is Optimizer


def test_a_gradient_that_was_produced_in_the_region_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program lets `.grad` lie in the slot, and asks for the slot anew in each iteration."""
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = Optimizer(plain, model, overlap=False, wait="step")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for (name, parameter), value in zip(model.named_parameters(), (1.0, 2.0), strict=True):
        parameter.grad = torch.from_numpy(optimizer.agent.gradient_buffer(name)).fill_(value)

    def copied(*arguments: Any) -> None:
        raise AssertionError("it was copied")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copied)
        optimizer.step()
    for parameter, old, value in zip(model.parameters(), before, (1.0, 2.0), strict=True):
        assert torch.equal(parameter.detach(), old - 0.5 * value)
