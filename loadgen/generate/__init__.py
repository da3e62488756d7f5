"""The papers' own workloads, drawn from their published distributions under a seed.

    jobs = generate("tiresias", seed=1)
    jobs = generate("lin", seed=1, load=0.7, jobs=2000, models="alexnet,vgg19")
    text = slackwater.loadgen.traces.write(jobs)

Equal seeds and options give equal bytes. Each module says what its paper publishes, what is chosen
here, and which fields of `TraceJob` it fills.
"""

import difflib
import inspect
from collections.abc import Callable
from random import Random

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.generate import harmony, lin, pollux, tiresias
from slackwater.loadgen.traces.record import TraceJob

__all__ = ["WORKLOADS", "generate", "options"]

Option = int | float | str

WORKLOADS: dict[str, Callable[..., tuple[TraceJob, ...]]] = {
    "tiresias": tiresias.workload,
    "pollux": pollux.workload,
    "lin": lin.workload,
    "harmony": harmony.workload,
}


def generate(name: str, seed: int, **given: Option) -> tuple[TraceJob, ...]:
    """The workload's jobs by submission. Unknown names, options and values are refused."""
    known = options(name)
    for option, value in given.items():
        if option not in known:
            listed = ", ".join(f"{key}={default}" for key, default in known.items())
            raise Rejected(f"workload {name} has no option {option!r}; it has: {listed}")
        given[option] = _as_type_of(known[option], option, value)
    return WORKLOADS[name](Random(seed), **given)


def options(name: str) -> dict[str, Option]:
    """The workload's options with their defaults."""
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Rejected(f"unknown workload {name!r}, {hint}known: {', '.join(WORKLOADS)}")
    parameters = inspect.signature(WORKLOADS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _as_type_of(default: Option, option: str, value: Option) -> Option:
    """Convert a text of the command line to its option's type."""
    try:
        return type(default)(value)
    except (ValueError, OverflowError) as error:
        kind = {int: "a whole number", float: "a number"}.get(type(default), "text")
        raise Rejected(f"{option} is {value!r}; expected {kind} such as {default}") from error
