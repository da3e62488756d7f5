"""Frames between driver and hosts, over TCP: a message, and perhaps a payload behind it."""

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from typing import Final

from slackwater.common.base import codec, limits
from slackwater.common.base.errors import DecodeRejected, Rejected
from slackwater.schemas.base import Message
from slackwater.schemas.elastic import FRAME_PACKED_BYTES, ORDERS_MAX, Order

HEAD: Final = struct.Struct(">IQ")
"""Bytes of the message, and of the payload."""
PAYLOAD_BYTES_MAX: Final = 2**30
"""Bytes of an executor's state."""


def framed(message: Message, payload: bytes = b"") -> list[bytes]:
    """Return the frame's parts, to be written one after another. Raises Rejected."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise Rejected(
            f"an executor's state of {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX}: divide the "
            "data into more executors"
        )
    encoded = codec.encode(message)
    return [HEAD.pack(len(encoded), len(payload)) + encoded, payload]


def sizes(head: bytes, bytes_max: int = PAYLOAD_BYTES_MAX) -> tuple[int, int]:
    """Return the lengths of message and payload, each of at most `bytes_max`. Raises
    DecodeRejected."""
    message, payload = HEAD.unpack(head)
    if message > min(limits.MESSAGE_BYTES_MAX, bytes_max) or payload > bytes_max:
        raise DecodeRejected(f"a frame of {message} and {payload} bytes is too large")
    return message, payload


def framefuls(orders: Sequence[Order]) -> Iterator[tuple[Order, ...]]:
    """Divide orders into what one frame can carry."""
    some: list[Order] = []
    filled = 0
    for order in orders:
        if some and (len(some) == ORDERS_MAX or filled + len(order.task) > FRAME_PACKED_BYTES):
            yield tuple(some)
            some, filled = [], 0
        some.append(order)
        filled += len(order.task)
    if some:
        yield tuple(some)


@cache
def release() -> str:
    """Return the release of slackwater that this process runs."""
    return version("slackwater")
