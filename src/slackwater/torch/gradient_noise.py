"""Squared lengths of gradients within one iteration: what the gradient noise scale is told by.

    small_sqr   mean squared length of the gradients of `batch_small` examples each
    large_sqr   squared length of their mean, over `batch_large` examples

Two ways (Qiao, thesis, section 3.3.1 and appendix A.1; McCandlish et al., appendix A.1):
`ReplicaGradients` takes each replica's gradient before DistributedDataParallel averages it, in a
communication hook over flat buckets; `Halves` accumulates one replica's gradient in two halves,
which stays sound where consecutive gradients point against each other (large learning rates).

With Adam and its like a gradient counts as pre-conditioned: each square is weighted by
mean(v) / (v + floor), v from before this update. The floor, (.1 rms(sqrt v))^2, is ours: without it
parameters that hardly ever get a gradient would be the whole sum. So is the factor mean(v), which
phi does not depend on: v grows from 0, and the first iterations would outweigh all others.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slackwater.common.domains.slots.gradient_squares import FLOOR_PART
from slackwater.torch.ddp import hooked_sums


class Squares(NamedTuple):
    """The arguments of `AdaptiveBatch.saw_squares`."""

    small_sqr: float
    large_sqr: float
    batch_small: int
    batch_large: int


class Lengths:
    """Scalar products of gradients, as the optimiser sees them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._weights: dict[torch.nn.Parameter, torch.Tensor] = {}

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """Yield those that have a gradient now."""
        groups = self._optimizer.param_groups
        return (p for group in groups for p in group["params"] if p.grad is not None)

    def renew(self) -> None:
        """Take v as it is now; call it before the gradients of an iteration that is measured."""
        state = self._optimizer.state
        moving = {p: s["exp_avg_sq"] for p, s in state.items() if "exp_avg_sq" in s}
        if moving:
            number = sum(v.numel() for v in moving.values())
            mean = torch.stack([v.sum() for v in moving.values()]).sum() / number
            self._weights = {p: mean / (v + FLOOR_PART * mean) for p, v in moving.items()}

    def product(
        self, pairs: Iterable[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Sum of a * b over all parameters, a scalar; without a pair 0."""
        found = []
        for parameter, a, b in pairs:
            weight = self._weights.get(parameter)
            weighed = b if weight is None else b * weight
            found.append(torch.dot(a.reshape(-1).float(), weighed.reshape(-1).float()))
        return torch.stack(found).sum() if found else torch.zeros(())


class Halves:
    """One replica: the gradient of the first half of an iteration, and that of all of it."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._first: dict[torch.nn.Parameter, torch.Tensor] = {}

    def half(self) -> None:
        """Half of the examples went through their backward passes."""
        self._lengths.renew()
        self._first = {
            p: p.grad.detach().clone() for p in self._lengths.parameters() if p.grad is not None
        }

    def whole(self, batch: int) -> Squares:
        """All did: the gradient is the mean over `batch` examples of this replica."""
        first, product = self._first, self._lengths.product
        both = [(p, first[p], p.grad) for p in first if p.grad is not None]
        aa = product((p, a, a) for p, a, _ in both)
        ag = product((p, a, g) for p, a, g in both)
        gg = product((p, p.grad, p.grad) for p in self._lengths.parameters() if p.grad is not None)
        self._first = {}
        at_first, across, large = torch.stack([aa.cpu(), ag.cpu(), gg.cpu()]).tolist()
        # Each half counted half: its own gradient is twice as long.
        at_second = large - 2.0 * across + at_first
        return Squares(2.0 * (at_first + at_second), large, batch // 2, batch)


class ReplicaGradients:
    """Several replicas of DistributedDataParallel: each one's gradient, and their mean."""

    def __init__(self, lengths: Lengths, model: DistributedDataParallel) -> None:
        """Take part in the model's reduction: in its aggregators' hook, or by a hook of its own."""
        self._lengths, self._armed = lengths, False
        self._own: list[torch.Tensor] = []
        sums = hooked_sums(model)
        if sums is not None:
            sums.before = self._see
        else:
            model.register_comm_hook(model.process_group, self._reduce)

    def arm(self) -> None:
        """The next reduction is measured."""
        self._lengths.renew()
        self._armed, self._own = True, []

    def whole(self, batch: int, mean: Callable[[float], float], replicas: int) -> Squares:
        """The reduction is done; `batch`: of one replica. `mean`: of all replicas' values."""
        pairs = ((p, p.grad, p.grad) for p in self._lengths.parameters() if p.grad is not None)
        large = float(self._lengths.product(pairs))
        small = mean(float(torch.stack(self._own).sum()) if self._own else 0.0)
        self._armed = False
        return Squares(small, large, batch, batch * replicas)

    def _see(self, bucket: dist.GradBucket) -> None:
        if self._armed:
            gradients = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._own.append(self._lengths.product((p, g, g) for p, g in gradients))

    def _reduce(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._see(bucket)
        buffer = bucket.buffer().div_(dist.get_world_size(group))
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        done: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
        return done


def can_hook(model: DistributedDataParallel) -> bool:
    """Say whether the model's reduction can be measured: no other hook is registered."""
    return hooked_sums(model) is not None or not getattr(model, "_comm_hooks", ())
