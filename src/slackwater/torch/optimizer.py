"""`slackwater.torch.Optimizer`: an ordinary torch optimiser whose steps the aggregators take.

Each parameter's gradient is pushed by a hook as soon as backward has accumulated it, while the
layers before are still computed (Gu et al. 2021, section 2.1: aggregation is per tensor). `step`
only says that the iteration is whole; each module waits for its own parameters before its next
forward. So communication overlaps with both passes, and a script keeps its shape:

    zero_grad -> forward (waits, layer by layer) -> backward (pushes) -> step -> scheduler.step

What would be wrong in silence is refused: hyper-parameters or gradients that change after they were
pushed, parameters that the program writes to, and parameters that were read without a wait.
"""

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
import torch

from slackwater.agent import Agent
from slackwater.agent.exit_hook import at_exit
from slackwater.agent.initial import Initial
from slackwater.common.base.errors import Rejected
from slackwater.schemas.tensors import DType, UpdateRule
from slackwater.torch.rules import check_constant, hyper_of, rule_of
from slackwater.torch.states import initial_of, states_by_index
from slackwater.torch.tensors import Trained, dtype_of_gradients, initial_values, needed, trained


class Optimizer(torch.optim.Optimizer):  # type: ignore[misc]  # mypy does not read torch.
    """Wraps `optimizer` (SGD, Adam, AdamW, NAdam, Adagrad, RMSprop) of `model`'s parameters."""

    _step_supports_amp_scaling = True
    """Makes a GradScaler hand over its scale, so that it can be refused."""

    def __new__(cls, *arguments: Any, aggregate: str = "updates", **options: Any) -> "Optimizer":
        if aggregate == "gradients" and cls is Optimizer:
            from slackwater.torch.gradients import GradientOptimizer

            return torch.optim.Optimizer.__new__(GradientOptimizer)  # type: ignore[no-any-return]
        return torch.optim.Optimizer.__new__(cls)  # type: ignore[no-any-return]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        aggregate: Literal["updates", "gradients"] = "updates",
        overlap: bool = True,
        wait: Literal["forward", "step"] = "forward",
        in_place: bool = True,
        backward_passes_per_step: int = 1,
        gradient_dtype: DType | None = None,
        **agent: Any,
    ) -> None:
        """Returns when the job's parameters are in the model: rank 0's, or those of a job that this
        process joins again.

        `aggregate`: "gradients" leaves the optimiser in the program (gradients.py), for what is
        refused here. `overlap`: push during backward; False: in `step`, so that gradients may be
        clipped or otherwise changed before. `wait`: "forward": before each module's forward;
        "step": in `step`, for a model that reads parameters in other ways. `in_place`: parameters
        are views of the Agent's buffers. `agent`: what slackwater.Agent takes (job, rank, workers,
        servers, url, transport, consistency, staleness, deadline_s, ...). Raises Rejected, and as
        Agent does.
        """
        self._joined = False
        if backward_passes_per_step < 1:
            raise Rejected(f"backward_passes_per_step is {backward_passes_per_step}, at least 1")
        if aggregate != "updates":
            raise Rejected(f'aggregate is {aggregate!r}: "updates" or "gradients"')
        if wait not in ("forward", "step"):
            raise Rejected(f'wait is {wait!r}: "forward" or "step"')
        rule = rule_of(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._overlap, self._wait_in_step = overlap, wait == "step"
        self._passes_per_step = backward_passes_per_step
        self._tensors: dict[torch.nn.Parameter, Any] = trained(self, model, in_place)
        self._all: list[Any] = list(self._tensors.values())
        self._frozen = [
            p for group in self.param_groups for p in group["params"] if p not in self._tensors
        ]
        brought = initial_of(rule, optimizer, self._all, initial_values(self._all))
        self._brought, self._before = brought, brought.updates
        self._agent = self._start(rule, gradient_dtype, brought, agent)
        self._iteration = self._agent.iteration
        self._hypers: dict[int, dict[str, float]] = {}
        self._firsts: dict[int, dict[str, float]] = {}
        self._adopt(self._all)
        self._begin(model)

    def _begin(self, model: torch.nn.Module) -> None:
        self._joined = True
        self._handles = self._hooks_of_parameters() + self._hooks_of_model(model)
        self._leave = at_exit(self.close, self._give_up)

    def _start(
        self, rule: str, dtype: DType | None, tensors: Initial, options: dict[str, Any]
    ) -> Agent:
        agent = self._make_agent(
            tensors=tensors,
            groups={t.name: t.group for t in self._all},
            gradient_dtype=dtype_of_gradients(dtype, self._tensors),
            update=msgspec.convert({"name": rule, **self._first_hyper(rule)}, UpdateRule),
            **options,
        )
        if agent.rule != rule:
            agent.__exit__(Rejected, None, None)
            raise Rejected(
                f"job {agent.job} trains by update rule {agent.rule}, as its spec or the rank that "
                f"registered first says; rank {agent.rank}'s optimiser is {rule}: give every rank "
                "the same optimiser, and leave `update` out of the job's spec or make it that one"
            )
        return agent

    def _make_agent(self, **options: Any) -> Agent:
        return Agent(**options)

    def _first_hyper(self, rule: str) -> dict[str, float]:
        """Return the first group's values, for the job's record; each push carries its own."""
        return hyper_of(rule, self.param_groups[0], self._before + 1)

    def _hooks_of_parameters(self) -> list[Any]:
        """Closures over a weak reference: a copied model (EMA) must not copy this object."""
        this = weakref.ref(self)

        def accumulated(parameter: torch.Tensor) -> None:
            if (optimizer := this()) is not None:
                optimizer._accumulated(optimizer._tensors[parameter])

        return [_hooked(tensor.parameter, accumulated) for tensor in self._all]

    def _hooks_of_model(self, model: torch.nn.Module) -> list[Any]:
        this = weakref.ref(self)

        def before(tensors: list[Trained]) -> Callable[..., None]:
            def forward(module: torch.nn.Module, arguments: Any) -> None:
                if (optimizer := this()) is not None:
                    optimizer._wait_for(tensors)

            return forward

        def before_saving(*arguments: Any) -> None:
            if (optimizer := this()) is not None:
                optimizer.synchronize()

        def before_loading(*arguments: Any) -> None:
            raise Rejected(
                "the parameters belong to the job by now: load a checkpoint into the model before "
                "the optimiser is wrapped"
            )

        handles: list[Any] = [
            module.register_forward_pre_hook(before(tensors))
            for module, tensors in needed(model, self._tensors)
        ]
        handles.append(model.register_state_dict_pre_hook(before_saving))
        handles.append(model.register_load_state_dict_pre_hook(before_loading))
        return handles

    # The job --------------------------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        return self._agent

    @property
    def iteration(self) -> int:
        """Steps taken in the job's life; a program that is started again goes on from here."""
        return self._iteration

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes after which a gradient is pushed; it may change between two steps."""
        return self._passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        """Raises Rejected in the middle of an iteration."""
        if passes < 1 or any(tensor.passes for tensor in self._all):
            raise Rejected(
                f"backward_passes_per_step={passes}: give at least 1, and before the first "
                "backward pass of an iteration"
            )
        self._passes_per_step = passes

    def close(self, result: Any = None) -> None:
        """Wait for the last step, give the model its parameters, and tell the master that this rank
        is done, with `result` (small, JSON). Called at exit, unless the program fails. Idempotent.
        """
        if not self._joined:
            return
        self.synchronize()
        self._joined = False
        self._part()
        self._agent.close(result)

    def _part(self) -> None:
        atexit.unregister(self._leave)
        for handle in self._handles:
            handle.remove()
        for tensor in self._all:
            tensor.let_go()

    def _give_up(self, error: BaseException) -> None:
        self._agent.__exit__(type(error), error, None)

    # Backward: push -------------------------------------------------------------------------------

    def _accumulated(self, tensor: Trained) -> None:
        """Note that a backward pass has added to this parameter's gradient."""
        if tensor.stale:
            raise Rejected(
                f"{tensor.name} was read before its newest values were waited for (not by its "
                'module\'s forward); give wait="step"'
            )
        tensor.passes += 1
        if tensor.passes > self._passes_per_step:
            raise Rejected(
                f"{tensor.name}: backward pass {tensor.passes} since the last step, "
                f"backward_passes_per_step is {self._passes_per_step}; set it to as many, or give "
                'aggregate="gradients" where the count changes'
            )
        if self._overlap and tensor.passes == self._passes_per_step:
            self._push(tensor)

    def _push(self, tensor: Trained) -> None:
        hyper = self._hypers.get(tensor.group)
        if hyper is None:
            hyper = self._hypers[tensor.group] = self._hyper(tensor.group)
        tensor.write_gradient(self._agent.gradient_buffer(tensor.name))
        self._agent.push(tensor.name, None, **hyper)
        tensor.pushed = True

    def _hyper(self, group: int) -> dict[str, float]:
        rule = self._agent.rule
        step = self._before + self._iteration + 1
        hyper = hyper_of(rule, self.param_groups[group], step)
        check_constant(rule, hyper, self._firsts.setdefault(group, hyper))
        return hyper

    # Step -----------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """All of this worker's gradients of the iteration are there: push what is not pushed yet. A
        parameter that no backward pass reached is pushed as zeros."""
        if not self._joined:
            raise Rejected("the optimiser is closed: its job goes on without this worker")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        self.synchronize()  # Includes parameters that neither pass came by.
        if self._iteration:
            self._brought.states.clear()  # No region begins with them any more.
        for tensor in self._all:
            if not tensor.pushed:
                self._push(tensor)
            tensor.forget_gradient()
            tensor.stale = True
        self._hypers.clear()
        self._iteration += 1
        if self._wait_in_step:
            self.synchronize()
        return loss

    def _check(self) -> None:
        """Check that the pushed gradients are still those that the program means. Raises
        Rejected."""
        if getattr(self, "grad_scale", None) is not None:
            raise Rejected(
                "a GradScaler skips steps on its own, which other workers would wait for; give "
                'aggregate="gradients", where all skip alike, or train in bfloat16 without one'
            )
        for group, hyper in self._hypers.items():
            now = self._hyper(group)
            changed = [name for name in hyper if hyper[name] != now[name]]
            if changed:
                name = changed[0]
                raise Rejected(
                    f"{name} of group {group} became {now[name]} after gradients were pushed with "
                    f"{hyper[name]}; change it after step(), or give overlap=False"
                )
        for tensor in self._all:
            if tensor.pushed and tensor.grad_changed:
                raise Rejected(
                    f"{tensor.name}: its gradient was changed after it was pushed; to clip by the "
                    'norm over all workers give aggregate="gradients", to change each worker\'s '
                    "own gradient overlap=False"
                )
            if not tensor.parameter.requires_grad:
                raise Rejected(
                    f"{tensor.name} was frozen after it joined the job; freeze it before, or give "
                    'aggregate="gradients"'
                )
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise Rejected(
                    f"a parameter of shape {list(parameter.shape)} was unfrozen after the "
                    "optimiser was wrapped; wrap it when all that it trains is trainable, or give "
                    'aggregate="gradients"'
                )

    # Forward: pull --------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every step taken so far is in the model."""
        if self._joined:
            self._wait_for(self._all)

    def _wait_for(self, tensors: Iterable[Trained]) -> None:
        """Wait for those of the tensors that are stale: others may be pushed by now, while a second
        forward of the same step needs the ones that the first left out."""
        stale = [tensor for tensor in tensors if tensor.stale]
        if stale:
            self._adopt(stale)

    def _adopt(self, tensors: Sequence[Trained]) -> None:
        for tensor in tensors:
            fault = tensor.fault
            if fault:
                raise Rejected(f"{tensor.name} {fault}")
        self._agent.wait([tensor.name for tensor in tensors])
        for tensor in tensors:
            tensor.adopt(self._agent.parameters_buffer(tensor.name))

    # The rest of a torch optimiser ----------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._joined:
            raise Rejected(
                "a job's tensors are fixed when it begins, and no group can be added: give all "
                'groups before the optimiser is wrapped, or aggregate="gradients"'
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return what the wrapped optimiser's would be after the steps taken so far: plain
        PyTorch's loads it. Each worker reads the states from the aggregators."""
        if not self._joined or any(tensor.pushed for tensor in self._all):
            raise Rejected(
                "state_dict() between backward() and step(), or after close(): the aggregators "
                "hold another step's state, or none; call it after step(), before close()"
            )
        self.synchronize()
        found: dict[str, Any] = super().state_dict()
        states, rule = self._agent.states(), self._agent.rule
        found["state"] = states_by_index(rule, self.param_groups, self._tensors, states)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters of a checkpoint. Raises Rejected where it has an optimiser's state."""
        if state_dict["state"]:
            raise Rejected(
                "the checkpoint holds an optimiser's state, and the aggregators have begun with "
                "this job's: load it into the optimiser before that is wrapped, or give "
                '{**checkpoint, "state": {}} for the hyper-parameters alone'
            )
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise Rejected("this optimiser is one worker of a job: it cannot be copied or pickled")


def _hooked(parameter: torch.nn.Parameter, accumulated: Callable[[torch.Tensor], None]) -> Any:
    """Register the hook; one on a frozen parameter counts once it is trainable."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(accumulated)
    parameter.requires_grad_(trainable)
    return handle
