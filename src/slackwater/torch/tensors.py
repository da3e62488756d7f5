"""A trainable parameter as the binding sees it: its place in the job, its gradient, its versions.

The gradient is copied once, from where autograd put it into the slot (converted on the way where
the slot's dtype is another). Autograd cannot be told where to put it, and adding to a zeroed slot
would cost twice the copy. `.grad` stays the program's own tensor, so that it may look at it.

The parameter's data is the Agent's buffer itself where it can be: over shared memory the master
copy. Two buffers alternate; that of version v is written again only by the update v + 2, for which
this worker must have pushed twice more, and so has ended the backward pass that needs it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from slackwater.agent.attachment import Array
from slackwater.common.base.errors import Rejected
from slackwater.schemas.tensors import DType

_BUFFERS_MAX = 3
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Trained:
    """One parameter of the job."""

    def __init__(
        self, name: str, parameter: torch.nn.Parameter, group: int, in_place: bool
    ) -> None:
        self.name, self.parameter, self.group = name, parameter, group
        self.passes = 0
        """Backward passes that reached it since the last step."""
        self.pushed = False
        self.stale = False
        """A step went by, and what it led to is not in the parameter yet."""
        self._in_place = (
            in_place
            and parameter.dtype == torch.float32
            and parameter.device.type == "cpu"
            and parameter.is_contiguous()
        )
        self._views: dict[int, torch.Tensor] = {}
        self._grad: torch.Tensor | None = None
        self._grad_version = 0
        self._version = parameter._version
        self._kind = (parameter.dtype, parameter.device)

    # Gradients ------------------------------------------------------------------------------------

    def write_gradient(self, buffer: Array) -> None:
        """Into the slot; zeros where no backward pass reached it."""
        grad = self.parameter.grad
        slot = tensor_of(buffer)
        if grad is None:
            slot.zero_()
        elif grad.layout != torch.strided:
            raise Rejected(
                f"{self.name}: its gradient is sparse ({grad.layout}); aggregators take dense "
                "ones: leave sparse=False"
            )
        else:
            if not (grad.data_ptr() == slot.data_ptr() and grad.dtype == slot.dtype):
                slot.copy_(grad)  # Else the program produced it there.
            self._grad_version = grad._version
        self._grad = grad

    @property
    def grad_changed(self) -> bool:
        """Since it was pushed."""
        grad = self.parameter.grad
        return grad is not self._grad or (grad is not None and grad._version != self._grad_version)

    def forget_gradient(self) -> None:
        self.passes, self.pushed, self._grad = 0, False, None

    # Parameters -----------------------------------------------------------------------------------

    def adopt(self, buffer: Array) -> None:
        """Make the buffer the parameter's values."""
        parameter = self.parameter
        if self._in_place:
            parameter.data = self._view(buffer)
        else:
            with torch.no_grad():
                parameter.copy_(tensor_of(buffer))
        self._version, self.stale = parameter._version, False

    def _view(self, buffer: Array) -> torch.Tensor:
        """Made once for each of the buffers that take turns."""
        address = buffer.__array_interface__["data"][0]
        view = self._views.get(address)
        if view is None:
            if len(self._views) > _BUFFERS_MAX:  # The bucket moved: the old ones are history.
                self._views.clear()
            view = self._views[address] = torch.from_numpy(buffer)
        return view

    @property
    def fault(self) -> str:
        """Name the program's change of the parameter that cannot stand; empty: there is none."""
        parameter = self.parameter
        if parameter._version != self._version:
            return "was written to by the program: its values are the job's"
        if (parameter.dtype, parameter.device) != self._kind:
            return f"became {parameter.dtype} on {parameter.device} after it joined the job"
        return ""

    def let_go(self) -> None:
        """The program keeps the values, in memory of its own."""
        if self._in_place:
            self.parameter.data = self.parameter.data.clone()
        self._views.clear()


def tensor_of(buffer: Any) -> torch.Tensor:
    """Return an array of the Agent's as a tensor of the same memory: numpy's, or cupy's on a GPU.
    uint16 stands for bfloat16, which neither knows."""
    if isinstance(buffer, np.ndarray):
        tensor = torch.from_numpy(buffer)
    else:
        tensor = torch.as_tensor(buffer, device=f"cuda:{buffer.device.id}")
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def trained(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, in_place: bool
) -> dict[torch.nn.Parameter, Trained]:
    """Every trainable parameter of the optimiser, by group and then in the model's order: the
    aggregators put neighbours of a group together. Raises Rejected."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = {parameter: place for place, parameter in enumerate(names)}
    found: dict[torch.nn.Parameter, Trained] = {}
    for index, group in enumerate(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if parameter.requires_grad]
        for parameter in own:
            if parameter not in names:
                raise Rejected(
                    f"a parameter of shape {list(parameter.shape)} in group {index} is not the "
                    "model's; give the module whose parameters the optimiser updates"
                )
        for parameter in sorted(own, key=order.__getitem__):
            name = names[parameter]
            fit_parameter(name, parameter)
            found[parameter] = Trained(name, parameter, index, in_place)
    if not found:
        raise Rejected("the optimiser has no trainable parameter; nothing would be pushed")
    return found


def fit_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    """Raise Rejected where aggregators cannot hold the parameter."""
    if torch.nn.parameter.is_lazy(parameter):
        raise Rejected(f"{name} has no shape yet: run a forward pass before wrapping")
    if parameter.dtype not in _FLOATS:
        raise Rejected(
            f"{name} is {parameter.dtype}; aggregators hold parameters in float32, models "
            "may have them in float32, float16 or bfloat16"
        )


def initial_values(tensors: Iterable[Trained]) -> dict[str, Array]:
    return {
        t.name: t.parameter.detach().to("cpu", torch.float32).contiguous().numpy() for t in tensors
    }


def dtype_of_gradients(given: DType | None, parameters: Iterable[torch.nn.Parameter]) -> DType:
    """Return the dtype of slots: as given, else the parameters' own where all have one."""
    if given is not None:
        return given
    dtypes = {parameter.dtype for parameter in parameters}
    if dtypes == {torch.float16}:
        return "float16"
    return "bfloat16" if dtypes == {torch.bfloat16} else "float32"


def needed(
    model: torch.nn.Module, tensors: Mapping[torch.nn.Parameter, Trained]
) -> list[tuple[torch.nn.Module, list[Trained]]]:
    """For each module, which parameters its forward may read. One that has parameters of its own
    may use its children's without calling them (torch.nn.MultiheadAttention does)."""
    found: list[tuple[torch.nn.Module, list[Trained]]] = []
    for module in model.modules():
        if any(p in tensors for p in module.parameters(recurse=False)):
            own: dict[str, Any] = {t.name: t for p in module.parameters() if (t := tensors.get(p))}
            found.append((module, list(own.values())))
    return found
