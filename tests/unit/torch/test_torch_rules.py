"""Torch optimisers in terms of the update rules."""

from typing import Any

import pytest
import torch

from slackwater.common.base.errors import Rejected
from slackwater.torch.rules import hyper_of, rule_of

SGD, Adam, AdamW, Adagrad = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
)
RMSprop, NAdam = torch.optim.RMSprop, torch.optim.NAdam


def make(kind: Any, **options: Any) -> Any:
    return kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **options)


@pytest.mark.parametrize(
    ("kind", "options", "rule", "hyper"),
    [
        (SGD, {}, "sgd", {"learning_rate": 0.1, "weight_decay": 0.0}),
        (
            SGD,
            {"momentum": 0.9, "weight_decay": 0.01},
            "momentum",
            {"learning_rate": 0.1, "weight_decay": 0.01, "momentum": 0.9},
        ),
        (
            SGD,
            {"momentum": 0.8, "nesterov": True},
            "nesterov",
            {"learning_rate": 0.1, "weight_decay": 0.0, "momentum": 0.8},
        ),
        (
            Adam,
            {"betas": (0.8, 0.99), "eps": 1e-6},
            "adam",
            {
                "learning_rate": 0.1,
                "weight_decay": 0.0,
                "epsilon": 1e-6,
                "beta1": 0.8,
                "beta2": 0.99,
            },
        ),
        (
            AdamW,
            {"weight_decay": 0.1},
            "adamw",
            {
                "learning_rate": 0.1,
                "weight_decay": 0.1,
                "epsilon": 1e-8,
                "beta1": 0.9,
                "beta2": 0.999,
            },
        ),
        (
            NAdam,
            {"betas": (0.8, 0.99), "momentum_decay": 0.01},
            "nadam",
            {
                "learning_rate": 0.1,
                "weight_decay": 0.0,
                "epsilon": 1e-8,
                "beta1": 0.8,
                "beta2": 0.99,
                "momentum_decay": 0.01,
            },
        ),
        (
            RMSprop,
            {"alpha": 0.9, "eps": 1e-6},
            "rmsprop",
            {"learning_rate": 0.1, "weight_decay": 0.0, "epsilon": 1e-6, "beta2": 0.9},
        ),
        (
            RMSprop,
            {"momentum": 0.5},
            "rmsprop_momentum",
            {
                "learning_rate": 0.1,
                "weight_decay": 0.0,
                "epsilon": 1e-8,
                "beta2": 0.99,
                "momentum": 0.5,
            },
        ),
        (
            RMSprop,
            {"centered": True},
            "rmsprop_centered",
            {
                "learning_rate": 0.1,
                "weight_decay": 0.0,
                "epsilon": 1e-8,
                "beta2": 0.99,
                "momentum": 0.0,
            },
        ),
        (
            Adagrad,
            {"lr_decay": 0.5},
            "adagrad",
            {"learning_rate": 0.1, "weight_decay": 0.0, "epsilon": 1e-10},
        ),
    ],
)
def test_an_optimiser_is_a_rule_and_hyper_parameters(
    kind: Any, options: dict[str, Any], rule: str, hyper: dict[str, float]
) -> None:
    optimizer = make(kind, **options)  # Here: the first one costs seconds of imports.
    assert rule_of(optimizer) == rule
    assert hyper_of(rule, optimizer.param_groups[0], 1) == pytest.approx(hyper)


def test_adam_with_decoupled_decay_is_adamw() -> None:
    assert rule_of(make(Adam, weight_decay=0.1, decoupled_weight_decay=True)) == "adamw"


def test_adagrads_rate_decays_by_iteration() -> None:
    group = make(Adagrad, lr_decay=0.5).param_groups[0]
    rates = [hyper_of("adagrad", group, iteration)["learning_rate"] for iteration in (1, 2, 3)]
    assert rates == pytest.approx([0.1, 0.1 / 1.5, 0.05])


def test_a_group_without_momentum_is_one_with_momentum_0() -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(1))], "momentum": 0.9},
        {"params": [torch.nn.Parameter(torch.ones(1))]},
    ]
    optimizer = SGD(groups, lr=0.1)
    assert rule_of(optimizer) == "momentum"
    assert hyper_of("momentum", optimizer.param_groups[1], 1)["momentum"] == 0.0


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (make(SGD, maximize=True), "maximize=True"),
        (make(SGD, momentum=0.9, dampening=0.1), "dampening=0.1"),
        (make(Adam, amsgrad=True), "amsgrad=True"),
        (make(SGD, differentiable=True), "differentiable=True"),
        (make(torch.optim.Adamax), "Adamax has no update rule"),
        (make(NAdam, decoupled_weight_decay=True), 'aggregate="gradients"'),
        (make(torch.optim.Adadelta), 'aggregate="gradients".* SGD, Adam, AdamW, Adagrad'),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(Rejected, match=named):
        rule_of(optimizer)


def test_a_subclass_may_do_anything() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(Rejected, match="Mine"):
        rule_of(make(Mine))


def test_groups_of_one_job_have_one_rule() -> None:
    def two(kind: Any, first: dict[str, Any], second: dict[str, Any]) -> Any:
        fresh = [[torch.nn.Parameter(torch.ones(1))] for _ in range(2)]
        return kind([{"params": fresh[0], **first}, {"params": fresh[1], **second}], lr=0.1)

    with pytest.raises(Rejected, match="nesterov differs"):
        rule_of(two(SGD, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9}))
    with pytest.raises(Rejected, match="decoupled_weight_decay differs"):
        rule_of(two(Adam, {"decoupled_weight_decay": True}, {}))
    with pytest.raises(Rejected, match="centered differs"):
        rule_of(two(RMSprop, {"centered": True}, {}))
    assert rule_of(two(RMSprop, {"momentum": 0.5}, {})) == "rmsprop_momentum"


def test_a_group_that_comes_to_ask_for_more_is_refused() -> None:
    group = make(SGD).param_groups[0]
    group["momentum"] = 0.9
    with pytest.raises(Rejected, match=r"momentum=0\.9"):
        hyper_of("sgd", group, 1)
    group = make(Adam).param_groups[0]
    group["amsgrad"] = True
    with pytest.raises(Rejected, match="amsgrad"):
        hyper_of("adam", group, 1)
    group = make(Adam).param_groups[0]
    group["decoupled_weight_decay"] = True
    with pytest.raises(Rejected, match="decoupled_weight_decay"):
        hyper_of("adam", group, 1)
    group = make(RMSprop, momentum=0.5).param_groups[0]
    with pytest.raises(Rejected, match=r"momentum=0\.5"):
        hyper_of("rmsprop", group, 1)
