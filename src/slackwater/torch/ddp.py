"""Unadapted DistributedDataParallel scripts: aggregators add their gradients up.

`install` lets each model that a program wraps in DistributedDataParallel register a communication
hook. A hook is torch's own seam: the gradients of a backward pass come in buckets, and what the
hook returns is what the optimiser sees. So the optimiser stays in the script, and with it clipping,
loss scaling, `no_sync`, `join` and whatever else a script does between backward and step.

The job's tensors are the model's parameters, not DDP's buckets: DDP rebuilds those after its first
iteration, and the order may differ from attempt to attempt. Each gradient is divided by the number
of workers as it is copied into its slot, as DDP divides it, and the aggregator adds the slots up in
rank order (update rule `sum`). With two workers these are the bits of gloo's all-reduce.

Aggregators work while backward goes on. The sums are waited for once, at the last bucket: DDP waits
for all of them there, too.
"""

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slackwater.agent import Agent
from slackwater.agent.identity import JOB, rank_of, workers_of
from slackwater.common.base.errors import Rejected, SlackwaterError
from slackwater.schemas.jobs import AGGREGATE_VARIABLE
from slackwater.schemas.tensors import DType, UpdateRule
from slackwater.torch.tensors import tensor_of

DTYPES: Final[dict[torch.dtype, DType]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
OPEN_S: Final = 30.0
"""Seconds in which the job's regions must be there, or the script trains on plain DDP."""
WAIT_S: Final = 1800.0
"""Seconds to wait for the sums of an iteration: as long as gloo does, which is patient with a rank
that evaluates while others wait."""
LET_GO_S: Final = 0.05
"""Seconds in which gloo's threads can free what their last collectives held before the interpreter
is taken apart: one that does so later aborts the process (torch 2.13, pytorch/pytorch#190489)."""


def asked() -> Literal["auto", "on", "off"]:
    """Return what the job's user wants: `on` fails where `auto` trains on plain DDP."""
    if not os.environ.get(JOB):
        return "off"
    said = os.environ.get(AGGREGATE_VARIABLE, "auto")
    return "on" if said == "on" else "off" if said == "off" else "auto"


class _Launched(NamedTuple):
    """A bucket whose gradients were pushed, and whose sums DDP waits for."""

    names: list[str]
    gradients: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class Sums:
    """The communication hook of one model."""

    def __init__(self, model: DistributedDataParallel, agent: Agent, workers: int) -> None:
        self.agent, self.model = agent, weakref.ref(model)
        self._share = 1.0 / workers
        self._names = {p: name for name, p in model.module.named_parameters()}
        self._launched: list[_Launched] = []
        self.before: Callable[[dist.GradBucket], None] | None = None
        """Sees each bucket with this worker's own gradients."""
        self.replaced: tuple[Callable[..., Any], Any] | None = None
        """A hook of the program's own and its state, which came later."""

    def give_way(self, hook: Callable[..., Any], state: object) -> None:
        """Let a hook of the program's own do it, from the next bucket on."""
        self.replaced = hook, state
        self.agent.__exit__(Rejected, None, None)

    def add_up(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Push the gradients of a bucket; at an iteration's last one, wait for all sums."""
        if self.replaced is not None:
            hook, own = self.replaced
            return hook(own, bucket)
        if self.before is not None:
            self.before(bucket)
        names = [self._names[parameter] for parameter in bucket.parameters()]
        gradients = bucket.gradients()
        for name, gradient in zip(names, gradients, strict=True):
            slot = tensor_of(self.agent.gradient_buffer(name))
            if gradient.device == slot.device:
                torch.mul(gradient, self._share, out=slot)
            else:
                slot.copy_(gradient * self._share)
            self.agent.push(name)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._launched.append(_Launched(names, gradients, bucket.buffer(), future))
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        launched, self._launched = self._launched, []
        for each in launched:
            self.agent.wait(each.names)
            for name, gradient in zip(each.names, each.gradients, strict=True):
                gradient.copy_(tensor_of(self.agent.parameters_buffer(name)))
            each.future.set_result(each.buffer)


def unfit(model: DistributedDataParallel, wrapped_before: int, mode: str) -> str:
    """Say why no hook can serve the model; empty: one can."""
    group = model.process_group
    ranks, workers = dist.get_world_size(group), workers_of()
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    if wrapped_before:
        return "it is the second model that this program wraps, and a job has one list of tensors"
    if (ranks, dist.get_rank(group)) != (workers, rank_of()):
        return (
            f"its process group has {ranks} ranks, and this one is {dist.get_rank(group)}; the job "
            f"has {workers} workers, and this one is {rank_of()}"
        )
    if getattr(model, "mixed_precision", None) is not None:
        return "DDP's own mixed precision registers another hook; use torch.autocast"
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    if len(kinds) > 1 or (parameters and parameters[0].dtype not in DTYPES):
        return f"its parameters are {' and '.join(kinds)}: they must be of one type, {_kinds()}"
    devices = sorted({p.device.type for p in parameters})
    if devices != ["cpu"] and mode != "on":
        return (
            f"its parameters are on {' and '.join(devices)}, where NCCL is at hand; "
            "with `submit --aggregate on` aggregators add them up"
        )
    if any(getattr(module, "sparse", False) is True for module in model.module.modules()):
        return "it has sparse gradients; aggregators take dense ones: leave sparse=False"
    return ""


def _kinds() -> str:
    return ", ".join(DTYPES.values())


def attach(model: DistributedDataParallel, wrapped_before: int) -> Sums | None:
    """Let aggregators add up the model's gradients, if every rank can; else say why and return
    None. Called by all ranks at once. Raises Rejected where the user insists."""
    mode = asked()
    why, agent = unfit(model, wrapped_before, mode), None
    if not why:
        try:
            agent = _agent(model)
        except SlackwaterError as error:
            why = str(error)
    if not _all_agree(model, not why):
        if agent is not None:
            agent.__exit__(Rejected, None, None)
            why = "another rank cannot have its gradients added up by aggregators, and says why"
        if mode == "on":
            raise Rejected(f"--aggregate on: {why}")
        _say(f"plain DistributedDataParallel: {why}")
        return None
    assert agent is not None
    sums = Sums(model, agent, dist.get_world_size(model.process_group))
    model.register_comm_hook(None, sums.add_up)
    if rank_of() == 0:
        elements = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
        _say(
            f"aggregators add up the gradients of {len(agent.tensors)} tensors, "
            f"{elements:,} elements, of {workers_of()} workers"
        )
    return sums


def _agent(model: DistributedDataParallel) -> Agent:
    ignored = getattr(model, "parameters_to_ignore", ())
    trained = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    first = next(iter(trained.values()), None)
    if first is None:
        raise Rejected("it has no parameter that is trained")
    agent = Agent(
        tensors={name: tuple(p.shape) for name, p in reversed(trained.items())},
        update=UpdateRule(name="sum"),
        gradient_dtype=DTYPES[first.dtype],
        deadline_s=WAIT_S,
        open_s=OPEN_S,
        device=_device_of(first),
    )
    if agent.untouched:
        return agent
    agent.__exit__(Rejected, None, None)
    raise Rejected(
        f"job {agent.job} has sums of another run of its program; start this one under another id"
    )


def _device_of(parameter: torch.nn.Parameter) -> str:
    """Say where the Agent keeps slots and sums: on the parameters' GPU, if cupy is at hand."""
    if parameter.device.type != "cuda" or find_spec("cupy") is None:
        return ""
    return f"cuda:{parameter.device.index}"


def _all_agree(model: DistributedDataParallel, mine: bool) -> bool:
    """Say whether all ranks can. Each waits for the others here."""
    device = next((p.device for p in model.module.parameters()), torch.device("cpu"))
    flag = torch.tensor([1.0 if mine else 0.0], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=model.process_group)
    return bool(flag.item())


def _say(text: str) -> None:
    sys.stderr.write(f"slackwater: {text}\n")


# How it comes into a program ----------------------------------------------------------------------


class _Wrapped:
    """Notes the models that this process has wrapped so far."""

    models = 0
    sums: Sums | None = None
    group: dist.ProcessGroup | None = None
    """The last model's. A model that is freed after its group was destroyed would free it, without
    releasing the interpreter's lock, and wait for a thread of gloo that may be waiting for the lock
    (torch 2.13)."""


def hooked_sums(model: DistributedDataParallel) -> Sums | None:
    """Return the hook by which aggregators add up this model's gradients, if one does."""
    sums = _Wrapped.sums
    return sums if sums is not None and sums.model() is model and sums.replaced is None else None


def install() -> None:
    """Let each model that is wrapped from now on have its gradients added up. Call it once."""
    atexit.register(time.sleep, LET_GO_S)
    begin = DistributedDataParallel.__init__
    register = DistributedDataParallel.register_comm_hook

    def wrap(self: DistributedDataParallel, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        _Wrapped.group = self.process_group
        before, _Wrapped.models = _Wrapped.models, _Wrapped.models + 1
        sums = attach(self, before)
        _Wrapped.sums = _Wrapped.sums or sums

    def register_own(self: DistributedDataParallel, state: object, hook: Any) -> None:
        sums = _Wrapped.sums
        if sums is None or sums.model() is not self or sums.replaced is not None:
            register(self, state, hook)
            return
        sums.give_way(hook, state)
        _say("plain DistributedDataParallel: the program registers a communication hook of its own")

    DistributedDataParallel.__init__ = wrap
    DistributedDataParallel.register_comm_hook = register_own
