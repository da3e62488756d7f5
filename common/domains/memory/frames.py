"""The frames between device and lender: schemas/memory.py's messages, as msgpack."""

from typing import TypeVar

from slackwater.common.base import codec
from slackwater.schemas.base import Message
from slackwater.schemas.memory import ToDevice, ToLender

M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    return codec.encode(message)


def to_lender(frame: bytes) -> ToLender:
    """Raises DecodeRejected: then the peer is not one of our devices, and its channel ends."""
    message: ToLender = codec.decode(frame, ToLender)
    return message


def to_device(frame: bytes) -> ToDevice:
    """Raises DecodeRejected."""
    message: ToDevice = codec.decode(frame, ToDevice)
    return message
