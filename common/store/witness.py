"""A witness of a bucket: how many records it holds, which, and which write was the last.

Pure. A bus server may lose acknowledged records without a word: it cuts a damaged file off, or
leaves a damaged record out. So each write carries a mark (Mark) that says what the bucket holds
after it, the writer keeps the newest mark in a file of its own before it acknowledges anything,
and its peers remember the newest that they were told. Whoever takes the bucket over compares what
it reads with all of them (`missing`).

A witness holds no record: what is lost can be named by it, not restored.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from slackwater.common.base.words import number_of

DIGEST_BYTES: Final = 16
_MODULUS: Final = 1 << (8 * DIGEST_BYTES)
NAMED_MAX: Final = 10
"""Missing records that are named one by one."""


class Mark(NamedTuple):
    """The state of a bucket after one write. Compared by `epoch`, then by `sequence`."""

    epoch: int
    """The writer's."""
    sequence: int
    """The write's."""
    records: int
    """Records that the bucket holds, the epoch's own not counted."""
    digest: str
    """The sum of the digests of these records, in hexadecimal."""

    def text(self) -> str:
        """Return the mark as a header's value."""
        return f"{self.epoch} {self.sequence} {self.records} {self.digest}"

    @classmethod
    def parsed(cls, text: str) -> Self | None:
        """Return the mark of a header's value; None: it is none."""
        words = text.split(" ")
        if len(words) != 4 or not all(word.isdecimal() for word in words[:3]):
            return None
        if len(words[3]) != 2 * DIGEST_BYTES:
            return None
        return cls(int(words[0]), int(words[1]), int(words[2]), words[3])

    @property
    def when(self) -> tuple[int, int]:
        return self.epoch, self.sequence


def digest_of(key: str, value: bytes) -> int:
    """Return a record's digest: of its key and its bytes."""
    hashed = hashlib.blake2b(key.encode() + b"\0", digest_size=DIGEST_BYTES)
    hashed.update(value)
    return int.from_bytes(hashed.digest(), "big")


class Content:
    """The records of a bucket by their digests, kept up to date write by write."""

    def __init__(self, records: Mapping[str, bytes] | None = None) -> None:
        self.digests = {key: digest_of(key, value) for key, value in (records or {}).items()}
        self._sum = sum(self.digests.values()) % _MODULUS

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def digest(self) -> str:
        return f"{self._sum:0{2 * DIGEST_BYTES}x}"

    def hexed(self) -> dict[str, str]:
        """Return key -> the record's digest in hexadecimal."""
        return {key: f"{digest:0{2 * DIGEST_BYTES}x}" for key, digest in self.digests.items()}

    def write(self, key: str, value: bytes | None) -> str:
        """Take a write in (None: the key is deleted); return the record's digest, empty: none."""
        self._sum -= self.digests.pop(key, 0)
        if value is None:
            self._sum %= _MODULUS
            return ""
        digest = self.digests[key] = digest_of(key, value)
        self._sum = (self._sum + digest) % _MODULUS
        return f"{digest:0{2 * DIGEST_BYTES}x}"

    def mark(self, epoch: int, sequence: int) -> Mark:
        return Mark(epoch, sequence, len(self), self.digest)


@dataclass(frozen=True, slots=True)
class Told:
    """All that a writer's file says: the newest mark, and the digests of the records behind it."""

    mark: Mark | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    damaged: int = 0
    """Lines that could not be read."""


@dataclass(frozen=True, slots=True)
class Found:
    """A bucket as it was read."""

    epoch: int
    """That of its epoch record; 0: it has none."""
    last: int
    """The sequence of its last write."""
    content: Content
    mark: Mark | None
    """The newest mark among its writes."""
    damaged: frozenset[str] = frozenset()
    """Keys of records that cannot be read: their bytes are not what was written."""

    @property
    def when(self) -> tuple[int, int]:
        return self.epoch, self.last


class Verdict(NamedTuple):
    missing: str
    """Says which records are not there; empty: all are that any witness knows of."""
    note: str
    """Says why it could not be compared; empty: it was."""


def compared(found: Found, told: Told, peers: Sequence[Mark]) -> Verdict:
    """Compare a bucket with the writer's own file and with what peers remember.

    A witness that is older than the bucket is behind, and not at fault: another instance wrote
    since, or the last write was not yet in the file. One that is newer proves a loss.
    """
    witnesses = sorted(
        (mark for mark in (told.mark, *peers) if mark is not None), key=lambda mark: mark.when
    )
    if witnesses and witnesses[-1].when > found.when:
        newest = witnesses[-1]
        return Verdict(
            f"write {newest.sequence} of epoch {newest.epoch} was acknowledged, with "
            f"{_records(newest.records)}; the last write that is there is {found.last} of epoch "
            f"{found.epoch}, with {_records(len(found.content))}{_named(found, told, newest)}",
            "",
        )
    same = [mark for mark in witnesses if mark.when == found.when]
    if found.mark is not None and found.mark.sequence == found.last:
        same.append(found.mark)
    for mark in same:
        if not _holds(found, mark):
            return Verdict(
                f"after write {mark.sequence} of epoch {mark.epoch} it held "
                f"{_records(mark.records)}, and {_records(len(found.content))} are there"
                f"{_named(found, told, mark)}",
                "",
            )
    if same or (found.mark is None and not witnesses):
        return Verdict("", "")
    return Verdict("", f"write {found.last} carries no mark: an older release or a person wrote it")


def _holds(found: Found, mark: Mark) -> bool:
    """Say whether the bucket holds what the mark says; of damaged records only how many."""
    if found.damaged:
        return len(found.content) == mark.records
    return (len(found.content), found.content.digest) == (mark.records, mark.digest)


def _named(found: Found, told: Told, mark: Mark) -> str:
    """Name what is missing, where the writer's file is of that very write."""
    if told.mark is None or told.mark.when != mark.when:
        return ""
    there = found.content.hexed()
    lost = [key for key in told.digests if key not in there]
    old = [
        key
        for key, digest in told.digests.items()
        if key in there and there[key] != digest and key not in found.damaged
    ]
    more = [key for key in there if key not in told.digests]
    parts = [
        f"{what}: {listed(keys)}"
        for what, keys in (("missing", lost), ("older than it was", old), ("deleted before", more))
        if keys
    ]
    return f" ({'; '.join(parts)})" if parts else ""


def listed(keys: Iterable[str]) -> str:
    """List keys in a sentence, the first NAMED_MAX of them by name."""
    every = sorted(keys)
    more = f" and {len(every) - NAMED_MAX} more" if len(every) > NAMED_MAX else ""
    return ", ".join(every[:NAMED_MAX]) + more


def _records(count: int) -> str:
    return number_of(count, "record")
