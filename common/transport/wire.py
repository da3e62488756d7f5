"""The records on every socket of the data plane, and the parser that finds them in a byte stream.

One header for all: kind, handle, number, offset, length; then `length` bytes of body. The parser is
pure: it says where the next bytes belong (`room`), is told how many came (`took`), and gives whole
records to its sink, which has checked the length before. Nothing is allocated on the word of a peer
alone. Records with bulk bytes have streams of their own, whose parsers are compiled
(target_kernels.py, initiator_kernels.py).
"""

import struct
from typing import Final, NamedTuple, Protocol

from slackwater.common.base.errors import (
    AccessRefused,
    DecodeRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)

VERSION: Final = 2
"""The version of the wire format; a HELLO carries it as its handle."""

# A connection's first record, and the answers to it
HELLO: Final = 1  # handle = VERSION, offset = data streams wanted, body = the hello
WELCOME: Final = 2  # offset = data streams granted, body = session
JOIN: Final = 3  # handle = data stream, or a lane behind them, body = session
RESUME: Final = 4  # number = ordered records received (as in its WELCOME), body = session
REFUSED: Final = 5  # handle = a code below, offset = request, number = transfer, body = why

# Control
FRAME: Final = 6  # body = the frame
PROGRESS: Final = 7  # number = frames consumed, offset = their bytes, body = ordinals received
OPEN: Final = 8  # offset = request, body = key
OPENED: Final = 9  # offset = request, handle = region, number = its bytes (shm: + descriptor;
# body = an invitation, where the region's body is on a device). offset 0: nobody asked, body = key
REVOKED: Final = 10  # body = key; or number = the handle of a PREPARE that leads nowhere
PREPARE: Final = 11  # offset = request, number = bytes, body = label; the answer is OPENED
HANDOVER: Final = 12  # offset = request, handle = bytes of the label, body = label + note,
# number = the handle from PREPARE (shm: + descriptor)
ACCEPTED: Final = 13  # offset = request
GOODBYE: Final = 14

# Data
WRITE: Final = 15  # handle, number = transfer, offset, body = the bytes
ACK: Final = 16  # number = transfer
READ: Final = 17  # handle, number = transfer, offset, body = the count of bytes wanted
DATA: Final = 18  # number = transfer, body = the bytes

# Control, of memory on a device; the answers are ACCEPTED
ARRIVED: Final = 19  # offset = request, body = key + RANGE: written into the memfd, take it on
FETCH: Final = 20  # offset = request, body = key + RANGE: put it into the memfd, to be read
RETURNED: Final = 21  # body = key: the device memory that OPENED lent is closed

HEADER: Final = struct.Struct("<BxxxIQQQ")
WORD: Final = struct.Struct("<Q")
RANGE: Final = struct.Struct("<QQ")
"""Offset, count of bytes."""
HEADER_BYTES: Final = HEADER.size
STAGING_BYTES: Final = 64 * 1024
FIRST_STAGING_BYTES: Final = 4 * 1024
"""Until a peer sends more at once: most connections are idle, or only greet."""
READ_BYTES: Final = 256 * 1024
"""The most that one system call receives: larger reads were slower on loopback."""
REASON_BYTES_MAX: Final = 1024

_REFUSALS: Final[dict[int, type[SlackwaterError]]] = {
    1: AccessRefused,
    2: Rejected,
    3: Unavailable,
}


class Header(NamedTuple):
    kind: int
    handle: int
    number: int
    offset: int
    length: int


def pack(
    kind: int, *, handle: int = 0, number: int = 0, offset: int = 0, body: bytes = b""
) -> bytes:
    """A whole record."""
    return HEADER.pack(kind, handle, number, offset, len(body)) + body


def pack_refusal(error: SlackwaterError, *, number: int = 0, offset: int = 0) -> bytes:
    code = next((code for code, kind in _REFUSALS.items() if isinstance(error, kind)), 3)
    why = str(error).encode()[:REASON_BYTES_MAX]
    return pack(REFUSED, handle=code, number=number, offset=offset, body=why)


def refusal(header: Header, body: bytes) -> SlackwaterError:
    """The error that a REFUSED record stands for, to be raised at the one who asked."""
    why = body[:REASON_BYTES_MAX].decode("utf-8", "replace") or "refused without a reason"
    return _REFUSALS.get(header.handle, Unavailable)(why)


class Sink(Protocol):
    """The receiver of one stream's records."""

    def begin(self, header: Header) -> None:
        """A body of `header.length` bytes follows. Raises DecodeRejected when it is too long."""
        ...

    def end(self, header: Header, body: bytes) -> None:
        """The record is complete."""
        ...


class Parser:
    """Finds records in whatever pieces the bytes come."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.paused = False
        """Set by a sink in `end`: what follows waits for `run`."""
        self._stopped = False
        self._staging = memoryview(b"")
        self._start = self._end = 0
        self._header = Header(0, 0, 0, 0, 0)
        self._body: bytearray | None = None
        """The body of the present record, where it did not come in one piece."""
        self._filled = 0
        self.records = 0
        """How many were complete so far."""

    @property
    def partial(self) -> bool:
        """A record was begun and is not complete."""
        return self._body is not None or self._end > self._start

    def stop(self) -> None:
        """Give out no record from now on, whatever has come: the stream is over."""
        self._stopped = True
        self._staging, self._start, self._end = memoryview(b""), 0, 0
        self._body = None

    def room(self) -> memoryview:
        """Where the next bytes belong. Never empty unless paused with the staging full."""
        if self._body is not None:
            return memoryview(self._body)[self._filled : self._filled + READ_BYTES]
        if not self._staging:
            self._staging = memoryview(bytearray(FIRST_STAGING_BYTES))
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._staging[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._staging[: self._end] = rest
        return self._staging[self._end :]

    def took(self, count: int) -> None:
        """`count` bytes were put into `room()`. Raises DecodeRejected."""
        if self._body is None:
            self._end += count
            if self._end == FIRST_STAGING_BYTES == len(self._staging):
                first, self._staging = self._staging, memoryview(bytearray(STAGING_BYTES))
                self._staging[: self._end] = first
        else:
            self._filled += count
            if self._filled == len(self._body):
                self._finish(bytes(self._body))
        self.run()

    def run(self) -> None:
        """Give out what is complete in the staging area. Raises DecodeRejected."""
        while not self.paused and not self._stopped and self._body is None:
            if self._end - self._start < HEADER_BYTES:
                return
            header = Header._make(HEADER.unpack_from(self._staging, self._start))
            self._start += HEADER_BYTES
            if header.length:
                self._begin(header)
            else:
                self._header = header
                self._finish(b"")

    def rest(self) -> bytes:
        """Return the bytes behind the record in whose `end` the sink paused."""
        return bytes(self._staging[self._start : self._end])

    def _begin(self, header: Header) -> None:
        self.sink.begin(header)
        self._header = header
        start = self._start
        staged = min(self._end - start, header.length)
        self._start += staged
        body = self._staging[start : start + staged]
        if staged == header.length:
            self._finish(bytes(body))
            return
        self._body, self._filled = bytearray(header.length), staged
        self._body[:staged] = body

    def _finish(self, body: bytes) -> None:
        self._body = None
        self.records += 1
        self.sink.end(self._header, body)


def check_length(header: Header, length_max: int) -> None:
    """Raises DecodeRejected."""
    if header.length > length_max:
        raise DecodeRejected(
            f"a record of kind {header.kind} with {header.length} bytes, at most {length_max} fit"
        )
