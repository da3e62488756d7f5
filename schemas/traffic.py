"""A job as it shows in what its processes send: iterations, bytes, sizes, skew, and how they are
known. Programs need no Agent for it (Tiresias: Gu, dissertation, section 3.3.3.2)."""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    Attempt,
    Count,
    Finite,
    JobId,
    Message,
    NodeId,
    Rank,
    Record,
    Seconds,
    bound,
)

SIZES_MAX: Final = 32
By = Literal["agent", "calls", "gloo", "pauses"]
"""The tensors that an Agent registered; lengths of send calls, as the kernel tells them; headers of
gloo's messages; pauses between packets."""
TRUST: Final[tuple[By, ...]] = ("pauses", "gloo", "calls", "agent")
"""The more trusted, the later."""
Kind = Literal["tensors", "buckets", "messages"]


class JobTraffic(Record, kw_only=True, frozen=True):
    """Figures of one rank of a job: what it sends in an iteration."""

    by: By
    kind: Kind = "messages"
    """Says of what `sizes_bytes` are sizes: of tensors; of buckets, which hold several tensors; or
    of messages, which may be parts of tensors."""
    rank: Rank = 0
    """The rank that was watched: a node's lowest."""
    iterations: Count = 0
    """Iterations that were seen."""
    iteration_s: Seconds = 0.0
    bytes_per_iteration: Count = 0
    sizes_bytes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=SIZES_MAX)] = ()
    """The largest first, at most SIZES_MAX."""
    sizes: Count = 0
    """How many there are of them."""
    skew: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """The largest one's part of all bytes; 0: not known."""
    windows: bool = False
    """Set where packets were watched in windows, with pauses between them, since they are small."""
    dropped: Count = 0
    """Packets that could not be looked at in time."""


class TrafficObserved(Message, kw_only=True, frozen=True, tag="job.traffic"):
    """sw.v1.tel.job.<id>.traffic, from the worker service of a job that has no Agent."""

    job: JobId
    attempt: Attempt
    """The attempt that the job is in."""
    node: NodeId
    traffic: JobTraffic
    cpu_percent: Finite = 0.0
    """Per cent of a core that watching took of the node meanwhile."""

    def __post_init__(self) -> None:
        bound(self, "cpu_percent")
