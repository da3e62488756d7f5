"""How fast jobs run that take turns on the same GPUs' stages (Muri, SIGCOMM'22).

An iteration passes through k stages, each on a resource of its own (GPU, CPU, network). Jobs that
share machines can be in different stages at the same time: job j runs stage (slot + o_j) mod k in a
slot, the slot lasts as long as its longest stage, and the period is the sum of the slots. With
distinct offsets o_j no two jobs are ever on one resource, so at most k jobs share. The offsets are
chosen for the shortest period; every job then does one iteration a period.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations

import msgspec


class StageProfile(msgspec.Struct, frozen=True):
    """Measured stages of one iteration, and how long an iteration takes alone."""

    stages_s: tuple[float, ...]
    alone_s: float


@lru_cache(maxsize=65536)
def period_s(members: tuple[StageProfile, ...]) -> float:
    """Seconds for one iteration of every member; inf if more share than there are stages."""
    if len(members) == 1:
        return members[0].alone_s
    stages = max(len(member.stages_s) for member in members)
    if len(members) > stages:
        return float("inf")
    alone_s = max(member.alone_s for member in members)
    shortest = min(
        sum(
            max(
                _stage(member, (slot + offset) % stages)
                for member, offset in zip(members, (0, *offsets), strict=True)
            )
            for slot in range(stages)
        )
        for offsets in permutations(range(1, stages), len(members) - 1)
    )
    return max(shortest, alone_s)


def _stage(member: StageProfile, index: int) -> float:
    return member.stages_s[index] if index < len(member.stages_s) else 0.0


def speeds(members: Sequence[StageProfile]) -> list[float]:
    """Each member's speed relative to running alone."""
    shared_s = period_s(tuple(sorted(members, key=lambda m: (m.stages_s, m.alone_s))))
    return [member.alone_s / shared_s for member in members]


def efficiency(members: Sequence[StageProfile]) -> float:
    """Jobs' worth of progress per second on one set of GPUs: 1 for a job alone."""
    return sum(speeds(members))
