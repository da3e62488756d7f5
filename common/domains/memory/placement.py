"""Choose the machine that backs a span: power of two choices, machines without a slab of this
device first.

Gu, dissertation, 2.4.2 and figure 2.4. Candidates are drawn here, at random; they are asked
(QUERY_MEM), and `lower` compares the answers. So placement needs no coordinator and no fresh view
of the cluster. The paper draws evenly. Here a lender is drawn in proportion to the free slabs that
its heartbeat showed: where M_new leaves each device only one slab a lender, an even draw fills an
empty machine too slowly (docs/reproduction/memory_cluster.md), and a stale figure only shifts the
odds.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest
from random import Random
from typing import Final

from slackwater.schemas.memory import FreeMemory, LenderId

CHOICES: Final = 2


def candidates(
    lenders: Mapping[LenderId, int],
    old: Collection[LenderId],
    excluded: Collection[LenderId],
    rng: Random,
    choices: int = CHOICES,
) -> list[LenderId]:
    """Up to `choices` of `lenders` (with their free slabs) to ask. M_new (no slab of this device)
    first; M_old fills up only where M_new has fewer than `choices`: M_new alone decides while it
    can."""
    fresh = [one for one in lenders if one not in old and one not in excluded]
    if len(fresh) >= choices:
        return _draw(fresh, lenders, choices, rng)
    if fresh:
        return fresh
    known = [one for one in lenders if one in old and one not in excluded]
    return _draw(known, lenders, choices, rng)


def _draw(
    names: Sequence[LenderId], weights: Mapping[LenderId, int], choices: int, rng: Random
) -> list[LenderId]:
    """Without replacement, by weight (Efraimidis and Spirakis, 2006): the largest of u^(1/w)."""
    keys = [(rng.random() ** (1.0 / max(1, weights[name])), name) for name in names]
    return [name for _, name in nlargest(choices, keys)]


def lower(
    answers: Sequence[tuple[LenderId, FreeMemory]],
    old: Collection[LenderId] = (),
    taken: Mapping[LenderId, float] | None = None,
) -> LenderId | None:
    """The one with the lowest memory usage among those that have a free slab; the first in case
    of a tie. None: nobody has one.

    Spans that get hot together are placed together, and the answers do not know of each other's
    choice: lenders that have become `old` meanwhile come last, and `taken` is the share of a
    lender's memory that was asked for since.
    """
    more = taken or {}
    able = [
        (lender in old, answer.used_share + more.get(lender, 0.0), lender)
        for lender, answer in answers
        if answer.free_slabs > 0
    ]
    return min(able, key=lambda entry: entry[:2])[2] if able else None
