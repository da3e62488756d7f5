"""The arithmetic of a control ring: a byte stream that the peer writes into our memory.

Each side owns a ring. The peer appends to it with RDMA WRITE with immediate, so that the bytes need
no buffer chosen by the receiver and their arrival is one completion; the immediate word is how many
came. The writer stays within credit, in bytes and in messages (each takes one posted receive), and
the reader gives credit back in the immediate of an empty message. Credits are differences: the
connection neither loses nor reorders. A message never crosses the ring's end.

Pure: positions count bytes since the beginning, memory and queues are somewhere else.
"""

from typing import Final

from slackwater.common.base.errors import DecodeRejected

_CREDIT: Final = 1 << 31
_BYTES_BITS: Final = 20
BYTES_MAX: Final = (1 << _BYTES_BITS) - 1
MESSAGES_MAX: Final = (1 << (31 - _BYTES_BITS)) - 1


def credit_word(nbytes: int, messages: int) -> int:
    """The immediate word that gives credit back."""
    return _CREDIT | messages << _BYTES_BITS | nbytes


def read_credit(word: int) -> tuple[int, int] | None:
    """(bytes, messages), or None: the word is the length of data."""
    if not word & _CREDIT:
        return None
    return word & BYTES_MAX, (word & ~_CREDIT) >> _BYTES_BITS


class Outgoing:
    """The writer's side."""

    def __init__(self, nbytes: int, messages: int) -> None:
        self._nbytes, self._messages = nbytes, messages
        self.written = 0
        self.completed = 0
        """Written, and acknowledged by the peer's NIC: the copy here may be overwritten."""
        self._credited = 0
        self._sent_messages = self._credited_messages = 0

    @property
    def idle(self) -> bool:
        """Say whether all that was written has arrived."""
        return self.completed == self.written

    def room(self) -> int:
        """Bytes that the next message may have; 0: wait for credit or for a completion."""
        if self._sent_messages - self._credited_messages >= self._messages:
            return 0
        free = self._nbytes - (self.written - min(self._credited, self.completed))
        return min(free, self._nbytes - self.written % self._nbytes)

    def put(self, nbytes: int) -> int:
        """A message of this length is sent: its offset, in the ring and in the copy here."""
        if not 0 < nbytes <= self.room():
            raise ValueError(f"{nbytes} bytes where {self.room()} fit")
        offset = self.written % self._nbytes
        self.written += nbytes
        self._sent_messages += 1
        return offset

    def credit(self, nbytes: int, messages: int) -> None:
        """Raises DecodeRejected when the peer gives back what it never got."""
        self._credited += nbytes
        self._credited_messages += messages
        if self._credited > self.written or self._credited_messages > self._sent_messages:
            raise DecodeRejected(f"credit for {self._credited} bytes of {self.written} sent")


class Incoming:
    """The reader's side."""

    def __init__(self, nbytes: int, messages: int) -> None:
        self._nbytes, self._messages = nbytes, messages
        self._received = self._told = 0
        self._received_messages = self._told_messages = 0

    def arrived(self, nbytes: int) -> int:
        """A message of this length came: its offset. Raises DecodeRejected beyond the credit."""
        offset = self._received % self._nbytes
        if not 0 < nbytes <= self._nbytes - offset:
            raise DecodeRejected(f"{nbytes} bytes at {offset} of a ring of {self._nbytes}")
        self._received += nbytes
        self._received_messages += 1
        if (
            self._received - self._told > self._nbytes
            or self._received_messages - self._told_messages > self._messages
        ):
            raise DecodeRejected("the peer writes beyond its credit")
        return offset

    def owed(self) -> int | None:
        """The credit word that is due: a quarter of the ring, or of the messages, was consumed."""
        nbytes = self._received - self._told
        messages = self._received_messages - self._told_messages
        if nbytes * 4 < self._nbytes and messages * 4 < self._messages:
            return None
        self._told, self._told_messages = self._received, self._received_messages
        return credit_word(nbytes, messages)
