"""The file in which the writer of a bucket keeps its newest mark (witness.py), and in memory.

A line for each write, a mark after each group of them, flushed to disk before the group is
acknowledged. Every line has a checksum of its own: a line that was cut off or damaged is left out,
and the marks before and after it count. The file is written anew when its writer starts, and once
it has grown to several times what it says.
"""

import asyncio
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from slackwater.common.base.private_files import private_folder
from slackwater.common.store.witness import Mark, Told

SPARE_LINES: Final = 4096
"""Lines beyond twice the records that a file may grow to before it is written anew."""
_FOLDER: Final = "witness"


class Noted(NamedTuple):
    """One write; an empty digest: the key was deleted."""

    key: str
    digest: str


class Witness(Protocol):
    """Keeps what was told last of one bucket."""

    async def read(self) -> Told: ...

    async def begin(self, digests: Mapping[str, str], mark: Mark) -> None:
        """Replace all that was told. Durable when it returns; raises OSError."""
        ...

    async def add(self, writes: Sequence[Noted], mark: Mark) -> None:
        """Note these writes, and the mark after them. Durable when it returns; raises OSError."""
        ...


class Witnesses(Protocol):
    def of(self, bucket: str) -> Witness | None:
        """Return the witness of a bucket; None: none is kept here."""
        ...


class MemoryWitnesses:
    """The disk of one host in a simulation: it outlives the services."""

    def __init__(self) -> None:
        self._witnesses: dict[str, MemoryWitness] = {}

    def of(self, bucket: str) -> Witness | None:
        return self._witnesses.setdefault(bucket, MemoryWitness())


class MemoryWitness:
    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._digests: dict[str, str] = {}

    async def read(self) -> Told:
        return Told(self._mark, dict(self._digests))

    async def begin(self, digests: Mapping[str, str], mark: Mark) -> None:
        self._digests, self._mark = dict(digests), mark

    async def add(self, writes: Sequence[Noted], mark: Mark) -> None:
        _apply(self._digests, writes)
        self._mark = mark


class FolderWitnesses:
    """Files in the folder of one service. Without one (an empty `state_dir`) it keeps none."""

    def __init__(self, state_dir: str) -> None:
        self._folder = Path(state_dir) / _FOLDER if state_dir else None

    def of(self, bucket: str) -> Witness | None:
        return None if self._folder is None else FileWitness(self._folder / bucket)


class FileWitness:
    """`path` is made by `begin`, with its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests: dict[str, str] = {}
        self._lines: int | None = None
        """Lines of the file, which has all that was noted; None: a write of it failed, or it was
        not made yet."""

    async def read(self) -> Told:
        try:
            return parsed(await asyncio.to_thread(self._path.read_bytes))
        except FileNotFoundError:
            return Told()

    async def begin(self, digests: Mapping[str, str], mark: Mark) -> None:
        self._digests = dict(digests)
        await asyncio.to_thread(self._replace, mark)

    async def add(self, writes: Sequence[Noted], mark: Mark) -> None:
        _apply(self._digests, writes)
        if self._lines is None or self._lines > 2 * len(self._digests) + SPARE_LINES:
            await asyncio.to_thread(self._replace, mark)
        else:
            await asyncio.to_thread(self._append, writes, mark, self._lines)

    def _replace(self, mark: Mark) -> None:
        self._lines = None
        private_folder(self._path.parent)
        draft = self._path.with_name(f"{self._path.name}.new")
        lines = [*(_line(Noted(*each)) for each in self._digests.items()), _line(mark)]
        with draft.open("wb") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._lines = len(lines)

    def _append(self, writes: Sequence[Noted], mark: Mark, before: int) -> None:
        self._lines = None
        lines = [*map(_line, writes), _line(mark)]
        with self._path.open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fdatasync(file.fileno())
        self._lines = before + len(lines)


def parsed(content: bytes) -> Told:
    """Return what a file says. Lines that were damaged or cut off are counted, and left out."""
    digests: dict[str, str] = {}
    mark: Mark | None = None
    behind: list[Noted] = []
    damaged = 0
    for line in content.split(b"\n"):
        if not line:
            continue
        read = _read(line)
        if read is None:
            damaged += 1
        elif isinstance(read, Noted):
            behind.append(read)
        else:
            _apply(digests, behind)
            behind.clear()
            mark = read
    return Told(mark, digests, damaged)


def _apply(digests: dict[str, str], writes: Iterable[Noted]) -> None:
    for key, digest in writes:
        if digest:
            digests[key] = digest
        else:
            digests.pop(key, None)


def _line(told: Noted | Mark) -> bytes:
    body = msgspec.json.encode(told)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _read(line: bytes) -> Noted | Mark | None:
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        told = msgspec.json.decode(body, type=list[int | str])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    match told:
        case [str(key), str(digest)]:
            return Noted(key, digest)
        case [int(epoch), int(sequence), int(records), str(digest)]:
            return Mark(epoch, sequence, records, digest)
    return None
