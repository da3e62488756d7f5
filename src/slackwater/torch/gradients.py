"""`slackwater.torch.Optimizer(..., aggregate="gradients")`: the optimiser stays in the program.

Aggregators only add the workers' gradients up (update rule `sum`). When a backward pass has ended,
each parameter's `.grad` holds the mean over all workers, on every worker the same bits; the wrapped
optimiser then steps by itself. So what a script does between backward and step is as in plain
PyTorch: clipping by the global norm, a GradScaler that skips steps (all workers see the same sums,
and skip alike), any optimiser, groups that come later, states that are saved and loaded.

The seam is DistributedDataParallel's (Li et al. 2020, section 3.2), without its process group: a
pass pushes gradients while it goes on, and waits for the sums at its end; `no_sync` leaves that
out. Each exchange is of what `.grad` holds by then: the mean so far and what this worker added.

A gradient that no worker has stays None, as in plain PyTorch: a slot without one begins with -0,
which a slot with one never does, and a sum begins with -0 only where all its terms do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import numpy as np
import torch

from slackwater.agent.attachment import Array
from slackwater.agent.initial import Initial
from slackwater.common.base.errors import Rejected
from slackwater.schemas.tensors import DType
from slackwater.torch.optimizer import Optimizer
from slackwater.torch.tensors import fit_parameter, initial_values, tensor_of

_RULE: Final = "sum"


class _Exchanged:
    """One parameter of the job, and its gradient's way to the aggregators and back."""

    group: Final = 0
    """A sum has no hyper-parameters: parameters of any group may share a bucket."""

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.pushed = False
        self._mean: torch.Tensor | None = None
        """The gradient that the last exchange left."""

    @property
    def foreign(self) -> bool:
        """Say whether the program put another gradient here since the last exchange."""
        grad = self.parameter.grad
        return grad is not None and grad is not self._mean

    def write(self, buffer: Array, share: float) -> None:
        """Write this worker's part of the mean into the slot. Raises Rejected."""
        slot, grad = tensor_of(buffer), self.parameter.grad
        if grad is None:
            slot.fill_(-0.0)
            return
        if grad.layout != torch.strided:
            raise Rejected(
                f"{self.name}: its gradient is sparse ({grad.layout}); aggregators take dense "
                "ones: leave sparse=False"
            )
        if grad.device == slot.device:
            torch.mul(grad.detach(), share, out=slot)
        else:
            slot.copy_(grad.detach() * share)
        slot.view(-1)[:1].add_(0.0)  # -0 becomes 0.

    def read(self, buffer: Array) -> None:
        """Make the mean the parameter's gradient."""
        parameter = self.parameter
        if parameter.grad is None:
            first = buffer.reshape(-1)[0]
            if first == 0.0 and np.signbit(first):
                self._mean = None
                return  # No worker has one.
            parameter.grad = torch.empty_like(parameter)
        self._mean = parameter.grad
        self._mean.detach().copy_(tensor_of(buffer))

    def let_go(self) -> None:
        """Do nothing: values and gradients are the program's own."""


class GradientOptimizer(Optimizer):
    """Wraps any torch optimiser whose parameters are `model`'s."""

    made = False
    """One was, in this process: its gradients go through aggregators without a wrapped model."""

    _step_supports_amp_scaling = False
    """A GradScaler looks for infinities itself, in sums that are the same on all workers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        aggregate: Literal["gradients"] = "gradients",
        overlap: bool = True,
        backward_passes_per_step: int = 1,
        gradient_dtype: DType | None = None,
        **agent: Any,
    ) -> None:
        """Return when rank 0's parameters are in the model.

        `overlap`: push during backward; False: at its end. `backward_passes_per_step`: only every
        so many passes exchange gradients; `no_sync` says it pass by pass. `agent`: what
        slackwater.Agent takes; `wait` and `in_place` mean nothing here. Raises Rejected, and as
        Agent does.
        """
        self._joined = False
        if backward_passes_per_step < 1:
            raise Rejected(f"backward_passes_per_step is {backward_passes_per_step}, at least 1")
        torch.optim.Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)
        self._inner, self._overlap = optimizer, overlap
        self._share_state()
        self._passes_per_step, self._passes = backward_passes_per_step, 0
        self._syncs, self._added, self._fresh = True, False, False
        self._task: int | None = None
        self._tensors = _exchanged(optimizer, model)
        self._all = list(self._tensors.values())
        if agent.setdefault("consistency", "synchronous") != "synchronous":
            raise Rejected(
                f"consistency is {agent['consistency']}: gradients are added up over all workers; "
                'leave it out, or let aggregators step (aggregate="updates")'
            )
        own = {name: agent[name] for name in agent if name not in ("wait", "in_place")}
        values = Initial(initial_values(self._all))
        self._agent = self._start(_RULE, gradient_dtype, values, own)
        self._check_job(optimizer)
        self._share = 1.0 / self._agent.workers
        with torch.no_grad():
            for each in self._all:
                buffer = self._agent.parameters_buffer(each.name)
                each.parameter.copy_(tensor_of(buffer))
        self._iteration = 0
        GradientOptimizer.made = True
        self._begin(model)

    def _share_state(self) -> None:
        """Have groups and states in common with the wrapped optimiser."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def _first_hyper(self, rule: str) -> dict[str, float]:
        return {}

    def _check_job(self, optimizer: torch.optim.Optimizer) -> None:
        agent, why = self._agent, ""
        if not agent.untouched:
            why = (
                f"job {agent.job} has sums of another run of its program; start this one under "
                "another id, and all its workers together"
            )
        elif isinstance(optimizer, torch.optim.LBFGS) and agent.workers > 1:
            why = (
                "LBFGS decides by each worker's own loss how often it evaluates, and workers would "
                "wait for one another; use another optimiser, or one worker"
            )
        if why:
            agent.__exit__(Rejected, None, None)
            raise Rejected(why)

    def _hooks_of_model(self, model: torch.nn.Module) -> list[Any]:
        return []  # The parameters are the program's own.

    def _part(self) -> None:
        self._joined = False
        super()._part()

    # Backward: exchange ---------------------------------------------------------------------------

    def _accumulated(self, tensor: Any) -> None:
        """Note that a backward pass has added to this parameter's gradient."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        self._added = True
        if not self._exchanges:
            return
        if tensor.pushed:
            raise Rejected(
                f"{tensor.name} was reached again after its gradient was pushed: a backward pass "
                "failed half-way, or a checkpointed block shares it (use_reentrant=True); give "
                "overlap=False"
            )
        if self._overlap:
            self._push(tensor)

    @property
    def _exchanges(self) -> bool:
        """Say whether the pass that goes on ends with an exchange."""
        return self._syncs and self._passes + 1 >= self._passes_per_step

    def _ended(self) -> None:
        """Called when a backward pass is over."""
        self._task = None
        if not self._added or not self._syncs:
            return
        if self._exchanges:
            self._exchange()
        else:
            self._passes += 1

    def _push(self, tensor: Any) -> None:
        with torch.no_grad():
            tensor.write(self._agent.gradient_buffer(tensor.name), self._share)
        self._agent.push(tensor.name)
        tensor.pushed = True

    def _exchange(self) -> None:
        for tensor in self._all:
            if not tensor.pushed:
                self._push(tensor)
        with torch.no_grad():
            for tensor in self._all:
                tensor.read(self._agent.parameters_buffer(tensor.name))
                tensor.pushed = False
        self._iteration = self._agent.iteration
        self._passes, self._added, self._fresh = 0, False, True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward passes within exchange nothing, the next one after does.
        All workers must leave out the same passes."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    # Step -----------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """Exchanges of gradients in this run of the job."""
        return self._iteration

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the wrapped optimiser step. Gradients that no backward pass has exchanged (the last
        was one of `no_sync`, or the program set them itself) are exchanged before."""
        if not self._joined:
            raise Rejected("the optimiser is closed: its job goes on without this worker")
        if closure is None:
            if self._fresh or all(t.parameter.grad is None for t in self._all):
                self.synchronize()
            else:  # The program may have written to gradients that were there.
                self._exchange()
            result = self._inner.step()
        else:
            result = self._inner.step(closure)
        self._fresh = False
        return result

    def synchronize(self) -> None:
        """Exchange the gradients, if the last backward pass has not, or the program has put others
        in their place since."""
        if self._joined and (self._added or any(tensor.foreign for tensor in self._all)):
            self._exchange()

    def close(self, result: Any = None) -> None:
        """Tell the master that this rank is done, with `result` (small, JSON). Called at exit,
        unless the program fails. Idempotent."""
        if self._joined:
            self._part()
            self._agent.close(result)

    # The rest of a torch optimiser ----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that the job knows: the model's that were trainable, or in a
        group, when the optimiser was wrapped. Raises Rejected for others."""
        if not self._joined:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        for each in listed:
            parameter = each[1] if isinstance(each, tuple) else each
            if parameter not in self._tensors:
                raise Rejected(
                    f"a parameter of shape {list(parameter.shape)} is not one of the job's, which "
                    "are fixed when it begins: have it in the model, with requires_grad, when the "
                    "optimiser is wrapped; it may be frozen afterwards"
                )
        self._inner.add_param_group({**param_group, "params": listed})

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimiser's, with its state."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the wrapped optimiser: every worker loads the same."""
        self._inner.load_state_dict(state_dict)
        self._share_state()


def _exchanged(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> dict[torch.nn.Parameter, _Exchanged]:
    """Return the model's parameters that are trainable or in a group, in the order of backward.
    Raises Rejected."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    grouped = {p for group in optimizer.param_groups for p in group["params"]}
    for parameter in grouped:
        if parameter not in names:
            raise Rejected(
                f"a parameter of shape {list(parameter.shape)} is not the model's; give the module "
                "whose parameters the optimiser updates"
            )
    found = {
        parameter: _Exchanged(name, parameter)
        for parameter, name in reversed(names.items())
        if parameter.requires_grad or parameter in grouped
    }
    for each in found.values():
        fit_parameter(each.name, each.parameter)
    if not found:
        raise Rejected("the model has no trainable parameter; nothing would be pushed")
    return found
