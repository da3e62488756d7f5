"""The hyper-parameters of one push: the job's, with what the program gives of its own.

A worker of an asynchronous job pushes gradients of parameters that others have changed since. With
k alike workers that is, in the mean, momentum of 1 - 1/k which nobody asked for (Mitliagkas et al.
2016, theorem 3; Lin et al. 2018, section II, take it that momentum is adjusted for it). Explicit
and implicit momentum are two filters behind one another; to first order their coefficients add.
"""

from collections.abc import Mapping

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.slots.rules import RULES, Hyper


def hyper_of(job: str, rule: str, usual: Hyper, given: Mapping[str, float]) -> Hyper:
    """Raises Rejected for what the rule does not take."""
    unknown = given.keys() - set(Hyper._fields)
    if unknown:
        raise Rejected(
            f"unknown hyper-parameter {sorted(unknown)[0]!r}; known: {', '.join(Hyper._fields)}"
        )
    hyper = usual._replace(**given)
    fault = RULES[rule].fault(hyper)
    if fault:
        raise Rejected(f"job {job}: {fault}")
    return hyper


def implicit_momentum(workers: int) -> float:
    """Return the momentum that asynchrony of so many workers has of itself: 1 - 1/k."""
    return 1.0 - 1.0 / max(1, workers)


def explicit_momentum(total: float, workers: int) -> float:
    """Return what is left to give of a `total` momentum with so many workers: at least 0, where
    asynchrony alone has more."""
    return max(0.0, total - implicit_momentum(workers))


def left_to_give(hyper: Hyper, workers: int) -> Hyper:
    """Return hyper-parameters whose momentum is that of a whole job as one of its workers pushes
    them."""
    return hyper._replace(momentum=explicit_momentum(hyper.momentum, workers))
