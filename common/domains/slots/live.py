"""Live parts of a bucket's region between two folds: all that a copy to another host must bring.

Of two buffers of parameters, and of each optimiser state, the version word names the one that
counts; the next fold writes the other. A slot counts only while its push waits for an update:
a worker writes it anew with every push, and again elsewhere when the push was not taken.

Of a job of virtual ranks both buffers of parameters are brought: a process that is started again
computes its part of the next version with those of the version that all buckets have.
"""

from collections.abc import Sequence

from slackwater.common.domains.slots.layout import HEADER_BYTES
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.transport.pacing import Parts


def live_parts(slots: SlotRegion, region_bytes: int, pushed: Sequence[int]) -> Parts:
    """(offset, bytes), in order, of a region that stands still; `pushed`: the pushed words that
    count. Everything else may arrive as zeros."""
    geometry, version = slots.geometry, slots.version
    record = (geometry.nbytes, region_bytes - geometry.nbytes)
    if not slots.initialized:
        return ((0, HEADER_BYTES), record)
    waiting = [
        (geometry.gradient_offset(rank), geometry.gradient_bytes)
        for rank, (word, applied) in enumerate(zip(pushed, _applied(slots), strict=True))
        if word > applied
    ]
    states = [
        (geometry.state_offset(version, index), geometry.parameter_bytes)
        for index in range(geometry.states)
    ]
    versions = (version, version + 1) if slots.plan.virtual else (version,)
    offsets = sorted(geometry.parameters_offset(each) for each in versions)
    parameters = [(offset, geometry.parameter_bytes) for offset in offsets]
    return ((0, HEADER_BYTES), *waiting, *parameters, *states, record)


def parts_bytes(parts: Parts) -> int:
    """Bytes of all of them."""
    return sum(nbytes for _, nbytes in parts)


def _applied(slots: SlotRegion) -> list[int]:
    """Return the newest iteration of each rank that the version contains."""
    if slots.plan.consistency == "synchronous":
        return [slots.version] * slots.geometry.workers
    return slots.applied()
