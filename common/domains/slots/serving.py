"""Parameters that wait for a reader from afar: a copy that no update overtakes.

In a job that is not synchronous others' updates go on while a worker reads, and a slow link makes a
read last for several of them. What the worker's own push led to is therefore copied, once, into the
slot that the push came in: the worker alone writes there, and not before it has read. With it goes
of which iterations the copy is made, so that it can fill a bare region. Only for ranks that asked
for it (`wanted`); where the region is mapped, the worker copies for itself.
"""

from collections.abc import Sequence

import numpy as np

from slackwater.common.domains.slots.consistency import acknowledged, staleness_bound
from slackwater.common.domains.slots.layout import ROWS, SERVED, WANTED
from slackwater.common.domains.slots.region import SlotRegion, Words
from slackwater.common.domains.slots.rows import ALL
from slackwater.common.domains.slots.rules import Floats


def serve(region: SlotRegion, before: Sequence[int], owner: int) -> int:
    """After a commit: the copies of all whom it lets go on, and how many they are. `before`: what
    was applied before it; `owner`: of the region, as long as it is ours."""
    bound = staleness_bound(region.plan)
    if bound is None or region.kernels is not None:
        return 0
    version, after = region.version, region.applied()
    served = 0
    for rank in range(region.geometry.workers):
        answered = acknowledged(after, rank, bound)
        block = region.rank_block(rank)
        if answered == acknowledged(before, rank, bound) or block[WANTED] != 1:
            continue
        if region.pushed(rank) != answered or region.owner != owner:
            continue
        if block[ROWS] != ALL:  # A rank that pushes rows reads rows.
            continue
        parameters, applied = served_copy(region, rank)
        np.copyto(parameters, region.parameters(version))
        applied[:] = after
        block[SERVED] = served_word(region.location_epoch, answered)
        served += 1
    return served


def served_copy(region: SlotRegion, rank: int) -> tuple[Floats, Words]:
    """View the rank's slot as what it reads: parameters, and the applied words that go with
    them."""
    geometry = region.geometry
    first = geometry.gradient_offset(rank) - geometry.slots_offset
    slot = region.slots(np.uint8)[first : first + geometry.slot_stride]
    at = geometry.served_applied_offset(rank) - geometry.gradient_offset(rank)
    parameters = slot[: geometry.parameter_bytes].view(np.float32)
    return parameters, slot[at : at + 8 * geometry.workers].view(np.uint64)


def served_word(location_epoch: int, iteration: int) -> int:
    """Return the word that vouches for a copy. A bucket that moved has none, for its slots do not
    go along."""
    return location_epoch << 40 | iteration
