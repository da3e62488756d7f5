"""A job's begin as its program brings it: values, and states of an optimiser. Pure.

The aggregators keep the optimiser's states, and begin them at zero unless the program has some, of
training that went before. Rank 0's are taken, with its values (Seed, frames.py).
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from slackwater.agent.attachment import Array
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.tensors import TensorSpec

States = tuple[Floats, ...]
"""A tensor's states, in the order of its rule (rules.py)."""


class Initial(dict[str, Any]):
    """Name -> values or shape, as an Agent takes them, with the states that belong to them."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        states: Mapping[str, States] = MappingProxyType({}),
        updates: int = 0,
    ) -> None:
        """`updates`: how many the states have had; adam's next one is number updates + 1."""
        super().__init__(tensors)
        self.states = dict(states)
        self.updates = updates

    def with_values(self, values: Mapping[str, Array]) -> "Initial":
        """Return the same states beside these values."""
        made = Initial(values)
        made.states, made.updates = self.states, self.updates  # Dropped there, dropped here.
        return made

    def keep_sparse(self, tensors: Iterable[TensorSpec]) -> None:
        """Forget all but sparse tables' values: the others' are in the regions, and here."""
        names = [spec.name for spec in tensors if spec.sparse]
        kept = {name: self[name] for name in names if name in self}
        self.clear()
        self.update(kept)

    def check_states(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise Rejected where the tensor's states are not such as regions hold."""
        for index, state in enumerate(self.states.get(name, ())):
            if state.shape != shape or state.dtype != np.float32:
                raise Rejected(
                    f"tensor {name}: state {index} is {state.dtype} {list(state.shape)}; states "
                    f"are float32 and as large as the tensor, {list(shape)}"
                )
            if not np.isfinite(state).all():
                raise Rejected(f"tensor {name}: state {index} is not all finite; start without it")
