"""Translation of torch optimisers into the aggregators' update rules. Pure.

The optimiser object is only read: the aggregators apply the rule and keep its state. Learning rates
and all else that may change while a job trains travel with each push; what the rules cannot say is
refused by name, when the optimiser is wrapped or when an option changes to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from slackwater.common.base.errors import Rejected

Group = Mapping[str, Any]

_KNOWN: Final[tuple[type[torch.optim.Optimizer], ...]] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
)
_MUST_BE: Final[dict[str, tuple[object, ...]]] = {
    "maximize": (False,),
    "differentiable": (False,),
    "amsgrad": (False,),
    "dampening": (0,),
}
"""Options that are mapped only where they have this value."""
CONSTANT: Final[dict[str, tuple[str, ...]]] = {"nadam": ("beta1", "momentum_decay")}
"""Hyper-parameters that a rule takes to have been the same in all steps."""


def rule_of(optimizer: torch.optim.Optimizer) -> str:
    """The update rule that does what this optimiser does. Raises Rejected."""
    kind = type(optimizer)
    if kind not in _KNOWN:
        raise Rejected(
            f"optimiser {kind.__name__} has no update rule of the aggregators; give "
            f'aggregate="gradients", which takes any, or use one of '
            f"{', '.join(known.__name__ for known in _KNOWN)}"
        )
    groups: Sequence[Group] = optimizer.param_groups
    for group in groups:
        _check(kind.__name__, group)
    if kind is torch.optim.SGD:
        return _sgd(groups)
    if kind is torch.optim.Adagrad:
        return "adagrad"
    if kind is torch.optim.RMSprop:
        return _rmsprop(groups)
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in groups}
    if len(decoupled) > 1:
        raise Rejected(
            "decoupled_weight_decay differs between parameter groups: a job has one rule"
        )
    if kind is torch.optim.NAdam:
        if decoupled.pop():
            raise Rejected(
                "NAdam: decoupled_weight_decay=True has no update rule of the aggregators; give "
                'aggregate="gradients"'
            )
        return "nadam"
    return "adamw" if decoupled.pop() else "adam"


def _sgd(groups: Sequence[Group]) -> str:
    """A group without momentum is one with momentum 0."""
    moving = [group for group in groups if group["momentum"] != 0]
    if not moving:
        return "sgd"
    if len({bool(group["nesterov"]) for group in moving}) > 1:
        raise Rejected("nesterov differs between parameter groups: a job has one update rule")
    return "nesterov" if moving[0]["nesterov"] else "momentum"


def _rmsprop(groups: Sequence[Group]) -> str:
    """A job has the states that one of its groups needs."""
    centered = {bool(group["centered"]) for group in groups}
    if len(centered) > 1:
        raise Rejected("centered differs between parameter groups: a job has one update rule")
    if centered.pop():
        return "rmsprop_centered"
    return "rmsprop_momentum" if any(group["momentum"] for group in groups) else "rmsprop"


def _check(kind: str, group: Group) -> None:
    for option, allowed in _MUST_BE.items():
        if option in group and group[option] not in allowed:
            raise Rejected(
                f"{kind}: {option}={group[option]} cannot be mapped to an update rule of the "
                f'aggregators; leave it at {allowed[0]}, or give aggregate="gradients"'
            )


def check_constant(rule: str, hyper: Mapping[str, float], first: Mapping[str, float]) -> None:
    """Raise Rejected where a push of the group differs from its first one and must not."""
    for name in CONSTANT.get(rule, ()):
        if hyper[name] != first[name]:
            raise Rejected(
                f"{name} became {hyper[name]} from {first[name]}: rule {rule} takes it to be the "
                'same in all steps; leave it, or give aggregate="gradients"'
            )


def hyper_of(rule: str, group: Group, iteration: int) -> dict[str, float]:
    """The hyper-parameters of a push of `iteration` (from 1). Raises Rejected when the group has
    come to ask for what the job's rule cannot do."""
    _check(rule, group)
    rate = float(group["lr"])
    hyper = {"learning_rate": rate, "weight_decay": float(group["weight_decay"])}
    if rule in ("sgd", "momentum", "nesterov"):
        momentum = float(group["momentum"])
        if momentum and (rule == "sgd" or bool(group["nesterov"]) != (rule == "nesterov")):
            raise Rejected(
                f"momentum={momentum}, nesterov={group['nesterov']} came after the job began with "
                f"rule {rule}; construct the optimiser with what it will need"
            )
        return hyper if rule == "sgd" else hyper | {"momentum": momentum}
    hyper["epsilon"] = float(group["eps"])
    if rule == "adagrad":
        hyper["learning_rate"] = rate / (1.0 + (iteration - 1) * float(group["lr_decay"]))
        return hyper
    if rule.startswith("rmsprop"):
        return hyper | _rmsprop_hyper(rule, group)
    if bool(group.get("decoupled_weight_decay")) != (rule == "adamw"):
        raise Rejected(f"decoupled_weight_decay changed after the job began with rule {rule}")
    beta1, beta2 = group["betas"]
    hyper |= {"beta1": float(beta1), "beta2": float(beta2)}
    return hyper | ({"momentum_decay": float(group["momentum_decay"])} if rule == "nadam" else {})


def _rmsprop_hyper(rule: str, group: Group) -> dict[str, float]:
    momentum, centered = float(group["momentum"]), bool(group["centered"])
    if centered != (rule == "rmsprop_centered") or (momentum and rule == "rmsprop"):
        raise Rejected(
            f"momentum={momentum}, centered={centered} came after the job began with rule {rule}; "
            "construct the optimiser with what it will need"
        )
    hyper = {"beta2": float(group["alpha"])}
    return hyper if rule == "rmsprop" else hyper | {"momentum": momentum}
