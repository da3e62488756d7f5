"""Cruise's configuration of machines of two kinds, exactly, in milliseconds.

Machines of a kind are worth the same, so that a configuration is how many of each kind work: 145 of
28 and 4 machines, where the integer programme of the dissertation (figure 3.2) has roles by machine
and shares by block. Given the roles,

- the servers of a kind hold equal parts of the model; let those of the first kind hold t of it. The
  time q_i(t) in which a worker of kind i fetches the model is the largest of three linear functions
  of t (eq. 3.3);
- data is shared out so that all workers end together: worker i has a part in proportion to
  1 / (c_i + q_i / B), and the epoch takes D / sum_i n_i / (c_i + q_i / B).

Between two values of t at which some two of those functions cross each q_i is linear, so that the
sum is convex there: it is largest at one of these values. All of them are tried.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.cost import Configuration, Machine, Training, check

KINDS_MAX: Final = 2


def kinds_optimum(training: Training, machines: Sequence[Machine]) -> Configuration:
    """Return the best roles and shares of these machines, of at most two kinds. Shares are not
    rounded to instances or mini-batches. Raises Rejected."""
    check(training, machines)
    kinds = list(Counter(machines).items())
    if len(kinds) > KINDS_MAX:
        raise Rejected(f"machines are of {len(kinds)} kinds; at most {KINDS_MAX} may be")
    if training.whole_batches:
        raise Rejected("whole_batches is for machines alike; leave it out")
    if not 2 <= len(machines) <= limits.MODEL_MACHINES_MAX:
        raise Rejected(f"there are {len(machines)} machines; give 2 to {limits.MODEL_MACHINES_MAX}")
    best: tuple[float, tuple[int, ...], float, list[float]] | None = None
    for working in _roles([count for _, count in kinds]):
        found = _best_shares(training, kinds, working)
        if best is None or found[0] < best[0]:
            best = (found[0], working, *found[1:])
    assert best is not None
    return _by_machine(training, machines, kinds, *best)


def _roles(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield how many of each kind work: one at least, and one at least serves."""
    first, second = counts[0], counts[1] if len(counts) > 1 else 0
    for one in range(first + 1):
        for other in range(second + 1):
            if 0 < one + other < first + second:
                yield (one, other)[: len(counts)]


def _best_shares(
    training: Training, kinds: Sequence[tuple[Machine, int]], working: Sequence[int]
) -> tuple[float, float, list[float]]:
    """Return the epoch's seconds, the part of the model that servers of the first kind hold, and
    the seconds that an instance takes a worker of each kind."""
    workers = sum(working)
    serving = [count - some for (_, count), some in zip(kinds, working, strict=True)]
    lines = {
        i: _lines(training, machine, kinds, serving, workers)
        for i, (machine, _) in enumerate(kinds)
        if working[i]
    }
    overhead_s = training.server_s * sum(serving)
    best: tuple[float, float, list[float]] | None = None
    for part in _candidates(lines.values(), serving):
        each_s = [
            machine.instance_s
            + (max(a + b * part for a, b in lines[i]) + overhead_s) / training.batch
            if i in lines
            else 0.0
            for i, (machine, _) in enumerate(kinds)
        ]
        if min((each_s[i] for i in lines), default=0.0) <= 0.0:
            epoch_s = 0.0
        else:
            epoch_s = training.instances / sum(working[i] / each_s[i] for i in lines)
        if best is None or epoch_s < best[0]:
            best = epoch_s, part, each_s
    assert best is not None
    return best


def _lines(
    training: Training,
    machine: Machine,
    kinds: Sequence[tuple[Machine, int]],
    serving: Sequence[int],
    workers: int,
) -> list[tuple[float, float]]:
    """Return the functions a + b t whose largest is a worker's transfer time (eq. 3.3)."""
    links = [min(machine.bytes_per_s, other.bytes_per_s) for other, _ in kinds]
    first_s = training.model_bytes / links[0]
    second_s = training.model_bytes / links[-1] if len(kinds) > 1 else first_s
    lines = [(second_s, first_s - second_s)]  # Its own link takes all of the model.
    if serving[0]:
        lines.append((0.0, first_s * workers / serving[0]))
    if len(kinds) > 1 and serving[1]:
        each_s = second_s * workers / serving[1]
        lines.append((each_s, -each_s))
    return lines


def _candidates(lines: Iterable[list[tuple[float, float]]], serving: Sequence[int]) -> list[float]:
    if len(serving) == 1 or not serving[1]:
        return [1.0]
    if not serving[0]:
        return [0.0]
    found = {0.0, 1.0}
    for some in lines:
        for (a, b), (c, d) in combinations(some, 2):
            if b != d and 0.0 < (part := (c - a) / (b - d)) < 1.0:
                found.add(part)
    return sorted(found)


def _by_machine(
    training: Training,
    machines: Sequence[Machine],
    kinds: Sequence[tuple[Machine, int]],
    epoch_s: float,
    working: Sequence[int],
    part: float,
    each_s: Sequence[float],
) -> Configuration:
    """Give the roles to machines, the first of each kind working."""
    index = {machine: i for i, (machine, _) in enumerate(kinds)}
    serving = [count - some for (_, count), some in zip(kinds, working, strict=True)]
    parts = (part, 1.0 - part)
    speeds = sum(some / s for some, s in zip(working, each_s, strict=True) if some)
    seen: Counter[int] = Counter()
    roles, instances, held = list[bool](), list[float](), list[float]()
    for machine in machines:
        i = index[machine]
        works = seen[i] < working[i]
        seen[i] += 1
        roles.append(works)
        instances.append(training.instances / each_s[i] / speeds if works else 0.0)
        held.append(0.0 if works else training.model_bytes * parts[i] / serving[i])
    return Configuration(tuple(roles), tuple(instances), tuple(held), epoch_s)
