"""Virtual ranks: gradients of one iteration, dealt out to however many processes there are.

A job of V virtual ranks folds V gradients in each iteration, in virtual order. So its bits do not
depend on which process computed which of them (Qiao's thesis, section 6.3, asks for runs that can
be replayed exactly while resources change).

Pure: who computes what in an iteration is a function of V and of the number of processes, and what
a virtual rank draws is a function of the job's seed, the virtual rank and the iteration. Nothing of
it has to be carried when a process dies or another one takes its place.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

SEED_BYTES: Final = 8


def assigned(virtual_ranks: int, workers: int, rank: int) -> range:
    """Return the virtual ranks that process `rank` of `workers` computes: contiguous, as equal in
    number as can be, empty for a process that does not count."""
    if rank >= workers:
        return range(0)
    each, more = divmod(virtual_ranks, workers)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def process_of(virtual_rank: int, virtual_ranks: int, workers: int) -> int:
    """Return the process that computes the virtual rank: the inverse of `assigned`."""
    each, more = divmod(virtual_ranks, workers)
    wide = more * (each + 1)
    if virtual_rank < wide:
        return virtual_rank // (each + 1)
    return more + (virtual_rank - wide) // each


def seed_of(seed: int, *place: int) -> int:
    """Return a seed of 64 bits for a place in the job: (virtual rank, iteration), for instance. It
    is counter-based: places that differ have unrelated seeds, and none needs the one before."""
    key = ",".join(map(str, (seed, *place))).encode()
    return int.from_bytes(blake2b(key, digest_size=SEED_BYTES).digest(), "little")


def by_process(pushed: Sequence[int], workers: int) -> list[int]:
    """Return what each process has pushed whole: the oldest word of the virtual ranks that it
    computes."""
    return [
        min(pushed[each] for each in assigned(len(pushed), workers, rank))
        for rank in range(workers)
    ]
