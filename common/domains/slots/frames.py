"""The frames that Agents, aggregators and aggregators among themselves exchange on a channel.

The doorbells (RING, DONE, PART) are fixed binary records, several to a frame: they are the hot
path. All else is rare and is msgpack. A channel begins with a `Hello` (the transport's hello
bytes).

    Agent                                    aggregator
      Attach(buckets)                  ->
                                       <-      Granted | Moved | Denied, one per bucket
      Offer(version)                   ->      only where Granted.initialized is false
                                       <-      SeedAsked, to the newest version's lowest rank
      (writes its parameters), Seed    ->
                                       <-      DONE(version), to all
      (writes slot, then pushed word)
        (from afar, of a large slot:
      PART(handle, iteration, elements)->      so many of its first elements are in)
      RING(handle, iteration)          ->
                                       <-      DONE(version) | Moved | PushRefused

A version, in a frame to or from a worker, is the newest iteration of that worker's own that is done
with. In synchronous jobs it is everybody's.

A push is known by (job, bucket, iteration, worker): ringing again after a lost channel is a retry
and is never counted twice. DONE is the pull response; `Moved` is the pull response that names the
new aggregator (paper, appendix B).
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

import msgspec

from slackwater.common.base.codec import shortened
from slackwater.common.base.errors import DecodeRejected
from slackwater.schemas.base import WORKERS_MAX, Count, MaybeId, Rank, Seconds, Text
from slackwater.schemas.placement import Endpoint

_RING: Final = 1
_DONE: Final = 2
_CONTROL: Final = 3
_PART: Final = 4
_HEAD = struct.Struct("<BxH")  # type, number of entries
_RING_ENTRY = struct.Struct("<IQ")  # handle, iteration
_DONE_ENTRY = struct.Struct("<IQI")  # handle, version, location epoch
_PART_ENTRY = struct.Struct("<IQQ")  # handle, iteration, elements
ENTRIES_MAX: Final = 2048
"""Doorbells in one frame."""


class _Control(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag_field="t"):
    pass


class Hello(_Control, frozen=True, kw_only=True, tag="hello"):
    """The peer's identity when it connects. `token` is that of the process for an Agent
    (tokens.py), the cluster's own for an aggregator."""

    role: Literal["agent", "aggregator"]
    job: MaybeId = ""
    rank: Rank = 0
    attempt: Count = 0
    layout_epoch: Count = 0
    token: Annotated[str, msgspec.Meta(max_length=256)] = ""
    sender: Annotated[str, msgspec.Meta(max_length=128)] = ""


HeldStates = Literal["", "parts", "whole"]
"""Says what a worker has of a bucket's optimiser states: nothing, copies of some parts from some
iterations ago, or all of them as of its version."""


class Attach(_Control, frozen=True, kw_only=True, tag="attach"):
    buckets: Annotated[tuple[Count, ...], msgspec.Meta(max_length=ENTRIES_MAX)]


class Granted(_Control, frozen=True, kw_only=True, tag="granted"):
    """`handle` stands for the bucket in later frames of this channel. `region` tells one region
    of the bucket from another: it changes only when the bytes were lost."""

    bucket: Count
    handle: Count
    key: bytes
    region: bytes
    location_epoch: Count
    initialized: bool
    version: Count


class Moved(_Control, frozen=True, kw_only=True, tag="moved"):
    """The pull response with a new location: `version` is complete, ring `to` from now on."""

    bucket: Count
    version: Count
    initialized: bool
    location_epoch: Count
    to: Endpoint


class Denied(_Control, frozen=True, kw_only=True, tag="denied"):
    """This aggregator does not have the bucket: ask the controller (`locate`) again."""

    bucket: Count
    why: Text
    retry_after_s: Seconds = 0.1


class Offer(_Control, frozen=True, kw_only=True, tag="offer"):
    """This worker could fill the bucket with its parameters of `version`. In jobs whose updates are
    not synchronous they contain the iterations `applied`, one a rank."""

    handle: Count
    version: Count
    applied: Annotated[tuple[Count, ...], msgspec.Meta(max_length=WORKERS_MAX)] = ()
    states: HeldStates = ""
    """Whether it has the optimiser's states beside them."""
    wanted: Count = 0
    """The version of the job's other buckets, where this worker has no parameters but its
    program's: a checkpoint may stand in for them."""


class SeedAsked(_Control, frozen=True, kw_only=True, tag="seed-asked"):
    """Fill the bare region at `version`: with all that the worker offered, or with the parts of the
    optimiser's states alone, where another worker has newer parameters."""

    handle: Count
    version: Count = 0
    only_states: bool = False


class Seed(_Control, frozen=True, kw_only=True, tag="seed"):
    """The parameters of `version` are written into the buffer that holds that version. Where
    updates are not synchronous it is the number of updates that they contain."""

    handle: Count
    version: Count
    updates: Count = 0
    """How many updates the optimiser's states have had that are written beside them; 0: they are
    fresh."""
    elements: Count = 0
    """How many elements of each state are written: copies may be of a part only."""
    behind: Count = 0
    """By how many versions the oldest of them is behind `version`."""


class PushRefused(_Control, frozen=True, kw_only=True, tag="push-refused"):
    """The push was not applied. The named worker's push is forgotten, so that it can push again."""

    handle: Count
    iteration: Count
    job: Text
    tensor: Text
    worker: Count
    why: Text


Control = Attach | Granted | Moved | Denied | Offer | SeedAsked | Seed | PushRefused
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_hello_decoder = msgspec.msgpack.Decoder(Hello)


class Ring(msgspec.Struct, frozen=True, array_like=True):
    handle: int
    iteration: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    handle: int
    iteration: int
    elements: int


class Done(msgspec.Struct, frozen=True, array_like=True):
    handle: int
    version: int
    location_epoch: int


def encode_rings(rings: Iterable[tuple[int, int]]) -> bytes:
    """(handle, iteration) pairs, at most ENTRIES_MAX."""
    body = b"".join(_RING_ENTRY.pack(handle, iteration) for handle, iteration in rings)
    return _HEAD.pack(_RING, len(body) // _RING_ENTRY.size) + body


def encode_part(handle: int, iteration: int, elements: int) -> bytes:
    return _HEAD.pack(_PART, 1) + _PART_ENTRY.pack(handle, iteration, elements)


def encode_dones(dones: Iterable[tuple[int, int, int]]) -> bytes:
    """(handle, version, location epoch) triples, at most ENTRIES_MAX."""
    body = b"".join(_DONE_ENTRY.pack(*done) for done in dones)
    return _HEAD.pack(_DONE, len(body) // _DONE_ENTRY.size) + body


def encode_control(control: Control) -> bytes:
    return _HEAD.pack(_CONTROL, 1) + _encoder.encode(control)


def encode_hello(hello: Hello) -> bytes:
    return _encoder.encode(hello)


def decode_hello(payload: bytes) -> Hello:
    """Raises DecodeRejected."""
    try:
        return _hello_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeRejected(shortened(f"a hello that is none: {error}")) from error


_DOORBELLS: Final[dict[int, tuple[struct.Struct, type[Ring | Done | Part]]]] = {
    _RING: (_RING_ENTRY, Ring),
    _DONE: (_DONE_ENTRY, Done),
    _PART: (_PART_ENTRY, Part),
}


def decode(frame: bytes) -> Iterator[Ring | Done | Part | Control]:
    """Return the messages in a frame, in order. Raises DecodeRejected on anything malformed."""
    if len(frame) < _HEAD.size:
        raise DecodeRejected(f"a frame of {len(frame)} bytes, at least {_HEAD.size} are needed")
    kind, count = _HEAD.unpack_from(frame)
    body = memoryview(frame)[_HEAD.size :]
    if kind == _CONTROL:
        try:
            yield _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeRejected(shortened(f"a control frame that is none: {error}")) from error
        return
    if kind not in _DOORBELLS:
        raise DecodeRejected(f"a frame of unknown type {kind}")
    entry, doorbell = _DOORBELLS[kind]
    if count > ENTRIES_MAX or len(body) != count * entry.size:
        raise DecodeRejected(f"a frame of type {kind} with {count} entries in {len(body)} bytes")
    for fields in entry.iter_unpack(body):
        yield doorbell(*fields)
