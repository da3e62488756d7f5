"""Read gloo's messages out of a stream of bytes: PyTorch's buckets are the collectives' sizes.

gloo writes a header of six 64-bit words before each message (nbytes, opcode, slot, offset, length,
roffset); opcodes 0 and 1 send, 2 and 3 notify. The slot's high byte is the collective (4: an
all-reduce), the four bytes below are its running number: all pieces of a collective have one slot.
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

HEADER: Final = struct.Struct("<6Q")
SEARCHED_BYTES: Final = 4096
"""Bytes of a segment in which a first header is looked for."""
MESSAGE_BYTES_MAX: Final = 1 << 34
MESSAGES_MAX: Final = 1 << 17
ALL_REDUCE: Final = 4
AT_ONCE: Final = 2
"""PyTorch's gloo group runs so many collectives at once: they may begin in any order."""
_SEND_MAX, _OPCODE_MAX = 1, 3
_HALF: Final = 1 << 31
_WORD: Final = 1 << 32


class GlooMessage(NamedTuple):
    ns: int
    slot: int
    nbytes: int


class GlooStream:
    """One direction of a connection, from anywhere on. `lost`: how often its place was lost."""

    def __init__(self) -> None:
        self.messages: list[GlooMessage] = []
        self.lost = 0
        self._next: int | None = None
        """The stream's number of the next header."""
        self._part = b""
        """The begin of a header that a segment ended in."""

    def feed(self, ns: int, seq: int, payload: memoryview) -> None:
        """Take the next segment of the stream, whole."""
        if self._next is None and not self._found(seq, payload):
            return
        while self._next is not None and len(self.messages) < MESSAGES_MAX:
            ahead = (self._next - seq) % _WORD
            if ahead >= _HALF:
                if len(self._part) != _WORD - ahead:
                    self._lose()
                    return
                header = self._part + bytes(payload[: HEADER.size - len(self._part)])
            elif ahead >= len(payload):
                return
            else:
                header = bytes(payload[ahead : ahead + HEADER.size])
            if len(header) < HEADER.size:
                self._part = header
                return
            self._part = b""
            nbytes, opcode, slot, _, length, _ = HEADER.unpack(header)
            if not _plausible(nbytes, opcode, length):
                self._lose()
                return
            if opcode <= _SEND_MAX:
                self.messages.append(GlooMessage(ns, slot, length))
            self._next = (self._next + nbytes) % _WORD

    def _found(self, seq: int, payload: memoryview) -> bool:
        last = min(len(payload), SEARCHED_BYTES) - HEADER.size
        for skip in range(last + 1):
            nbytes, opcode, _, _, length, _ = HEADER.unpack_from(payload, skip)
            if _plausible(nbytes, opcode, length):
                self._next = (seq + skip) % _WORD
                return True
        return False

    def _lose(self) -> None:
        self._next, self._part, self.lost = None, b"", self.lost + 1


def _plausible(nbytes: int, opcode: int, length: int) -> bool:
    if opcode > _OPCODE_MAX or nbytes >= MESSAGE_BYTES_MAX:
        return False
    return nbytes == HEADER.size + (length if opcode <= _SEND_MAX else 0)


def all_reduced(messages: Iterable[GlooMessage], workers: int) -> list[int]:
    """Return the bytes of each all-reduce, by their running numbers, out of what one of its ranks
    sent: in a ring of K ranks each sends 2 (K - 1) / K of them. For two workers that is exact. The
    last ones may be under way, and are left out."""
    sent: dict[int, int] = {}
    for message in messages:
        if message.slot >> 56 == ALL_REDUCE:
            key = message.slot >> 24
            sent[key] = sent.get(key, 0) + message.nbytes
    whole = [sent[key] for key in sorted(sent)][:-AT_ONCE]
    if workers <= 2:
        return whole
    return [4 * round(nbytes * workers / (2 * (workers - 1)) / 4) for nbytes in whole]
