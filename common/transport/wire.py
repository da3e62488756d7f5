"""The records on every socket of the data plane, and the parser that finds them in a byte stream.

One header for all: kind, handle, number, offset, length; then `length` bytes of body. The parser is
pure: it says where the next bytes belong (`room`), is told how many came (`took`), and gives whole
records to its sink. A sink may name the memory a body belongs in (a slice of a registered region),
so that bulk bytes are received there and not copied; all else is collected, after the sink has
checked the length. Nothing is allocated on the word of a peer alone.
"""

import struct
from typing import Final, NamedTuple, Protocol

from slackwater.common.errors import (
    AccessRefused,
    DecodeRejected,
    Rejected,
    SlackwaterError,
    Unavailable,
)

VERSION: Final = 1
"""Of the wire format; a HELLO carries it as its handle."""

# A connection's first record, and the answers to it
HELLO: Final = 1  # handle = VERSION, offset = data streams wanted, body = the hello
WELCOME: Final = 2  # offset = data streams granted, body = session
JOIN: Final = 3  # handle = data stream, body = session
RESUME: Final = 4  # number = ordered records received (as in its WELCOME), body = session
REFUSED: Final = 5  # handle = a code below, offset = request, number = transfer, body = why

# Control
FRAME: Final = 6  # body = the frame
PROGRESS: Final = 7  # number = frames consumed, offset = their bytes, body = ordinals received
OPEN: Final = 8  # offset = request, body = key
OPENED: Final = 9  # offset = request, handle = region, number = its bytes (shm: + descriptor;
# body = an invitation, where the region's body is on a device)
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


def pack_header(kind: int, handle: int, number: int, offset: int, length: int) -> bytes:
    """The header of a record whose body follows from elsewhere."""
    return HEADER.pack(kind, handle, number, offset, length)


def pack_refusal(error: SlackwaterError, *, number: int = 0, offset: int = 0) -> bytes:
    code = next((code for code, kind in _REFUSALS.items() if isinstance(error, kind)), 3)
    why = str(error).encode()[:REASON_BYTES_MAX]
    return pack(REFUSED, handle=code, number=number, offset=offset, body=why)


def refusal(header: Header, body: bytes) -> SlackwaterError:
    """The error that a REFUSED record stands for, to be raised at the one who asked."""
    why = body.decode("utf-8", "replace") or "refused without a reason"
    return _REFUSALS.get(header.handle, Unavailable)(why)


class Sink(Protocol):
    """Who gets the records of one stream."""

    def begin(self, header: Header) -> memoryview | None:
        """A body of `header.length` bytes follows: the memory of that length it belongs in, or None
        to have it collected. Raises DecodeRejected when such a record may not be."""
        ...

    def end(self, header: Header, body: bytes) -> None:
        """The record is complete; `body` is empty where `begin` named memory."""
        ...


class Parser:
    """Finds records in whatever pieces the bytes come."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.paused = False
        """Set by a sink in `end`: what follows waits for `run`."""
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0
        self._header = Header(0, 0, 0, 0, 0)
        self._target: memoryview | None = None
        self._filled = 0
        self._collected: bytearray | None = None
        self.records = 0
        """How many were complete so far."""

    @property
    def partial(self) -> bool:
        """A record was begun and is not complete."""
        return self._target is not None or self._end > self._start

    def room(self) -> memoryview:
        """Where the next bytes belong. Never empty unless paused with the staging full."""
        if self._target is not None:
            return self._target[self._filled : self._filled + READ_BYTES]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._staging[self._start : self._end])
            self._start, self._end = 0, len(rest)
            self._staging[: self._end] = rest
        return self._staging[self._end :]

    def took(self, count: int) -> None:
        """`count` bytes were put into `room()`. Raises DecodeRejected."""
        if self._target is None:
            self._end += count
        else:
            self._filled += count
            self._finish()
        self.run()

    def run(self) -> None:
        """Give out what is complete in the staging area. Raises DecodeRejected."""
        while not self.paused and self._target is None:
            if self._end - self._start < HEADER_BYTES:
                return
            header = Header._make(HEADER.unpack_from(self._staging, self._start))
            self._start += HEADER_BYTES
            if header.length:
                self._begin(header)
            else:
                self.records += 1
                self.sink.end(header, b"")

    def divert(self) -> None:
        """Put what is still to come of the present body elsewhere: its memory is wanted back."""
        if self._target is not None:
            self._target = memoryview(bytearray(len(self._target)))

    def _begin(self, header: Header) -> None:
        target = self.sink.begin(header)
        start = self._start
        staged = min(self._end - start, header.length)
        self._start += staged
        if target is None:
            if staged == header.length:
                self.records += 1
                self.sink.end(header, bytes(self._staging[start : start + staged]))
                return
            self._collected = bytearray(header.length)
            target = memoryview(self._collected)
        target[:staged] = self._staging[start : start + staged]
        self._header, self._target, self._filled = header, target, staged
        self._finish()

    def _finish(self) -> None:
        if self._filled < self._header.length:
            return
        body = b"" if self._collected is None else bytes(self._collected)
        self._target = self._collected = None
        self.records += 1
        self.sink.end(self._header, body)


def check_length(header: Header, length_max: int) -> None:
    """Raises DecodeRejected."""
    if header.length > length_max:
        raise DecodeRejected(
            f"a record of kind {header.kind} with {header.length} bytes, at most {length_max} fit"
        )
