"""The local file behind a device: every page is there, or on its way there in a held buffer.

One thread runs the kernel that empties the ring of dispatch entries into the file, in order (the
paper's disk dispatch queues, 2.4.3). The program waits for entries, reads pages that are nowhere
else, lets ranges go, and makes it durable. A file that fails (full, broken) refuses new writes
with its errno and is tried again; what waits in the ring is not lost and can be read.

`direct` goes around the page cache: a device that is there to save memory should not fill it with
its own backup. `delay_s` makes every operation take at least so long: a stated disk in experiments.
"""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from slackwater.common.base.background import Background, Thread
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.base.failpoints import failpoint
from slackwater.common.native.hole_punch import punch
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import writeback
from slackwater.memory.pages.table import runs
from slackwater.memory.store import PAGE_BYTES, Pages

_READERS: Final = 4
_RETRY_S: Final = 1.0
_READ_BYTES: Final = 1024 * 1024
_EXTENTS_MAX: Final = 1024
"""Stretches of the file that one question looks at."""
_ANY: Final = -1
"""In place of an entry: whatever comes off the ring next."""
_log = structlog.get_logger()


class Backup:
    """`start` it on the loop that will wait for it; `close` from there, too."""

    def __init__(
        self,
        path: Path,
        table: k.Table,
        background: Background,
        *,
        direct: bool = False,
        delay_s: float = 0.0,
        reserve: bool = False,
    ) -> None:
        """Opens or makes the file; `reserve`: with room for all of it. Raises ConfigRejected."""
        self.path = path
        self._table = table
        self._delay_s = delay_s
        table.words[k.DELAY_US] = int(delay_s * 1e6)
        self._fd = _open(path, int(table.words[k.PAGES]) * PAGE_BYTES, direct, reserve)
        self._direct = direct
        self._readers = ThreadPoolExecutor(_READERS, "backup-read")
        self._background = background
        self._thread: Thread | None = None
        self._ending = threading.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broken: int = 0
        self.on_failure: Callable[[str], None] | None = None
        """Told, on the loop, when the file begins to fail, and with "" when it works again."""
        self._failing = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = self._background.thread(self._write, "backup-write")
        self._thread.start()

    async def close(self) -> None:
        """Everything that was written reaches the file first, if it takes it. Cancelled: its
        thread hangs in the file, which stays open."""
        writeback.stop(self._table)
        self._ending.set()
        if self._thread is not None:
            await self._thread.join()
        if self.waiting_pages:
            _log.error("backup.unwritten", path=str(self.path), pages=self.waiting_pages)
        self._settle()
        self._readers.shutdown()
        os.close(self._fd)

    @property
    def waiting_pages(self) -> int:
        """Taken in, and not in the file yet."""
        return int(self._table.words[k.HEAD] - self._table.words[k.TAKEN])

    # Waiting --------------------------------------------------------------------------------------

    @property
    def failed(self) -> int:
        """The errno with which writes are refused; 0: none."""
        return self._broken or int(self._table.words[k.FAILED])

    def error(self) -> OSError:
        """The error that writes are refused with while the file fails."""
        return _failure(self.failed or errno.EIO, self.path)

    async def written(self, entry: int) -> None:
        """Returns when all entries up to this one are in the file. Raises OSError."""
        if writeback.watch(self._table, 1) > entry:
            if not self._waiting:
                writeback.watch(self._table, 0)
            return
        await self._wait(entry)

    async def room(self) -> None:
        """Returns when something has come off the ring. Raises OSError."""
        tail = int(self._table.words[k.TAIL])
        writeback.watch(self._table, 1)
        if int(self._table.words[k.TAIL]) == tail:
            await self._wait(_ANY)

    async def _wait(self, entry: int) -> None:
        if self.failed:
            raise self.error()
        assert self._loop is not None
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((entry, done))
        await done

    def settle_soon(self) -> None:
        """Entries came off the ring by other means than the writer's."""
        self._settle()

    def _settle(self) -> None:
        """Wake those whose entry is in the file, and all of them when it fails."""
        taken, failed = int(self._table.words[k.TAKEN]), self.failed
        still = []
        for entry, done in self._waiting:
            if done.done():
                continue
            if entry == _ANY or taken > entry:
                done.set_result(None)
            elif failed:
                done.set_exception(self.error())
            else:
                still.append((entry, done))
        self._waiting = still
        if not still:
            writeback.watch(self._table, 0)
        if bool(failed) != self._failing:
            self._failing = bool(failed)
            if self.on_failure is not None:
                self.on_failure(os.strerror(failed) if failed else "")

    async def sync(self) -> None:
        """All that is in the file survives a power failure. Raises OSError; after a failure of
        fdatasync nobody knows what is on disk, so the file counts as broken from then on."""
        if self._broken:
            raise self.error()
        assert self._loop is not None
        try:
            await self._loop.run_in_executor(self._readers, self._sync)
        except OSError as error:
            self._broken = error.errno or errno.EIO
            writeback.backup_failed(self._table, self._broken)
            self._settle()
            raise

    def _sync(self) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)
        failpoint("device.sync.before")
        os.fdatasync(self._fd)
        failpoint("device.sync.after")

    # Reads ----------------------------------------------------------------------------------------

    async def read(self, pages: Pages, target: memoryview) -> None:
        """Page i to `target[i * PAGE_BYTES:]`. Raises OSError."""
        assert self._loop is not None
        await self._loop.run_in_executor(self._readers, self._read, pages, target)

    def _read(self, pages: Pages, target: memoryview) -> None:
        for start, end in runs(pages):
            offset = int(pages[start]) * PAGE_BYTES
            part = target[start * PAGE_BYTES : end * PAGE_BYTES]
            for at in range(0, len(part), _READ_BYTES):
                self._read_run(offset + at, part[at : at + _READ_BYTES])

    def _read_run(self, offset: int, target: memoryview) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)
        if not self._direct:
            done = os.preadv(self._fd, [target], offset)
        else:  # The kernel wants an aligned buffer.
            with mmap.mmap(-1, len(target)) as bounce:
                done = os.preadv(self._fd, [bounce], offset)
                target[:] = bounce[: len(target)]
        if done != len(target):
            raise OSError(errno.EIO, f"{self.path} ends before byte {offset + len(target)}")

    async def allocated(self, first: int, count: int) -> NDArray[np.bool_]:
        """By page, from `first` on: the file has data there. Ends early, with at least one page,
        where they change often. Raises OSError."""
        assert self._loop is not None
        return await self._loop.run_in_executor(self._readers, self._allocated, first, count)

    def _allocated(self, first: int, count: int) -> NDArray[np.bool_]:
        found = np.zeros(count, np.bool_)
        at, end = first * PAGE_BYTES, (first + count) * PAGE_BYTES
        for _ in range(_EXTENTS_MAX):
            try:
                start = os.lseek(self._fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # Nothing but a hole up to the file's end.
                    raise
                return found
            if start >= end:
                return found
            at = os.lseek(self._fd, start, os.SEEK_HOLE)
            found[start // PAGE_BYTES - first : -(-at // PAGE_BYTES) - first] = True
            if at >= end:
                return found
        return found[: at // PAGE_BYTES - first]

    # The writer's thread --------------------------------------------------------------------------

    def _write(self) -> None:
        table = self._table
        assert self._loop is not None
        # It does not push those aside who answer clients, where that may be asked for.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while True:
            why = writeback.write_back(table, self._fd)
            if why == writeback.DISCARDS:
                self._discard()
            elif why == writeback.ERROR:
                _log.error(
                    "backup.failed", path=str(self.path), reason=os.strerror(table.words[k.FAILED])
                )
            if not self._background.post(self._loop, self._settle):
                self._ending.set()  # The loop is closed: nobody waits any more.
            if why == writeback.STOPPED or (why == writeback.ERROR and self._ending.wait(_RETRY_S)):
                return

    def _discard(self) -> None:
        """Let the range at the front of the queue go."""
        table = self._table
        slot = table.words[k.TAKEN] % table.words[k.SLOTS]
        offset = int(table.slot_page[slot]) * PAGE_BYTES
        nbytes = int(table.slot_count[slot]) * PAGE_BYTES
        try:
            failpoint("device.discard.before")
            self._let_go(offset, nbytes)
        except OSError as error:
            writeback.backup_failed(table, error.errno or errno.EIO)
            if self._ending.wait(_RETRY_S):
                _log.error("backup.discard-given-up", path=str(self.path), reason=str(error))
                writeback.discarded(table)
            return
        writeback.discarded(table)

    def _let_go(self, offset: int, nbytes: int) -> None:
        """A hole in the file; zeros where the file system makes none. Raises OSError."""
        try:
            punch(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            with mmap.mmap(-1, _READ_BYTES) as zeros:
                for at in range(0, nbytes, _READ_BYTES):
                    os.pwrite(self._fd, zeros[: min(_READ_BYTES, nbytes - at)], offset + at)


def _open(path: Path, size: int, direct: bool, reserve: bool) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        hint = (
            "; its file system has no direct I/O" if direct and error.errno == errno.EINVAL else ""
        )
        raise ConfigRejected(
            f"backup file {path}: {error.strerror}{hint}; name another file"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd).st_size
        if found not in (0, size):
            raise ConfigRejected(
                f"backup file {path} has {found} bytes, the device {size}: it belongs to another "
                "device; give that size, or another file"
            )
        os.ftruncate(fd, size)
        if reserve:
            os.posix_fallocate(fd, 0, size)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigRejected(
            f"backup file {path} is in use by another device: choose another file"
        ) from error
    except OSError as error:
        os.close(fd)
        raise ConfigRejected(f"backup file {path}: {error.strerror}") from error
    except ConfigRejected:
        os.close(fd)
        raise
    return fd


def _failure(number: int, path: Path) -> OSError:
    return OSError(number, f"{os.strerror(number)}; the backup file takes no more", str(path))
