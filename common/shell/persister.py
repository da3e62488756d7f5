"""One writer per bucket: durable records, many in flight, in order, and never a deposed one's.

Writes are pipelined: each expects the sequence that the one before it will leave behind, so that
the server applies them in order or not at all, and up to STORE_IN_FLIGHT_MAX share the cost of
flushing to disk. A write also names this instance's epoch record (`fence`): once another instance
wrote its own, everything of ours still in flight is refused.

Each write carries a mark of what the bucket holds after it, and a group of writes is noted as such
before it is told durable (marker.py).

A timeout is not a refusal, and a refusal need not be one either: the write before it may have been
lost with a connection. Both only stop the pipeline. Then the bucket is read back (whose epoch
record is there, which sequence is the last, what do the keys hold) and the writer goes on, writes
the rest again, or learns that it is deposed. A late copy of a lost write does no harm: it expects
the same sequence and holds the same bytes as its repetition.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from slackwater.common.base import limits
from slackwater.common.base.background import Tasks
from slackwater.common.base.clock import Clock
from slackwater.common.base.errors import Deposed, Removed, Retryable, RolledBack
from slackwater.common.base.failpoints import failpoint
from slackwater.common.shell.marker import Marker
from slackwater.common.store.base import EPOCH_KEY, Bucket, Entry, SequenceConflict
from slackwater.common.store.witness import Mark
from slackwater.common.store.witness_file import Noted


class Write:
    """One record on its way. `ticket` is given back to `on_durable`."""

    __slots__ = ("durable", "expected", "key", "marked", "ticket", "value")
    marked: tuple[Noted, Mark]

    def __init__(self, key: str, value: bytes | None, ticket: Any) -> None:
        self.key = key
        self.value = value
        self.ticket = ticket
        self.expected = -1
        self.durable = False


class BucketWriter:
    """The only writer of `bucket` as long as the record under EPOCH_KEY has sequence `fence`."""

    def __init__(
        self,
        bucket: Bucket,
        fence: int,
        clock: Clock,
        rng: random.Random,
        on_durable: Callable[[Any], None],
        on_failure: Callable[[BaseException], None],
        marker: Marker,
        service: str = "",
    ) -> None:
        """`service` names its failpoints."""
        self._before, self._after = f"{service}.put.before", f"{service}.put.after"
        self.bucket = bucket
        self._fence = fence
        self._next = fence
        self._clock = clock
        self._rng = rng
        self._on_durable = on_durable
        self._on_failure = on_failure
        self.marker = marker
        self._unnoted: list[Write] = []
        """Stored, and not noted yet, in their order."""
        self._noting = 0
        """Writes that are being noted."""
        self._notes = False
        """A task notes what is stored, until all of it is."""
        self._queue: deque[Write] = deque()
        self._window: deque[Write] = deque()
        self._in_flight = 0
        self._doubt: Exception | None = None
        self._doubt_since_s = 0.0
        self._failed = False
        self._tasks = Tasks(lambda _, error: self._fail(error))

    @property
    def waiting(self) -> int:
        """Writes that are not durable yet."""
        return len(self._queue) + len(self._window) + len(self._unnoted) + self._noting

    @property
    def written(self) -> int:
        """The sequence of the last write that was issued."""
        return self._next

    @property
    def in_doubt(self) -> str:
        """Why the pipeline stands still at present, or its witness is not written; empty: all is
        well."""
        return self.marker.doubt if self._doubt is None else str(self._doubt)

    def doubt_s(self) -> float:
        """Return for how long the pipeline has stood still; 0: it does not."""
        return 0.0 if self._doubt is None else self._clock.now_s() - self._doubt_since_s

    def write(self, key: str, value: bytes | None, ticket: Any) -> None:
        """Queue a record (None: delete the key); `on_durable(ticket)` is called once it is on
        disk. Writes become durable in the order they were queued."""
        self._queue.append(Write(key, value, ticket))
        self._pump()

    def close(self) -> None:
        self._failed = True
        self._tasks.cancel()

    def _pump(self) -> None:
        while (
            self._queue
            and self._doubt is None
            and not self._failed
            and self._in_flight < limits.STORE_IN_FLIGHT_MAX
        ):
            write = self._queue.popleft()
            write.expected = self._next
            self._next += 1
            write.marked = self.marker.mark(write.key, write.value, self._next)
            self._window.append(write)
            self._issue(write)

    def _issue(self, write: Write) -> None:
        self._in_flight += 1
        self._tasks.spawn(self._put(write))

    async def _put(self, write: Write) -> None:
        """A record that no bucket takes raises: the service ends, and is started anew."""
        try:
            failpoint(self._before)
            if write.value is None:
                await self.bucket.delete(
                    write.key,
                    expected_last=write.expected,
                    fence=self._fence,
                    mark=write.marked[1],
                )
            else:
                await self.bucket.put(
                    write.key,
                    write.value,
                    expected_last=write.expected,
                    fence=self._fence,
                    mark=write.marked[1],
                )
            failpoint(self._after)
        except (Retryable, SequenceConflict, Removed) as error:
            if self._doubt is None:
                self._doubt, self._doubt_since_s = error, self._clock.now_s()
        else:
            self._settled(write)
        finally:
            self._in_flight -= 1
        if self._doubt is None:
            self._pump()
        elif self._in_flight == 0:
            self._tasks.spawn(self._resolve())

    def _settled(self, write: Write) -> None:
        """The write is in the store, and so are all before it once they say so themselves."""
        write.durable = True
        window = self._window
        while window and window[0].durable:
            self._unnoted.append(window.popleft())
        if self._unnoted and not self._notes:
            self._notes = True
            self._tasks.spawn(self._note())

    async def _note(self) -> None:
        """Note what is stored, group by group, and tell that it is durable."""
        while self._unnoted:
            group, self._unnoted = self._unnoted, []
            self._noting = len(group)
            await self.marker.note([write.marked for write in group])
            for write in group:
                self._noting -= 1
                self._on_durable(write.ticket)
        self._notes = False

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure(error)

    async def _resolve(self) -> None:
        """Find out which writes of the window were stored, once none is in flight."""
        give_up_s = self._clock.now_s() + limits.STORE_RETRY_S
        wait_s = limits.RETRY_WAIT_S_MIN
        while not self._failed:
            try:
                last = await self._read_back()
                break
            except Removed as error:
                raise RolledBack(f"bucket {self.bucket.name}: it is gone") from error
            except Retryable as error:
                self._doubt = error
                if self._clock.now_s() >= give_up_s:
                    raise
                await asyncio.sleep(wait_s * self._rng.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, limits.RETRY_WAIT_S_MAX)
        self._doubt = None
        for write in list(self._window):
            if write.expected < last:
                self._settled(write)
            else:
                self._issue(write)
        self._pump()

    async def _read_back(self) -> int:
        """The bucket's last sequence, certain that all up to it is ours. Raises Deposed if not."""
        name = self.bucket.name
        epoch = await self.bucket.get(EPOCH_KEY)
        if epoch is None or epoch.sequence < self._fence:
            raise RolledBack(f"bucket {name}: its epoch record is gone, or an older one")
        if epoch.sequence != self._fence:
            raise Deposed(f"bucket {name}: another instance has taken it over ({self._doubt})")
        last = await self.bucket.last_sequence()
        durable = [w.expected + 1 for w in self._window if w.durable]
        floor = max([w.expected for w in self._window if not w.durable][:1] + durable)
        if last < floor:
            raise RolledBack(f"bucket {name}: its last write is {last}, but {floor} was stored")
        if last > self._next:
            raise Deposed(f"bucket {name}: sequence {last} is not this instance's: someone writes")
        for key in {write.key: None for write in self._window if write.expected < last}:
            if not self._is_ours(key, await self.bucket.get(key)):
                raise Deposed(
                    f"bucket {name}, key {key}: holds what this instance did not write; only its "
                    "service may write the bucket"
                )
        return last

    def _is_ours(self, key: str, entry: Entry | None) -> bool:
        """Is that what some write of the window leaves behind? (The last one applied, or one that
        arrived late, after the last sequence was read.)"""
        for write in self._window:
            if write.key != key:
                continue
            if entry is None or entry.value is None:
                if write.value is None:
                    return True
            elif entry.value == write.value and entry.sequence == write.expected + 1:
                return True
        return False
