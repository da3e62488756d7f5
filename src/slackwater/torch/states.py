"""Translation of optimiser states between PyTorch's format and that of the update rules. Pure.

Both have the same buffers under other names (rules.py has the formulas), so that training can begin
in plain PyTorch, go on in a job, and end in plain PyTorch. What differs is the number of steps:
PyTorch counts it for each parameter, aggregators for each bucket.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from slackwater.agent.attachment import Array
from slackwater.agent.initial import Initial, States
from slackwater.agent.optimizer_state import TensorState
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import nesterov_product
from slackwater.torch.tensors import Trained

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "adagrad": ("sum",),
    "rmsprop": ("square_avg",),
    "rmsprop_momentum": ("square_avg", "momentum_buffer"),
    "rmsprop_centered": ("square_avg", "momentum_buffer", "grad_avg"),
}
"""PyTorch's name of each state of a rule, in the rule's order."""
_COUNTED: Final = frozenset({"adam", "adamw", "nadam", "adagrad"})
"""Rules whose step depends on how many there were."""
_PRODUCT_SLACK: Final = 1e-4


def initial_of(
    rule: str,
    optimizer: torch.optim.Optimizer,
    tensors: Sequence[Trained],
    values: dict[str, Array],
) -> Initial:
    """Return what the job begins with: the values, and the states of an optimiser that has stepped.
    Raises Rejected where the rule cannot go on from there."""
    own = {t.name: optimizer.state.get(t.parameter, {}) for t in tensors}
    updates = _updates(rule, own)
    if rule == "nadam" and updates:
        for tensor in tensors:
            group = optimizer.param_groups[tensor.group]
            _check_product(tensor.name, own[tensor.name], group, updates)
    states = {t.name: _states(rule, own[t.name], t.parameter) for t in tensors}
    some = updates > 0 or any(part.any() for each in states.values() for part in each)
    return Initial(values, states, updates) if some else Initial(values)


def _updates(rule: str, own: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many steps the parameters have had."""
    counts = {name: int(float(state.get("step", 0))) for name, state in own.items()}
    most = max(counts, key=counts.__getitem__)
    least = min(counts, key=counts.__getitem__)
    if rule in _COUNTED and counts[most] != counts[least]:
        raise Rejected(
            f"{most} has had {counts[most]} steps, {least} {counts[least]}: aggregators count one "
            'number for all; give aggregate="gradients"'
        )
    return counts[most]


def _check_product(name: str, state: Mapping[str, Any], group: Any, updates: int) -> None:
    found = float(state["mu_product"])
    expected = nesterov_product(float(group["betas"][0]), float(group["momentum_decay"]), updates)
    if abs(found - expected) > _PRODUCT_SLACK * expected + 1e-30:
        raise Rejected(
            f"{name}: mu_product is {found:g} after {updates} steps, {expected:g} with the group's "
            'betas and momentum_decay: they changed; give aggregate="gradients"'
        )


def _states(rule: str, state: Mapping[str, Any], parameter: torch.Tensor) -> States:
    """Return the rule's states; one that a parameter lacks is zero."""
    if not state:
        return ()
    found = (state.get(key) for key in KEYS[rule])
    values = [torch.zeros_like(parameter) if each is None else each for each in found]
    return tuple(each.detach().to("cpu", torch.float32).contiguous().numpy() for each in values)


def state_of(rule: str, group: Mapping[str, Any], found: TensorState) -> dict[str, Any]:
    """Return a parameter's state as plain PyTorch has it after as many steps."""
    if not (found.updates or any(state.any() for state in found.states)):
        return {}
    state: dict[str, Any] = {}
    if rule not in ("sgd", "momentum", "nesterov"):
        state["step"] = torch.tensor(float(found.updates))
    if rule == "nadam":
        product = nesterov_product(
            float(group["betas"][0]), float(group["momentum_decay"]), found.updates
        )
        state["mu_product"] = torch.tensor(product)
    for key, value in zip(KEYS[rule], found.states, strict=True):
        state[key] = torch.from_numpy(np.ascontiguousarray(value))
    return state


def states_by_index(
    rule: str,
    groups: Iterable[Mapping[str, Any]],
    tensors: Mapping[torch.nn.Parameter, Trained],
    found: Mapping[str, TensorState],
) -> dict[int, dict[str, Any]]:
    """Return the states of an optimiser's `state_dict`: parameters count through all groups."""
    states: dict[int, dict[str, Any]] = {}
    index = 0
    for group in groups:
        for parameter in group["params"]:
            tensor = tensors.get(parameter)
            if tensor is not None and (state := state_of(rule, group, found[tensor.name])):
                states[index] = state
            index += 1
    return states
