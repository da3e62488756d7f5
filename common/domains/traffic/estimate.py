"""Say what is known of a job by what one of its ranks sent, by the most trusted way that told it.

gloo's headers come first where they are: send calls of a ring are pieces of buckets. Then calls,
whose lengths are exact where they come again; else messages by pauses. Sizes of what receives while
it sends are pieces, and no skew is told by them.
"""

from collections.abc import Mapping, Sequence

from slackwater.common.domains.traffic.recurring import Recurrence
from slackwater.common.domains.traffic.repeated import Repeated, repeated
from slackwater.schemas.traffic import SIZES_MAX, By, JobTraffic, Kind

FRAMING_BYTES = 64
"""Messages up to so long are headers of others."""
PART_MIN = 0.01
"""A socket that sends a smaller part of all bytes is not training."""


def estimate(
    flows: Sequence[Recurrence], calls: Mapping[int, Sequence[int]], buckets: Sequence[int]
) -> JobTraffic | None:
    """Return what is known; None: nothing recurs. `flows`: what each of the rank's connections
    repeats; `calls`: lengths of the send calls by socket; `buckets`: sizes of all-reduces by gloo's
    headers."""
    flows = _training(flows)
    reduced = repeated([nbytes for nbytes in buckets if nbytes > FRAMING_BYTES])
    called = _called(calls)
    ring = any(flow.both_ways for flow in flows)
    largest = max(flows, key=lambda flow: flow.nbytes, default=None)
    by: By = "gloo" if reduced else "calls" if called else "pauses"
    kind: Kind = "messages"
    total = sum(flow.nbytes for flow in flows)
    if reduced is not None:
        kind, sizes, iterations = "buckets", list(reduced.sizes), reduced.times
    elif called:
        sizes = [n for one in called for n in one.sizes if n > FRAMING_BYTES]
        kind = "messages" if ring else "tensors"
        iterations = max(called, key=lambda one: sum(one.sizes)).times
    elif largest is not None:
        sizes = [] if ring else [n for flow in flows for n in flow.messages]
        iterations = largest.iterations
    else:
        return None
    if by != "pauses":
        total = sum(sizes)
    if by == "gloo" and largest is not None:
        iterations = largest.iterations
    skewed = by == "gloo" or not ring
    sizes.sort(reverse=True)
    return JobTraffic(
        by=by,
        kind=kind,
        iterations=round(iterations),
        iteration_s=largest.iteration_s if largest is not None else 0.0,
        bytes_per_iteration=total,
        sizes_bytes=tuple(sizes[:SIZES_MAX]),
        sizes=len(sizes),
        skew=sizes[0] / total if skewed and sizes and total else 0.0,
    )


def _training(flows: Sequence[Recurrence]) -> list[Recurrence]:
    least = PART_MIN * sum(flow.nbytes * flow.iterations for flow in flows)
    return [flow for flow in flows if flow.nbytes * flow.iterations >= least]


def _called(calls: Mapping[int, Sequence[int]]) -> list[Repeated]:
    """Return one iteration of each socket that trains; none where not all of them repeat."""
    least = PART_MIN * sum(sum(sizes) for sizes in calls.values())
    found = [repeated(sizes) for sizes in calls.values() if sizes and sum(sizes) >= least]
    whole = [one for one in found if one is not None]
    return whole if len(whole) == len(found) else []
