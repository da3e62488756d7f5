"""One process that adapts its batch: what it computes, keeps, records and refuses."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import slackwater.torch
import slackwater.torch.adaptive as module
from slackwater.agent.adaptive_record import read
from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.domains.models.example_order import ExampleOrder
from slackwater.torch.adaptive import Adaptive

torch.set_num_threads(1)
DATA = TensorDataset(
    torch.randn(96, 6, generator=torch.Generator().manual_seed(1)),
    torch.randn(96, 1, generator=torch.Generator().manual_seed(2)),
)


def model_of(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


@contextmanager
def adaptive(model: torch.nn.Module, optimizer: Any, **options: Any) -> Iterator[Adaptive]:
    made = Adaptive(
        model, optimizer, options.pop("data", DATA), **{"batch": 16, "max_batch": 64} | options
    )
    try:
        yield made
    finally:
        made.close()


def train(model: torch.nn.Module, made: Adaptive, iterations: int) -> None:
    while made.iteration < iterations:
        for inputs, targets in made.batches():
            made.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            if made.step() and made.iteration == iterations:
                return


@pytest.mark.parametrize(("per_gpu", "kind"), [(16, "SGD"), (16, "Adam"), (8, "SGD"), (5, "Adam")])
def test_whatever_an_iteration_is_divided_into_it_steps_by_the_whole_batchs_gradient(
    per_gpu: int, kind: str
) -> None:
    """Noise is measured in two halves, memory holds `per_gpu` examples: the weights are those of a
    plain loop over the same examples, up to rounding."""
    model, plain = model_of(), model_of()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
    with adaptive(model, optimizer, max_per_gpu=per_gpu, adapt=False) as made:
        train(model, made, 20)
        seen, noise = made._examples, made.noise_scale
    other = getattr(torch.optim, kind)(plain.parameters(), lr=0.05)
    order, batch = ExampleOrder(96).take(0, seen), seen // 20
    for iteration in range(20):
        inputs, targets = DATA[torch.from_numpy(order[iteration * batch : (iteration + 1) * batch])]
        other.zero_grad()
        torch.nn.functional.mse_loss(plain(inputs), targets).backward()
        other.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert noise is not None


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("phi", [20.0, 400.0])
def test_the_noise_of_halves_is_the_true_one(phi: float, kind: str) -> None:
    """Each example pulls a vector to itself: noise and gradient are known. Half of the coordinates
    are nine times as noisy as the others; Adam's pre-conditioner makes less of them."""
    torch.manual_seed(5)
    examples = torch.randn(4000, 50) * (phi / 50) ** 0.5
    examples -= examples.mean(0)
    examples[:, :25] *= 1.8**0.5
    examples[:, 25:] *= 0.2**0.5
    model = torch.nn.Linear(50, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(50**-0.5)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.0)
    data = TensorDataset(examples)
    with adaptive(model, optimizer, data=data, batch=64, max_batch=64) as made:
        while made.iteration < 400:
            for (drawn,) in made.batches():
                made.backward(0.5 * (model.weight - drawn).square().sum(1).mean())
                made.step()
        weights = made._lengths._weights.get(model.weight, torch.ones(1, 50))[0]
        true = float((examples.square() * weights).sum(1).mean() / weights.mean())
        assert made.noise_scale == pytest.approx(true, rel=0.35)
        assert kind == "SGD" or true < 0.99 * phi


def doubled(made: Adaptive) -> None:
    """Go on from a checkpoint of twice the batch."""
    state = made.state_dict()
    state["core"]["split"] = [32, 0]
    made.load_state_dict(state)


def test_the_schedulers_rate_is_scaled_in_the_step_and_back_after_it() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    with adaptive(model, optimizer, scale="linear") as made:
        doubled(made)
        assert made.batch == 32
        for _ in made.epochs(3):
            train_epoch(model, made)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert {round(rate, 6) for rate in rates} == {0.2, 0.1, 0.05}


def train_epoch(model: torch.nn.Module, made: Adaptive) -> None:
    for inputs, targets in made.batches():
        made.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        made.step()


def test_epochs_are_statistical_ones() -> None:
    """While noise is unknown an example of twice the batch counts half: as many iterations."""
    model = model_of()
    with adaptive(model, torch.optim.SGD(model.parameters(), lr=0.01)) as made:
        assert list(epochs(made, model, 1)) == [0]
        assert (made.iteration, made._examples) == (6, 96)
        doubled(made)
        made._core._seen = -1000
        assert list(epochs(made, model, 3)) == [1, 2]
        assert (made.iteration, made._examples) == (18, 96 + 12 * 32)


def epochs(made: Adaptive, model: torch.nn.Module, total: int) -> Iterator[int]:
    for epoch in made.epochs(total):
        train_epoch(model, made)
        yield epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_program_that_is_started_again_ends_at_the_same_bits(workers: int) -> None:
    """The state goes through torch.save; loaders that draw ahead lose nothing."""
    ends = []
    for stop in (23, 11):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with adaptive(model, optimizer, adapt=False, num_workers=workers) as made:
            train(model, made, stop)
            file = io.BytesIO()
            torch.save([made.state_dict(), model.state_dict(), optimizer.state_dict()], file)
        model = model_of(9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with adaptive(model, optimizer, adapt=False, seed=77) as made:
            file.seek(0)
            states = torch.load(file, weights_only=True)
            for part, state in zip((made, model, optimizer), states, strict=True):
                part.load_state_dict(state)
            assert made.iteration == stop
            train(model, made, 23)
            ends.append([p.detach().clone() for p in model.parameters()])
    for mine, theirs in zip(*ends, strict=True):
        assert torch.equal(mine, theirs)


def test_a_record_is_kept_and_read(tmp_path: Path) -> None:
    path = tmp_path / "job" / "record.jsonl"
    model = model_of()
    with adaptive(model, torch.optim.SGD(model.parameters(), lr=0.01), record=path) as made:
        train(model, made, 20)
    first, last = read(path)
    assert (first.iteration, last.iteration) == (8, 20)
    assert (first.batch, first.rate, first.efficiency) == (16, 1.0, 1.0)
    assert first.goodput is None
    path.write_bytes(path.read_bytes() + b'{"time_s":1')
    assert len(read(path)) == 2


def test_slow_iterations_are_each_followed_by_an_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit every 30 s must not wait for eight iterations of a minute."""
    model = model_of()
    for slow_s, expected in ((1e9, [8, 16, 24]), (0.0, list(range(8, 25)))):
        monkeypatch.setattr(module, "SLOW_S", slow_s)
        with adaptive(model, torch.optim.SGD(model.parameters(), lr=0.01)) as made:
            seen: list[int] = []
            decided = made._core.decision

            def note(progress: float, made: Adaptive = made, decided: Any = decided) -> Any:
                seen.append(made.iteration)  # noqa: B023  # Called before the list is replaced.
                return decided(progress)

            monkeypatch.setattr(made._core, "decision", note)
            train(model, made, 24)
            assert seen == expected


def test_what_would_go_wrong_in_silence_is_refused() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with adaptive(model, optimizer) as made:
        with pytest.raises(Rejected, match="without an iteration"):
            list(made.epochs(1))
        batches = made.batches()
        inputs, targets = next(batches)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        with pytest.raises(Rejected, match=r"adaptive\.step came without"):
            made.step()
        made.backward(loss)
        with pytest.raises(Rejected, match="was called before"):
            made.backward(loss)
    for options, why in (
        ({"batch_size": 4}, "batch_size=4 is not for an adaptive loader"),
        ({"data": Stream()}, "is a Stream, without a length"),
        ({"data": TensorDataset(torch.empty(0, 6))}, "has 0 examples"),
        ({"batch": 65}, "initial=65"),
        ({"fit_s": 0.0}, "fit_s is 0"),
        ({"report_s": -1.0}, "report_s is -1"),
    ):
        with pytest.raises(Rejected, match=why), adaptive(model, optimizer, **options):
            pass
    with pytest.raises(ConfigRejected, match="'guess'"), adaptive(model, optimizer, scale="guess"):
        pass


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_several_workers_need_a_way_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACKWATER_RANK", "1")
    monkeypatch.setenv("SLACKWATER_WORKERS", "2")
    model = model_of()
    with (
        pytest.raises(Rejected, match="rank 1 of 2 adapts its batch before"),
        adaptive(model, torch.optim.SGD(model.parameters(), lr=0.01)),
    ):
        pass


def test_a_worker_of_aggregators_pushes_once_however_many_passes_there_are() -> None:
    """The wrapped optimiser ends where the plain one does."""
    ends = []
    for wrapped in (True, False):
        model = model_of()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        if wrapped:
            optimizer = slackwater.torch.Optimizer(optimizer, model)
        with adaptive(model, optimizer, max_per_gpu=5, scale="linear") as made:
            train(model, made, 12)
            doubled(made)
            train(model, made, 20)
        if wrapped:
            optimizer.close()
        ends.append([p.detach().clone() for p in model.parameters()])
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
