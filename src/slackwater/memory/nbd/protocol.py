"""The numbers of the NBD protocol, and the pure packing of its messages.

https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md, newstyle fixed handshake, simple
and structured replies. All numbers on the wire are big-endian.
"""

import struct
from typing import Final

INIT_MAGIC: Final = 0x4E42444D41474943
OPTION_MAGIC: Final = 0x49484156454F5054
OPTION_REPLY_MAGIC: Final = 0x3E889045565A9
REQUEST_MAGIC: Final = 0x25609513
SIMPLE_MAGIC: Final = 0x67446698
CHUNK_MAGIC: Final = 0x668E33EF

# Handshake flags
FIXED_NEWSTYLE: Final = 1
NO_ZEROES: Final = 2

# Options
OPT_EXPORT_NAME: Final = 1
OPT_ABORT: Final = 2
OPT_LIST: Final = 3
OPT_INFO: Final = 6
OPT_GO: Final = 7
OPT_STRUCTURED_REPLY: Final = 8
OPT_LIST_META_CONTEXT: Final = 9
OPT_SET_META_CONTEXT: Final = 10

REP_ACK: Final = 1
REP_SERVER: Final = 2
REP_INFO: Final = 3
REP_META_CONTEXT: Final = 4
REP_ERR_UNSUP: Final = 2**31 + 1
REP_ERR_POLICY: Final = 2**31 + 2
REP_ERR_INVALID: Final = 2**31 + 3
REP_ERR_UNKNOWN: Final = 2**31 + 6

INFO_EXPORT: Final = 0
INFO_NAME: Final = 1
INFO_BLOCK_SIZE: Final = 3

# Transmission flags
HAS_FLAGS: Final = 1
SEND_FLUSH: Final = 4
SEND_FUA: Final = 8
SEND_TRIM: Final = 32
SEND_WRITE_ZEROES: Final = 64
SEND_DF: Final = 128
CAN_MULTI_CONN: Final = 256
SEND_CACHE: Final = 1024

# Commands and their flags
READ: Final = 0
WRITE: Final = 1
DISCONNECT: Final = 2
FLUSH: Final = 3
TRIM: Final = 4
CACHE: Final = 5
WRITE_ZEROES: Final = 6
BLOCK_STATUS: Final = 7

FUA: Final = 1
NO_HOLE: Final = 2
DONT_FRAGMENT: Final = 4
REQ_ONE: Final = 8
FLAGS_KNOWN: Final = FUA | NO_HOLE | DONT_FRAGMENT | REQ_ONE
"""Flags of commands. FAST_ZERO is not offered, and so refused."""

# The one context of BLOCK_STATUS
ALLOCATION: Final = b"base:allocation"
ALLOCATION_ID: Final = 1
HOLE: Final = 1
ZERO: Final = 2

# Structured replies
CHUNK_DONE: Final = 1
CHUNK_DATA: Final = 1
CHUNK_STATUS: Final = 5
CHUNK_ERROR: Final = 2**15 + 1

# Errors
EPERM: Final = 1
EIO: Final = 5
ENOMEM: Final = 12
EINVAL: Final = 22
ENOSPC: Final = 28
EOVERFLOW: Final = 75
ENOTSUP: Final = 95
ESHUTDOWN: Final = 108
_KNOWN: Final = frozenset((EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP, ESHUTDOWN))

GREETING: Final = struct.Struct(">QQH")
CLIENT_FLAGS: Final = struct.Struct(">I")
OPTION: Final = struct.Struct(">QII")
OPTION_REPLY: Final = struct.Struct(">QIII")
EXPORT: Final = struct.Struct(">HQH")
BLOCK_SIZE: Final = struct.Struct(">HIII")
EXPORT_NAME_REPLY: Final = struct.Struct(">QH")
REQUEST: Final = struct.Struct(">IHHQQI")
SIMPLE: Final = struct.Struct(">IIQ")
CHUNK: Final = struct.Struct(">IHHQI")
ERROR: Final = struct.Struct(">IH")
OFFSET: Final = struct.Struct(">Q")
CONTEXT: Final = struct.Struct(">I")
EXTENT: Final = struct.Struct(">II")

REQUEST_BYTES: Final = REQUEST.size


def wire_error(number: int) -> int:
    """The protocol's error for an errno."""
    return number if number in _KNOWN else EIO


def option_reply(option: int, kind: int, body: bytes = b"") -> bytes:
    return OPTION_REPLY.pack(OPTION_REPLY_MAGIC, option, kind, len(body)) + body


def done(cookie: int) -> bytes:
    """The answer to anything but a read."""
    return SIMPLE.pack(SIMPLE_MAGIC, 0, cookie)


def failed(cookie: int, error: int, why: str, *, chunked: bool) -> bytes:
    """`chunked`: to a read after structured replies were agreed upon; then `why` can be told."""
    number = wire_error(error)
    if not chunked:
        return SIMPLE.pack(SIMPLE_MAGIC, number, cookie)
    text = why.encode()[:1024]
    body = ERROR.pack(number, len(text)) + text
    return CHUNK.pack(CHUNK_MAGIC, CHUNK_DONE, CHUNK_ERROR, cookie, len(body)) + body


def data_head(cookie: int, offset: int, nbytes: int, *, chunked: bool) -> bytes:
    """Return the bytes that precede those of a read."""
    if not chunked:
        return SIMPLE.pack(SIMPLE_MAGIC, 0, cookie)
    head = CHUNK.pack(CHUNK_MAGIC, CHUNK_DONE, CHUNK_DATA, cookie, OFFSET.size + nbytes)
    return head + OFFSET.pack(offset)


def status(cookie: int, extents: list[tuple[int, int]]) -> bytes:
    """The answer to BLOCK_STATUS: (bytes, HOLE | ZERO) from the range's start on."""
    body = CONTEXT.pack(ALLOCATION_ID) + b"".join(EXTENT.pack(*one) for one in extents)
    return CHUNK.pack(CHUNK_MAGIC, CHUNK_DONE, CHUNK_STATUS, cookie, len(body)) + body
