"""Remote memory: what a block device and a lender say to each other, and what both tell the bus.

The eight messages of Infiniswap (section 2.6.1) travel as frames of the data plane's channel, as in
the paper: one connection per pair of device and lender, shared by control and data. So placement
and eviction go on while the bus is away. What only operators and placement's first look need
(heartbeats, facts, commands) is on the bus.

    device                          lender (slabd)
    QueryMemory   QUERY_MEM   ->
                              <-    FreeMemory       FREE_MEM
    MapSlab       MAP         ->
                              <-    SlabMapped       MR_INFO   (or NotMapped)
                              <-    CheckActivity    CHECK_ACTIVITY
    Activity      ACTIVITY    ->
                              <-    EvictSlabs       EVICT
    EvictDone     DONE        ->

and beyond the paper: UnmapSlab (a cold slab goes back), ClaimSlab (a device finds its slab again
after the channel, the lender's daemon or the device itself was gone for a moment), SlabsLost,
EvictLater (a slab is needed until its fragments are made again elsewhere).
"""

from typing import Annotated, Literal, NewType

import msgspec

from slackwater.schemas.base import (
    SECRET_CHARS_MAX,
    Count,
    Finite,
    IdText,
    MaybeId,
    Message,
    Name,
    NodeId,
    Positive,
    Record,
    Seconds,
    Secret,
    Text,
    cut_texts,
)
from slackwater.schemas.cluster import Addresses, Heartbeat

DeviceId = NewType("DeviceId", IdText)
LenderId = NewType("LenderId", IdText)
SlabText = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
SlabId = NewType("SlabId", SlabText)
"""One region of one lender, for its whole life; random, never used again."""
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]

SLABS_PER_MESSAGE = 256
SlabIds = Annotated[tuple[SlabId, ...], msgspec.Meta(max_length=SLABS_PER_MESSAGE)]


class DeviceHello(Message, kw_only=True, frozen=True, tag="memory.hello"):
    """The first bytes of a device's channel. `incarnation` grows with every start of the device."""

    device: DeviceId
    node: NodeId
    incarnation: Count
    token: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The cluster's secret; what a lender that listens on a network demands."""


# Placement (figure 2.9a) --------------------------------------------------------------------------


class QueryMemory(Message, kw_only=True, frozen=True, tag="memory.query"):
    """QUERY_MEM. `request` comes back in the answer."""

    request: Count


class FreeMemory(Message, kw_only=True, frozen=True, tag="memory.free"):
    """FREE_MEM: slabs that are ready to be mapped, and the usage that power of two choices
    compares."""

    request: Count
    free_slabs: Count
    used_share: Share
    """The share of the machine's memory that is in use, lent slabs included."""


class MapSlab(Message, kw_only=True, frozen=True, tag="memory.map"):
    """MAP. `span` is the part of the device's address space that the slab is to back, `member` its
    place among the slabs that back the span together (replicas, fragments)."""

    request: Count
    span: Count
    member: Count = 0
    secret: Secret = ""
    """The secret that ClaimSlab must show."""
    hold_s: Seconds = 0.0
    """Keep the slab so long for a claim once the channel is lost (the lender has its own bound)."""
    usage_max: Share = 0.0
    """A lender that uses a larger share of its memory answers FreeMemory: another one may be the
    better. 0: it gives the slab whatever it uses."""


class SlabMapped(Message, kw_only=True, frozen=True, tag="memory.mapped"):
    """MR_INFO. The region has `slab_bytes` of data and a trailer behind them, whose fence word
    holds this generation for as long as the slab is this device's
    (common/domains/memory/trailer.py)."""

    request: Count
    slab: SlabId
    generation: Positive
    slab_bytes: Positive
    key: Annotated[bytes, msgspec.Meta(max_length=SECRET_CHARS_MAX)]


class NotMapped(Message, kw_only=True, frozen=True, tag="memory.not-mapped"):
    request: Count
    reason: Text
    retry_after_s: Seconds = 1.0
    """0: never; a claimed slab is gone."""

    def __post_init__(self) -> None:
        cut_texts(self)


class UnmapSlab(Message, kw_only=True, frozen=True, tag="memory.unmap"):
    """The device gives a slab back (ColdSlab, or it ends). Not answered."""

    slab: SlabId
    generation: Positive


class ClaimSlab(Message, kw_only=True, frozen=True, tag="memory.claim"):
    """Answered by SlabMapped with the same generation, or NotMapped: it is gone."""

    request: Count
    slab: SlabId
    generation: Positive
    secret: Secret


# Eviction (figure 2.9b) ---------------------------------------------------------------------------


class CheckActivity(Message, kw_only=True, frozen=True, tag="memory.check-activity"):
    """CHECK_ACTIVITY."""

    round: Count
    slabs: SlabIds


class Activity(Message, kw_only=True, frozen=True, tag="memory.activity"):
    """ACTIVITY: page I/O requests per second of each slab, smoothed."""

    round: Count
    activity: Annotated[
        tuple[tuple[SlabId, Finite], ...], msgspec.Meta(max_length=SLABS_PER_MESSAGE)
    ]
    needed: SlabIds = ()
    """Slabs whose spans could not be read without the disk if they were evicted, too. Take others
    first."""


class EvictSlabs(Message, kw_only=True, frozen=True, tag="memory.evict"):
    """EVICT: answer DONE within `deadline_s`, or the slabs are taken by force. A device that must
    make them again elsewhere first may answer EvictLater, and has `later_s` instead (0: it may
    not)."""

    slabs: SlabIds
    deadline_s: Seconds
    later_s: Seconds = 0.0


class EvictDone(Message, kw_only=True, frozen=True, tag="memory.done"):
    """DONE: nothing reads or writes these slabs any more."""

    slabs: SlabIds


class EvictLater(Message, kw_only=True, frozen=True, tag="memory.evict-later"):
    """Device to lender: without these, spans could not be read without the disk. DONE follows once
    others have their fragments."""

    slabs: SlabIds


class SlabsLost(Message, kw_only=True, frozen=True, tag="memory.slabs-lost"):
    """Lender to device: these are gone without an eviction; their pages must not be read."""

    slabs: SlabIds
    reason: Text

    def __post_init__(self) -> None:
        cut_texts(self)


ToLender = QueryMemory | MapSlab | UnmapSlab | ClaimSlab | Activity | EvictDone | EvictLater
ToDevice = FreeMemory | SlabMapped | NotMapped | CheckActivity | EvictSlabs | SlabsLost


# The bus ------------------------------------------------------------------------------------------


class SlabdHeartbeat(Heartbeat, kw_only=True, frozen=True, tag="slabd.heartbeat"):
    """A lender: where it is reached and what it has."""

    node: NodeId
    addresses: Addresses
    slab_bytes: Positive
    free_slabs: Count
    """Pre-allocated and ready."""
    lent_slabs: Count
    devices: Count
    total_bytes: Count
    used_bytes: Count
    """Memory used by everything but the slabs."""
    headroom_bytes: Count
    pressure: Finite = 0.0
    """Share of the last ten seconds in which something waited for memory (PSI, avg10 of `some`)."""
    lending: bool = True
    """False while it drains: it maps nothing new."""


DeviceState = Literal["serving", "degraded", "stuck", "stopping", "failed"]
"""`degraded`: the backup file fails, writes are refused. `stuck`: a write does not settle.
`failed`: a part of the device has ended unexpectedly, and the device ends for that. `reason` says
more."""


LatencyCause = Literal["hit", "late", "lender", "disk", "write"]
"""The cause of a request's latency. `hit`: its pages were at hand; `late`: prefetching was still
bringing some; `lender`, `disk`: the farthest place that its pages came from; `write`: the time
until a write counts."""


class LatencyInfo(Record, kw_only=True, frozen=True):
    """How long requests took lately, each percentile right to a fifth of itself."""

    cause: LatencyCause
    requests: Count
    p50_us: Finite
    p99_us: Finite


class DeviceHeartbeat(Heartbeat, kw_only=True, frozen=True, tag="device.heartbeat"):
    """A block device (or another address space in remote memory) and its counters since start."""

    node: NodeId
    resilience: Name
    size_bytes: Count
    spans: Count
    mapped_spans: Count
    lenders: Count
    """Lenders on which the device has slabs."""
    read_pages: Count
    read_remote_pages: Count
    written_pages: Count
    written_remote_pages: Count
    backup_waiting_pages: Count
    activity: Finite
    """Page I/O requests per second, smoothed."""
    read_waited_pages: Count = 0
    """The part of `read_pages` that was neither mapped nor held nor prefetched."""
    prefetched_pages: Count = 0
    prefetch_hit_pages: Count = 0
    """Prefetched pages that a client read."""
    prefetch_late_pages: Count = 0
    """Prefetched pages that a client read while they were still on their way."""
    slabs_evicted: Count = 0
    """Slabs that lenders asked back."""
    slabs_lost: Count = 0
    """Slabs that were taken by force, or were gone with their lender."""
    refilled_pages: Count = 0
    """Given to slabs that are new to their span, out of the backup file."""
    regenerated_pages: Count = 0
    """Fragments (or copies) given to members that lacked them."""
    repaired_fragments: Count = 0
    """Fragments that a read found damaged, or from another write, and rebuilt from others."""
    lost_pages: Count = 0
    """Pages of which too few fragments were left: read from the backup file."""
    latency: Annotated[tuple[LatencyInfo, ...], msgspec.Meta(max_length=16)] = ()
    """Latencies of NBD requests in the last ten seconds or so."""
    export: Annotated[str, msgspec.Meta(max_length=512)] = ""
    state: DeviceState = "serving"
    reason: Text = ""

    def __post_init__(self) -> None:
        cut_texts(self)


SlabState = Literal["making", "free", "lent", "evicting", "held", "renewing", "leaving"]
"""`held`: its device is gone and may claim it; `leaving`: its memory goes back to the machine."""


class SlabInfo(Record, kw_only=True, frozen=True):
    """One slab of a lender, for operators."""

    slab: SlabId
    state: SlabState
    generation: Count = 0
    device: MaybeId = ""
    span: Count = 0
    since_s: Seconds = 0.0


class ListSlabs(Message, kw_only=True, frozen=True, tag="slabd.list"):
    """sw.v1.cmd.slabd.<id>.slabs"""


class SlabList(Message, kw_only=True, frozen=True, tag="slabd.list-reply"):
    lender: LenderId
    slab_bytes: Positive
    slabs: Annotated[tuple[SlabInfo, ...], msgspec.Meta(max_length=4096)]


class EvictNow(Message, kw_only=True, frozen=True, tag="slabd.evict"):
    """Operator to lender: evict so many lent slabs (batch eviction picks them), or these.

    Answered by EvictBegun; facts `sw.v1.evt.slab.<id>.evicted` (or `.revoked`) follow. Refused
    where there is nothing to evict.
    """

    count: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    slabs: SlabIds = ()


class EvictBegun(Message, kw_only=True, frozen=True, tag="slabd.evict-reply"):
    """The number of slabs that go: fewer than were asked for where fewer are lent."""

    slabs: Positive


class SetLending(Message, kw_only=True, frozen=True, tag="slabd.lending"):
    """Operator to lender: lend nothing new and evict everything (drain), or lend again. Answered
    by Ok once that is durable: it outlives the daemon and its machine."""

    lending: bool


class LenderRecord(Record, kw_only=True, frozen=True):
    """A lender that an operator drained: the key `drained` of the bucket `lender_<id>`, written by
    the lender, deleted when it lends again."""

    lender: LenderId
    drained_s: Seconds


class SlabEvent(Message, kw_only=True, frozen=True, tag="slab.event"):
    """sw.v1.evt.slab.<id>.lent | returned | evicted | revoked | claimed | lost."""

    slab: SlabId
    fact: Literal["lent", "returned", "evicted", "revoked", "claimed", "lost"]
    lender: LenderId
    device: MaybeId
    span: Count
    took_s: Seconds = 0.0
    """Seconds that an eviction took, from EVICT to DONE."""
    reason: Text = ""
    at_s: Seconds

    def __post_init__(self) -> None:
        cut_texts(self)


class MemberRecord(Record, kw_only=True, frozen=True, gc=False):
    """A remote slab that backs a span."""

    lender: LenderId
    slab: SlabId
    generation: Positive


class SpanRecord(Record, kw_only=True, frozen=True, gc=False):
    span: Count
    members: Annotated[tuple[MemberRecord | None, ...], msgspec.Meta(max_length=32)]


class DeviceRecord(Record, kw_only=True, frozen=True):
    """The slab map of a device: the key `map` of the bucket `device_<id>`, written by the device.
    The spans of a large device go on under `map-1`, `map-2`, ...: of as many spans each as one
    record takes whatever backs them, so that a span stays where it is.

    With a disk backup it is for operators; with redundancy in remote memory alone it is how a
    device that starts again finds its pages, and a slab counts only once it is in here.
    """

    device: DeviceId
    node: NodeId
    size_bytes: Count
    slab_bytes: Count
    resilience: Name
    secret: Secret = ""
    """Empty where nothing is claimed after a restart of the device."""
    spans: Annotated[tuple[SpanRecord, ...], msgspec.Meta(max_length=65_536)] = ()
    epoch: Count = 0


class GetMap(Message, kw_only=True, frozen=True, tag="device.map"):
    """sw.v1.cmd.device.<id>.map, from the span `first` on."""

    first: Count = 0


SpanState = Literal["unmapped", "placing", "mapped", "suspended", "retreating"]


class SpanInfo(Record, kw_only=True, frozen=True):
    span: Count
    state: SpanState
    members: Annotated[tuple[MemberRecord | None, ...], msgspec.Meta(max_length=32)]
    activity: Finite
    remote_pages: Count
    """Pages whose newest bytes are in remote memory."""


class DeviceMap(Message, kw_only=True, frozen=True, tag="device.map-reply"):
    """Spans that are not idle and unmapped, as many as one message takes."""

    device: DeviceId
    size_bytes: Count
    span_bytes: Count
    spans: Annotated[tuple[SpanInfo, ...], msgspec.Meta(max_length=4096)]
    following: Count = 0
    """There are more: ask from this span on. 0: that is all."""


class SpanEvent(Message, kw_only=True, frozen=True, tag="span.event"):
    """sw.v1.evt.device.<id>.mapped | unmapped | suspended | resumed | refused."""

    device: DeviceId
    span: Count
    fact: Literal["mapped", "unmapped", "suspended", "resumed", "refused"]
    lender: MaybeId = ""
    reason: Text = ""
    took_s: Seconds = 0.0
    at_s: Seconds

    def __post_init__(self) -> None:
        cut_texts(self)
