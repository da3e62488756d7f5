"""`slackwater.torch.DiLoCo`: workers that train apart, and meet at the aggregators now and then.

Each worker takes `sync_every` steps of its inner optimiser by itself. Then what they changed is
averaged and applied to the job's parameters by the outer optimiser, which the aggregators have, and
every worker goes on from there (Douillard et al. 2023, DiLoCo, algorithm 1; with an outer SGD of
rate 1 and no momentum it is local SGD, Stich 2018). Workers need no fast network between them:
a worker sends and receives the model once in `sync_every` steps.

With `fragments` F the model is divided into F parts, one of which is exchanged every
`sync_every / F` steps: the same bytes, at a Fth of the peak. With `delay` steps between sending and
receiving, training goes on meanwhile; `mix` is how much of the job's values is taken then
(Douillard et al. 2025, Streaming DiLoCo, algorithm 2: 1 - alpha).

    inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    optimizer = slackwater.torch.DiLoCo(model, inner, outer, sync_every=100, fragments=4)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
"""

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from slackwater.agent import Agent
from slackwater.agent.exit_hook import at_exit
from slackwater.common.base.errors import Rejected
from slackwater.schemas.tensors import DType, UpdateRule
from slackwater.torch.rules import hyper_of, rule_of
from slackwater.torch.tensors import fit_parameter, tensor_of


@dataclass(slots=True)
class _Part:
    """A parameter. `group`: its group of the outer optimiser; `anchor`: the job's values of it as
    this worker received them last, float32."""

    name: str
    parameter: torch.nn.Parameter
    group: int
    anchor: torch.Tensor


class DiLoCo:
    """Wraps `inner`, which trains `model` here, and `outer`, which the aggregators do.

    `inner` may be any optimiser and is stepped as it is; a scheduler of its rate works on it. Of
    `outer` the kind and the values of its groups are read, at each exchange anew: SGD with or
    without (Nesterov's) momentum, or what else the aggregators know (rules.py).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: torch.optim.Optimizer,
        *,
        sync_every: int,
        fragments: int | Sequence[torch.nn.Module] = 1,
        delay: int = 0,
        mix: float = 1.0,
        gradient_dtype: DType = "bfloat16",
        **agent: Any,
    ) -> None:
        """Returns when the job's parameters are in the model: rank 0's, or those of a job that this
        worker joins.

        `fragments`: into how many parts of about the same size the model is divided, or the modules
        that are one each; it must divide `sync_every`. `delay`: inner steps between sending a
        fragment and receiving it, fewer than between two fragments. `gradient_dtype`: what changes
        travel as. `agent`: what slackwater.Agent takes (job, rank, workers, servers, consistency,
        deadline_s, ...). Raises Rejected, and as Agent does.
        """
        parts = _parts(model, outer)
        self._fragments = _divided(model, parts, fragments)
        _check(sync_every, len(self._fragments), delay, mix)
        self.inner, self.outer = inner, outer
        self._every, self._delay, self._mix = sync_every, delay, mix
        self._span = sync_every // len(self._fragments)
        self._agent = self._start(gradient_dtype, agent)
        self._steps = self._agent.iteration * sync_every
        self._sent: set[int] = set()
        """Fragments that are on their way."""
        self._open = True
        self.synchronize()
        self._leave = at_exit(self.close, self._give_up)

    def _start(self, dtype: DType, options: dict[str, Any]) -> Agent:
        rule = rule_of(self.outer)
        hyper = hyper_of(rule, self.outer.param_groups[0], 1)
        groups = len(self.outer.param_groups)
        agent = Agent(
            tensors={p.name: p.anchor.numpy() for each in self._fragments for p in each},
            # A bucket has tensors of one group: so it has tensors of one fragment, too.
            groups={
                part.name: index * groups + part.group
                for index, fragment in enumerate(self._fragments)
                for part in fragment
            },
            gradient_dtype=dtype,
            update=msgspec.convert({"name": rule, **hyper}, UpdateRule),
            **options,
        )
        if agent.rule != rule:
            agent.__exit__(Rejected, None, None)
            raise Rejected(
                f"job {agent.job} trains by update rule {agent.rule}, and rank {agent.rank}'s "
                f"outer optimiser is {rule}: give every rank the same, and leave `update` out of "
                "the job's spec"
            )
        return agent

    @property
    def agent(self) -> Agent:
        return self._agent

    @property
    def steps(self) -> int:
        """Inner steps of this worker in the job's life; one that joins begins with the others'."""
        return self._steps

    @property
    def exchanges(self) -> int:
        """How often all fragments were exchanged."""
        return self._agent.iteration

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return those of the inner optimiser."""
        found: list[dict[str, Any]] = self.inner.param_groups
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an inner step; then receive and send the fragments whose turn it is. Raises
        GradientRefused where a change is not finite, and as Agent does."""
        if not self._open:
            raise Rejected("the optimiser is closed: its job goes on without this worker")
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        self._steps += 1
        arriving = self._turn(self._steps - self._delay)
        if self._delay and arriving in self._sent:
            self._receive(arriving)
        leaving = self._turn(self._steps)
        if leaving is not None:
            self._send(leaving)
            if not self._delay:
                self._receive(leaving)
        return loss

    def _turn(self, step: int) -> int | None:
        """Return which fragment is sent after this many steps; None: none is."""
        if step <= 0 or step % self._span:
            return None
        return (step // self._span - 1) % len(self._fragments)

    @torch.no_grad()  # type: ignore[untyped-decorator]  # mypy does not read torch.
    def _send(self, index: int) -> None:
        """Push by how much this worker is behind the job's values: the outer gradient."""
        rule, exchange = self._agent.rule, self._agent.iteration + 1
        self._sent.add(index)
        for part in self._fragments[index]:
            change = part.anchor - part.parameter.detach().to("cpu", torch.float32)
            tensor_of(self._agent.gradient_buffer(part.name)).copy_(change)
            hyper = hyper_of(rule, self.outer.param_groups[part.group], exchange)
            self._agent.push(part.name, None, **hyper)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _receive(self, index: int, *, whole: bool = False) -> None:
        """Wait for the job's new values of the fragment, and go on from them; `whole`: whatever
        `mix` says."""
        fragment = self._fragments[index]
        self._sent.discard(index)
        self._agent.wait([part.name for part in fragment])
        mix = 1.0 if whole else self._mix
        for part in fragment:
            part.anchor.copy_(tensor_of(self._agent.parameters_buffer(part.name)))
            if mix == 1.0:
                part.parameter.copy_(part.anchor)
            else:
                part.parameter.lerp_(part.anchor.to(part.parameter), mix)

    def synchronize(self) -> None:
        """Receive what is on its way, and give the model the job's parameters: the same on all
        workers that have exchanged as often. Steps since the last exchange are dropped."""
        for index in range(len(self._fragments)):
            self._receive(index, whole=True)

    def close(self, result: Any = None) -> None:
        """Give the model the job's parameters and tell the master that this rank is done, with
        `result` (small, JSON). Called at exit, unless the program fails. Idempotent."""
        if not self._open:
            return
        self.synchronize()
        self._open = False
        atexit.unregister(self._leave)
        self._agent.close(result)

    def _give_up(self, error: BaseException) -> None:
        self._agent.__exit__(type(error), error, None)

    def __getstate__(self) -> dict[str, Any]:
        raise Rejected("this optimiser is one worker of a job: it cannot be copied or pickled")


def _parts(model: torch.nn.Module, outer: torch.optim.Optimizer) -> dict[str, _Part]:
    """Return the trainable parameters in the model's order. Raises Rejected."""
    groups = {
        parameter: index
        for index, group in enumerate(outer.param_groups)
        for parameter in group["params"]
    }
    found: dict[str, _Part] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        fit_parameter(name, parameter)
        if parameter not in groups:
            raise Rejected(f"{name} is trained and not among the outer optimiser's parameters")
        anchor = parameter.detach().to("cpu", torch.float32, copy=True).contiguous()
        found[name] = _Part(name, parameter, groups[parameter], anchor)
    if not found:
        raise Rejected("the model has no trainable parameter; nothing would be exchanged")
    return found


def _divided(
    model: torch.nn.Module,
    parts: dict[str, _Part],
    fragments: int | Sequence[torch.nn.Module],
) -> list[list[_Part]]:
    """Divide the parameters. Raises Rejected."""
    if isinstance(fragments, int):
        return _even(list(parts.values()), fragments)
    by = {id(part.parameter): part for part in parts.values()}
    found: list[list[_Part]] = []
    for index, module in enumerate(fragments):
        own = [by.pop(id(p)) for p in module.parameters() if id(p) in by]
        if not own:
            raise Rejected(
                f"fragment {index} has no trainable parameter of the model that no fragment "
                "before it has"
            )
        found.append(own)
    if by:
        left = ", ".join(part.name for part in list(by.values())[:3])
        raise Rejected(f"no fragment has {left}: name modules that hold all of the model")
    return found


def _even(parts: list[_Part], count: int) -> list[list[_Part]]:
    """Divide them in their order into so many fragments, each up to its share of the elements."""
    if not 1 <= count <= len(parts):
        raise Rejected(f"fragments={count}: the model has {len(parts)} tensors; give 1 to as many")
    total = sum(part.anchor.numel() for part in parts)
    found: list[list[_Part]] = [[]]
    taken = 0
    for at, part in enumerate(parts):
        left, open_ones = len(parts) - at, count - len(found)
        is_full = taken >= total * len(found) / count
        if found[-1] and open_ones and (is_full or left == open_ones):
            found.append([])
        found[-1].append(part)
        taken += part.anchor.numel()
    return found


def _check(sync_every: int, fragments: int, delay: int, mix: float) -> None:
    """Raises Rejected."""
    if sync_every < 1 or sync_every % fragments:
        raise Rejected(
            f"sync_every={sync_every}, {fragments} fragments: give a number of steps that the "
            "number of fragments divides"
        )
    span = sync_every // fragments
    if not 0 <= delay < span:
        raise Rejected(f"delay={delay}: give 0 to {span - 1}, less than between two fragments")
    if not 0.0 < mix <= 1.0:
        raise Rejected(f"mix={mix}: give more than 0 and at most 1")
