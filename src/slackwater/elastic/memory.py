"""Executors that do not all fit into the memory of their host (Qiao 2021, section 4.8).

A host that may have so much memory and no more puts executors aside, each in a file of its own,
before it takes up others. It knows which tasks wait: an executor with none goes first, tasks of
those that are here are run first, and the next one that is not here is read while they run.

What an executor has is pickled, its arrays as they lie in memory. The file has no name, is read by
this process alone and ends with it. An array that is as it was when it was read is not written
again. The system keeps what it can of the files in memory that nobody else wants.
"""

import mmap
import os
import pickle  # noqa: TID251  # The process that wrote it alone reads it.
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from errno import EIO
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple

from slackwater.common.base.errors import Fatal, Rejected
from slackwater.elastic.app import Executor

USED_PART: Final = 0.9
"""The part of the limit that executors are kept within: tasks need memory for a moment."""
ARRAY_BYTES: Final = 64 * 1024
"""Arrays from this size on are written as they lie in memory."""
PATIENCE: Final = 2
"""Tasks, for each executor that is here, that are run before one that was read for long enough
has others put aside that have tasks, too."""
_PAGE_BYTES: Final = mmap.PAGESIZE
_DIGEST_BYTES: Final = 16


def private_bytes() -> int:
    """Return the bytes of memory that this process has to itself."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * _PAGE_BYTES


class _Pickler(pickle.Pickler):
    """Takes objects of the whole program, as its App, for known."""

    def __init__(self, app: object, file: BytesIO, parts: list[memoryview]) -> None:
        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < ARRAY_BYTES:
                return True  # Within the pickle.
            parts.append(view)
            return False

        super().__init__(file, protocol=5, buffer_callback=out_of_band)
        self._app = app

    def persistent_id(self, obj: object) -> str | None:
        return "app" if obj is self._app else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, app: object, file: BytesIO, parts: Sequence[mmap.mmap]) -> None:
        super().__init__(file, buffers=parts)
        self._app = app

    def persistent_load(self, pid: object) -> object:
        return self._app


class _Part(NamedTuple):
    """A part of a file."""

    offset: int
    nbytes: int
    digest: bytes


class _Kept:
    """The file of one executor: parts, each from a whole page on."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._parts: list[_Part] = []
        self.written_bytes = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def write(self, views: Sequence[memoryview]) -> None:
        """Write those that are not there already. Raises OSError."""
        parts, offset = list[_Part](), 0
        for view in views:
            digest = blake2b(view, digest_size=_DIGEST_BYTES).digest()
            parts.append(_Part(offset, view.nbytes, digest))
            offset += -(-view.nbytes // _PAGE_BYTES) * _PAGE_BYTES
        there, self._parts = set(self._parts), []  # Half written, it is of no use.
        for part, view in zip(parts, views, strict=True):
            if part not in there:
                self._write(view, part.offset)
        self._parts = parts

    def _write(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes:
            done += os.pwrite(self._file.fileno(), view[done:], offset + done)
        self.written_bytes += view.nbytes

    def read(self) -> list[mmap.mmap]:
        """Return the parts, in memory of their own. Raises OSError."""
        return [self._read(part) for part in self._parts]

    def _read(self, part: _Part) -> mmap.mmap:
        found = mmap.mmap(-1, part.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view, done = memoryview(found), 0
        while done < part.nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], part.offset + done)
            if not count:
                raise OSError(EIO, "the file ends too soon")
            done += count
        return found

    def close(self) -> None:
        self._file.close()


class _Where(Enum):
    HERE = auto()
    MOVING = auto()
    """It is being put aside or read, or was to be."""
    ASIDE = auto()


@dataclass(slots=True)
class _Lodged:
    executor: Executor
    where: _Where = _Where.HERE
    kept: _Kept | None = None
    stays: bool = False
    """It cannot be put aside."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes; 0: that is not known yet."""
        return self.kept.nbytes if self.kept is not None else 0


class ExecutorMemory:
    """`limit_bytes`: memory that the process may have. `folder`: where files can be, made when the
    first one is. `used_bytes`: what the process has now. All methods are called by one thread;
    `pool` puts aside and reads, one thing after another. `moved` is called there after each."""

    def __init__(
        self,
        app: object,
        limit_bytes: int,
        folder: Path,
        used_bytes: Callable[[], int] = private_bytes,
        pool: Pool | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._app, self._folder, self._moved = app, folder, moved
        self.limit_bytes, self._used_bytes = limit_bytes, used_bytes
        self._pool = pool or ThreadPoolExecutor(1, "elastic-memory")
        self._lodged: dict[int, _Lodged] = {}
        self._moving: Future[None] | None = None
        self._late: tuple[int, int] = (-1, 0)
        """The executor that is to be read next, and the tasks that others ran since."""
        self._told = False
        self._stalled_since_s: float | None = None
        self.stalled_s = 0.0
        """For how long nothing could be run, as data were read."""
        self.asides = self.reads = self.read_bytes = self.written_bytes = 0

    def __str__(self) -> str:
        aside, count = len(self._lodged) - self.here, len(self._lodged)
        return (
            f"{aside} of {count} executors are put aside, in {self._folder}; so far {self.reads} "
            f"were read again, {self.read_bytes / 1e6:,.0f} MB, "
            f"{self.written_bytes / 1e6:,.0f} MB written"
        )

    @property
    def here(self) -> int:
        """Count the executors that take up memory."""
        return sum(bool(vars(each.executor)) for each in self._lodged.values())

    @property
    def used_bytes(self) -> int:
        """Return the bytes that the process has to itself."""
        return self._used_bytes()

    @property
    def aside_bytes(self) -> int:
        """Return the bytes of executors that are in files alone."""
        return sum(e.nbytes for e in self._lodged.values() if e.where is not _Where.HERE)

    def waits(self, now_s: float, stalled: bool) -> None:
        """Say whether nothing can be run, as data are read."""
        if self._stalled_since_s is not None:
            self.stalled_s += max(0.0, now_s - self._stalled_since_s)
        self._stalled_since_s = now_s if stalled else None

    def has(self, number: int) -> bool:
        """Say whether a task of the executor can be run now."""
        return self._lodged[number].where is _Where.HERE

    def came(
        self, number: int, executor: Executor, waiting: Sequence[int], busy: Collection[int]
    ) -> None:
        """Take an executor that was loaded, and make room for the next one. Raises Fatal."""
        self.gone(number)
        self._lodged[number] = _Lodged(executor)
        self._swap(self._without_tasks(waiting, busy), None)

    def gone(self, number: int) -> None:
        """Forget an executor."""
        self._settle()
        lodged = self._lodged.pop(number, None)
        if lodged is not None and lodged.kept is not None:
            lodged.kept.close()

    def bring(self, number: int) -> None:
        """Have the executor here, whatever it takes. Raises Fatal."""
        self._settle()
        if not self.has(number):
            self._swap(self._without_tasks((), (number,)), number)

    def look_ahead(self, waiting: Sequence[int], busy: Collection[int], idle: bool) -> None:
        """Begin to read the executor whose task comes next of those that are not here, if there is
        room or can be. `waiting`: executors by their tasks, in order. `busy`: those that must stay.
        `idle`: nothing else can be run. Raises Fatal, Rejected for what went wrong before."""
        if self._moving is not None:
            if not self._moving.done():
                return
            self._settle()
        target = next((number for number in waiting if not self.has(number)), None)
        if target is None:
            self._shrink(waiting, busy)
            return
        passed = self._late[1] + 1 if self._late[0] == target else 0
        self._late = target, passed
        out = self._without_tasks(waiting, busy)
        if passed > PATIENCE * len(self._lodged):
            out += self._with_later_tasks(waiting, busy, waiting.index(target))
        lacking_bytes = self._lacking(target)
        if not idle:
            out = self._enough(out, lacking_bytes)
        if idle or out or lacking_bytes <= 0:
            for number in (*out, target):
                self._lodged[number].where = _Where.MOVING
            self._moving = self._pool.submit(self._move, out, target, idle)

    def _shrink(self, waiting: Sequence[int], busy: Collection[int]) -> None:
        """Put executors aside while there are more than fit, as the limit was lowered."""
        out = self._without_tasks(waiting, busy)
        if out and self._lacking(None) > 0:
            out = self._enough(out, self._lacking(None))
            for number in out:
                self._lodged[number].where = _Where.MOVING
            self._moving = self._pool.submit(self._move, out, None, False)

    def close(self) -> None:
        """Remove all files. Idempotent."""
        if self.asides:
            sys.stdout.write(f"memory: {self}\n")
            sys.stdout.flush()
        for number in list(self._lodged):
            self.gone(number)
        self._pool.shutdown()

    # Choosing -------------------------------------------------------------------------------------

    def _without_tasks(self, waiting: Sequence[int], busy: Collection[int]) -> list[int]:
        """Return executors that nobody waits for. Where all are computed in turn, the one that came
        last is the last to be needed again."""
        kept = {*waiting, *busy}
        return [n for n in reversed(self._lodged) if n not in kept and self._can_go(n)]

    def _with_later_tasks(
        self, waiting: Sequence[int], busy: Collection[int], than: int
    ) -> list[int]:
        later = {n for n in waiting[than:] if n not in busy and n not in waiting[:than]}
        return sorted(filter(self._can_go, later), key=waiting.index, reverse=True)

    def _can_go(self, number: int) -> bool:
        lodged = self._lodged[number]
        return lodged.where is _Where.HERE and not lodged.stays

    def _lacking(self, number: int | None) -> int:
        """Return the bytes that have to be freed before the executor is read."""
        wanted = self._lodged[number].nbytes if number is not None else 0
        return self._used_bytes() + wanted - int(USED_PART * self.limit_bytes)

    def _enough(self, out: Sequence[int], lacking_bytes: int) -> list[int]:
        """Return the first ones that free as much, as far as that is known."""
        found = []
        for number in out:
            if lacking_bytes <= 0:
                break
            found.append(number)
            lacking_bytes -= self._lodged[number].nbytes
        return found

    # Moving ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for what is under way. Raises Fatal."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.result()

    def _move(self, out: list[int], target: int | None, must: bool) -> None:
        try:
            self._swap(out, target, must)
        finally:
            self._moved()

    def _swap(self, out: list[int], target: int | None, must: bool = True) -> None:
        """Put executors aside until there is room, then read another; without room only if it
        `must` be. Raises Fatal, Rejected."""
        for number in out:
            if self._lacking(target) > 0:
                self._put_aside(number)
            else:
                self._lodged[number].where = _Where.HERE
        if target is None:
            return
        if must or self._lacking(target) <= 0:
            self._read(target)
            self._look_at_limit()
        else:
            self._lodged[target].where = _Where.ASIDE

    def _look_at_limit(self) -> None:
        """Say once that the limit cannot be kept."""
        used_bytes = self._used_bytes()
        if used_bytes > self.limit_bytes and not self._told:
            self._told = True
            sys.stderr.write(
                f"slackwater: {used_bytes / 1e6:,.0f} MB are in use with {self.here} of "
                f"{len(self._lodged)} executors, {self.limit_bytes / 1e6:,.0f} MB may be: "
                "give the program more --memory, or divide its data into more executors\n"
            )

    def _put_aside(self, number: int) -> None:
        """Raises Fatal."""
        lodged = self._lodged[number]
        head, parts = BytesIO(), list[memoryview]()
        try:
            _Pickler(self._app, head, parts).dump(vars(lodged.executor))
        except Exception as error:  # Classes of the program may raise anything.
            lodged.stays, lodged.where = True, _Where.HERE
            sys.stderr.write(
                f"slackwater: executor {number} stays in memory, it cannot be put aside: {error}\n"
            )
            return
        try:
            if lodged.kept is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                lodged.kept = _Kept(self._folder)
            before = lodged.kept.written_bytes
            lodged.kept.write([*parts, head.getbuffer()])
        except OSError as error:
            raise _lost(number, self._folder, "written", error) from error
        self.written_bytes += lodged.kept.written_bytes - before
        parts.clear()
        vars(lodged.executor).clear()
        lodged.where = _Where.ASIDE
        self.asides += 1
        if self.asides == 1:
            sys.stdout.write(f"memory: {self}\n")
            sys.stdout.flush()

    def _read(self, number: int) -> None:
        """Raises Fatal, Rejected."""
        lodged = self._lodged[number]
        assert lodged.kept is not None
        try:
            *parts, head = lodged.kept.read()
        except OSError as error:
            raise _lost(number, self._folder, "read", error) from error
        try:
            found: dict[str, Any] = _Unpickler(self._app, BytesIO(head), parts).load()
        except Exception as error:  # Its own classes may raise.
            raise Rejected(
                f"executor {number} was put aside, and cannot be taken up: {error}"
            ) from error
        vars(lodged.executor).update(found)
        lodged.where = _Where.HERE
        self.reads += 1
        self.read_bytes += lodged.nbytes


def _lost(number: int, folder: Path, done: str, error: OSError) -> Fatal:
    return Fatal(
        f"executor {number}, which was put aside in {folder}, cannot be {done}: {error.strerror}; "
        "make room there, or give the job more --memory or another folder by --checkpoint"
    )
