"""CodingSets: which lenders back a coded span together. Pure.

Hydra (FAST'22), section 5.2: lenders form disjoint groups of k + r + l, and a span is placed on
the k + r least loaded of one group. Bytes are lost when more than r lenders that back one span fail
together; with few different sets of lenders, few such combinations exist, whatever the number of
spans. l trades that against balance: with l = 0 the load of a group is even and cannot be evened
out, with random placement (one group) almost any r + 1 lenders share some span.

Groups follow from the lenders' names alone, so that all devices have the same ones; in the order of
a hash, because machines with neighbouring names share racks.
"""

import hashlib
from collections.abc import Collection, Mapping
from random import Random
from typing import Final

from slackwater.schemas.memory import LenderId, SlabdHeartbeat

SLACK: Final = 2
"""l, as in the paper's evaluation."""


def groups(known: Collection[LenderId], width: int, slack: int = SLACK) -> list[set[LenderId]]:
    """Disjoint, each of at least `width + slack` where there are so many; a rest that is too small
    for a group of its own is part of the last one."""
    ordered = sorted(set(known), key=_place)
    size = width + slack
    count = max(1, len(ordered) // size)
    cut = [ordered[i * size : (i + 1) * size] for i in range(count)]
    cut[-1] += ordered[count * size :]
    return [set(group) for group in cut if group]


def load_of(beat: SlabdHeartbeat) -> float:
    """The share of its machine's memory that is in use, slabs included."""
    return (beat.used_bytes + beat.lent_slabs * beat.slab_bytes) / max(beat.total_bytes, 1)


def choose(
    known: Collection[LenderId],
    load: Mapping[LenderId, float],
    width: int,
    rng: Random,
    slack: int = SLACK,
) -> set[LenderId]:
    """The group for a new span: of two drawn, the one whose `width` least loaded have the lower
    load. `load` names the lenders that can be asked; groups with too few of them come last."""
    every = groups(known, width, slack)
    whole = [group for group in every if len(group & load.keys()) >= width]
    drawn = rng.sample(every, min(2, len(every)))
    if not any(group in whole for group in drawn) and whole:
        drawn = [rng.choice(whole)]
    return min(drawn, key=lambda group: _rank(group, load, width), default=set())


def order(group: Collection[LenderId], load: Mapping[LenderId, float]) -> list[LenderId]:
    """In which order lenders are asked: the group's, the least loaded first. Others come after all
    of them: redundancy that is back at once is worth more than a set that stays one."""
    return sorted(load, key=lambda lender: (lender not in group, load[lender], _place(lender)))


def _rank(
    group: Collection[LenderId], load: Mapping[LenderId, float], width: int
) -> tuple[bool, float]:
    able = sorted(load[lender] for lender in group if lender in load)[:width]
    return len(able) < width, sum(able) / max(len(able), 1)


def _place(lender: LenderId) -> bytes:
    return hashlib.blake2b(lender.encode(), digest_size=8).digest() + lender.encode()
