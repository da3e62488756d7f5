"""Optimiser states from plain PyTorch into a job and back."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.torch.test_torch_optimizer import (
    LOOSE,
    OPTIMIZERS,
    Attending,
    batches,
    difference,
    fresh,
    loss_of,
    sgd,
    train,
)
from torch import nn

from slackwater.agent import Agent
from slackwater.agent.initial import Initial
from slackwater.common.base.errors import Rejected
from slackwater.schemas.tensors import UpdateRule
from slackwater.torch import Optimizer

torch.set_num_threads(1)
KINDS = OPTIMIZERS | {
    "accumulated": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "grouped": lambda p: grouped(list(p)),
}


def grouped(parameters: list[Any]) -> Any:
    groups = [{"params": parameters[:2], "momentum": 0.5}, {"params": parameters[2:]}]
    return torch.optim.RMSprop(groups, lr=0.005, eps=1e-3)


def difference_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value above 1."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("local", [2**20, 64], indirect=True, ids=["together", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_from_pytorch_to_a_job_and_back_is_as_if_never_left(kind: str, local: Any) -> None:
    """Four steps in plain PyTorch, four in a job, four in plain PyTorch again."""
    make = KINDS[kind]
    plain, ours = fresh(Attending), fresh(Attending)
    straight = make(plain.parameters())
    for _ in range(3):
        train(plain, straight, steps=4)
    first = make(ours.parameters())
    train(ours, first, steps=4)
    joined = Optimizer(first, ours)
    train(ours, joined, steps=4)
    saved = joined.state_dict()
    joined.close()
    last = make(ours.parameters())
    last.load_state_dict(saved)
    reference = straight.state_dict()["state"]
    assert saved["state"].keys() == reference.keys()
    train(ours, last, steps=4)
    assert difference(plain, ours) < LOOSE
    mine = last.state_dict()["state"]
    for index, state in reference.items():
        assert mine[index].keys() >= state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert difference_of(mine[index][key], value) < LOOSE, key
                assert mine[index][key].dtype == value.dtype


def test_two_workers_begin_with_rank_0s_states() -> None:
    plain = fresh(Attending)
    straight = OPTIMIZERS["adam"](plain.parameters())
    train(plain, straight, steps=8)
    models = [fresh(Attending) for _ in range(2)]
    kinds = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    train(models[0], kinds[0], steps=4)
    saved: dict[int, Any] = {}
    wrapped: list[Any] = [None, None]

    def work(rank: int) -> None:
        optimizer = Optimizer(kinds[rank], models[rank], job="two", rank=rank, workers=2)
        wrapped[rank] = optimizer
        for batch in batches(4):
            optimizer.zero_grad()
            loss_of(models[rank], (batch[0][rank::2], batch[1][rank::2])).backward()
            optimizer.step()
        saved[rank] = optimizer.state_dict()
        models[rank].state_dict()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    twice = fresh(Attending)
    optimizer = OPTIMIZERS["adam"](twice.parameters())
    train(twice, optimizer, steps=4)
    train(twice, optimizer, steps=4)
    assert difference(twice, models[0]) < LOOSE
    assert difference(models[0], models[1]) == 0.0
    for index, state in saved[0]["state"].items():
        assert float(state["step"]) == 8.0
        assert torch.equal(state["exp_avg"], saved[1]["state"][index]["exp_avg"])


def test_before_the_first_step_there_is_no_state(local: Any) -> None:
    ours = fresh(Attending)
    optimizer = Optimizer(OPTIMIZERS["adam"](ours.parameters()), ours)
    assert optimizer.state_dict()["state"] == {}
    loss_of(ours, batches(1)[0]).backward()
    with pytest.raises(Rejected, match=r"after step\(\)"):
        optimizer.state_dict()
    optimizer.step()
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.close()
    with pytest.raises(Rejected, match=r"before close\(\)"):
        optimizer.state_dict()


def test_a_count_that_differs_between_parameters_is_refused() -> None:
    """PyTorch skips a parameter without a gradient; aggregators count for all."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(Rejected, match=r'0\.weight has had 1 steps, 1\.weight 0.*"gradients"'):
        Optimizer(optimizer, model)


def test_momenta_of_nadam_that_changed_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.NAdam(model.parameters())
    for beta in (0.5, 0.9):
        optimizer.param_groups[0]["betas"] = (beta, 0.999)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with pytest.raises(Rejected, match=r'mu_product.*they changed.*"gradients"'):
        Optimizer(optimizer, model)


def test_states_that_do_not_fit_their_tensor_are_refused() -> None:
    w = np.ones(3, np.float32)
    for state, why in (
        (np.ones(2, np.float32), r"state 0 is float32 \[2\]"),
        (np.ones(3), "state 0 is float64"),
        (np.full(3, np.nan, np.float32), "not all finite"),
    ):
        with pytest.raises(Rejected, match=why):
            Agent(tensors=Initial({"w": w}, {"w": (state,)}))


def test_an_agent_alone_begins_with_states_and_reads_them() -> None:
    w, m = np.ones(3, np.float32), np.full(3, 2.0, np.float32)
    update = UpdateRule(name="momentum", learning_rate=0.5, momentum=0.5)
    tensors = Initial({"w": w, "b": (2,)}, {"w": (m,)}, updates=7)
    with Agent(tensors=tensors, update=update) as agent:
        assert (agent.states()["w"].states[0] == m).all()
        assert agent.states()["w"].updates == 7
        agent.step({"w": w, "b": np.ones(2, np.float32)})
        found = agent.states()
        assert (found["w"].states[0] == 2.0).all()
        assert (found["b"].states[0] == 1.0).all()
        assert found["b"].updates == 8
        assert (agent.pull("w") == 0.0).all()


def test_states_are_not_kept_longer_than_a_region_may_need_them(local: Any) -> None:
    ours = fresh(Attending)
    inner = sgd(ours.parameters())
    train(ours, inner, steps=2)
    optimizer = Optimizer(inner, ours)
    assert local.made._session._initial.states
    train(ours, optimizer, steps=2)
    assert not local.made._session._initial.states
