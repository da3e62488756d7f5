"""The page behind a slab's data: what the slab is, and the word that fences its former user off.

    word 0   the fence: state (8 bits), generation (56 bits)
    word 1   magic and layout version
    word 2   bytes of the record
    word 3   CRC-32 of the record
    32...    the record: msgpack of SlabIdentity

A lender changes the fence *before* it takes the data away; a device that maps the slab reads it
*after* each copy. x86 and the interpreter's own locks keep both orders; elsewhere the mutex around
the device's copies is the barrier. The word is written alone and last, so a trailer is either the
old or the new one.
"""

import struct
import zlib
from typing import Annotated, Final, Literal

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.schemas.base import Name, Record, Seconds, Secret
from slackwater.schemas.memory import SlabId

TRAILER_BYTES: Final = 4096
FREE: Final = 1
LENT: Final = 2
REVOKED: Final = 3
GENERATION_MAX: Final = 2**52
"""Message fields hold exact whole numbers up to 2**53; the state goes above."""

_WORD: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<QQQ")
_HEAD_AT: Final = 8
_BODY_AT: Final = 32
_MAGIC: Final = 0x5357_534C_4142_0001
_STATE_SHIFT: Final = 56

State = Literal[1, 2, 3]


class SlabIdentity(Record, kw_only=True, frozen=True):
    """The device that has the slab; all that a daemon needs to take a claim after its restart."""

    slab: SlabId
    slab_bytes: int
    generation: int = 0
    device: Name = ""
    span: int = 0
    member: int = 0
    secret: Secret = ""
    hold_s: Seconds = 0.0
    since_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


def fence(state: State, generation: int) -> int:
    assert 0 <= generation < GENERATION_MAX, generation
    return state << _STATE_SHIFT | generation


def fence_state(word: int) -> int:
    return word >> _STATE_SHIFT


def generation_of(word: int) -> int:
    return word & ((1 << _STATE_SHIFT) - 1)


def read_fence(region: memoryview) -> int:
    """Return the fence word of a whole region: data and trailer."""
    word: int = _WORD.unpack_from(region, len(region) - TRAILER_BYTES)[0]
    return word


def write_fence(region: memoryview, state: State, generation: int) -> None:
    _WORD.pack_into(region, len(region) - TRAILER_BYTES, fence(state, generation))


def write(region: memoryview, state: State, identity: SlabIdentity) -> None:
    """The record first, then the word that makes it valid."""
    body = msgspec.msgpack.encode(identity)
    start = len(region) - TRAILER_BYTES
    if _BODY_AT + len(body) > TRAILER_BYTES:
        raise Rejected(f"slab {identity.slab}: a trailer of {len(body)} bytes does not fit a page")
    region[start + _BODY_AT : start + _BODY_AT + len(body)] = body
    _HEAD.pack_into(region, start + _HEAD_AT, _MAGIC, len(body), zlib.crc32(body))
    write_fence(region, state, identity.generation)


def read(region: memoryview) -> tuple[int, SlabIdentity]:
    """(fence word, identity). Raises Rejected where there is no whole trailer: its writer was
    killed in the middle, or this is not a slab."""
    start = len(region) - TRAILER_BYTES
    if start <= 0:
        raise Rejected(
            f"a region of {len(region)} bytes is not a slab: no room for data and trailer"
        )
    magic, length, crc = _HEAD.unpack_from(region, start + _HEAD_AT)
    if magic != _MAGIC or length > TRAILER_BYTES - _BODY_AT:
        raise Rejected("the region has no trailer of this version")
    body = bytes(region[start + _BODY_AT : start + _BODY_AT + length])
    if zlib.crc32(body) != crc:
        raise Rejected("the trailer's record is torn")
    try:
        identity = msgspec.msgpack.decode(body, type=SlabIdentity)
    except msgspec.DecodeError as error:
        raise Rejected(f"the trailer's record cannot be read: {error}") from error
    word = read_fence(region)
    if identity.slab_bytes != start or generation_of(word) != identity.generation:
        raise Rejected(f"slab {identity.slab}: fence and record of the trailer differ")
    return word, identity
