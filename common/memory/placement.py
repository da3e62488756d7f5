"""Which machine backs a span: power of two choices, machines without a slab of this device first.

Gu, dissertation, 2.4.2 and figure 2.4. Candidates are drawn here, at random and without a look at
their memory; they are asked (QUERY_MEM), and `lower` compares the answers. So placement needs no
coordinator and no fresh view of the cluster.
"""

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Final

from slackwater.schemas.memory import FreeMemory, LenderId

CHOICES: Final = 2


def candidates(
    lenders: Sequence[LenderId],
    old: Collection[LenderId],
    excluded: Collection[LenderId],
    rng: Random,
    choices: int = CHOICES,
) -> list[LenderId]:
    """Up to `choices` lenders to ask. M_new (no slab of this device) first; M_old fills up only
    where M_new has fewer than `choices`: M_new alone decides while it can."""
    fresh = [one for one in lenders if one not in old and one not in excluded]
    if len(fresh) >= choices:
        return rng.sample(fresh, choices)
    if fresh:
        return fresh
    known = [one for one in lenders if one in old and one not in excluded]
    return rng.sample(known, min(choices, len(known)))


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
