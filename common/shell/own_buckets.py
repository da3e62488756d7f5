"""The buckets whose only writer an instance is: taken over, written, compared, written back."""

from collections.abc import Callable
from typing import Any

import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected, Removed, Retryable, RolledBack
from slackwater.common.base.retry import retry
from slackwater.common.shell.definition import ServiceDefinition
from slackwater.common.shell.known import Known, read_files, write_back
from slackwater.common.shell.marker import Marker
from slackwater.common.shell.peers import Peers
from slackwater.common.shell.persister import BucketWriter
from slackwater.common.shell.recovery import Recovery, raise_epoch, recover
from slackwater.common.shell.world import World

_log = structlog.get_logger()


class OwnBuckets:
    """The buckets of one life of `definition`. `writer` names it for people, `sender` for
    services."""

    def __init__(
        self,
        definition: ServiceDefinition,
        world: World,
        sender: str,
        writer: str,
        peers: Peers,
        on_durable: Callable[[Any], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.writers: dict[str, BucketWriter] = {}
        self._definition, self._world, self._peers = definition, world, peers
        self._sender, self._writer = sender, writer
        self._on_durable, self._fail = on_durable, fail
        self._recovery: Recovery | None = None

    @property
    def waiting(self) -> int:
        """Writes that are not durable yet."""
        return sum(writer.waiting for writer in self.writers.values())

    async def take(self) -> Recovery:
        """Take the buckets over. Raises as `recover` does, and Retryable where the store stays
        away."""
        world = self._world
        self._recovery = await retry(
            self._recover, budget_s=limits.STORE_RETRY_S, rng=world.rng, clock=world.clock
        )
        return self._recovery

    async def _recover(self) -> Recovery:
        definition, world = self._definition, self._world
        buckets = tuple(definition.buckets)
        known = Known(
            await read_files(world.witnesses, buckets), await self._peers.remembered(buckets)
        )
        return await recover(
            world.store,
            self._sender,
            self._writer,
            definition.buckets,
            world.clock,
            world.rng,
            known,
            whole=definition.needs_all_records,
        )

    async def open(self) -> None:
        """Begin to write."""
        recovery, world = self._taken, self._world
        for name in self._definition.buckets:
            marker = Marker(
                name,
                recovery.contents[name],
                recovery.epoch,
                world.witnesses.of(name),
                self._peers.tell,
                self._definition.service,
            )
            await marker.begin(recovery.fences[name])
            self.writers[name] = BucketWriter(
                recovery.buckets[name],
                recovery.fences[name],
                world.clock,
                world.rng,
                self._on_durable,
                self._fail,
                marker,
                self._definition.service,
            )

    async def raise_epoch(self, epoch: int) -> None:
        """Have the next life find this epoch as its last, if this one still owns its buckets."""
        try:
            await raise_epoch(self._taken, self._sender, epoch, self._world.clock, self._contents())
        except (Retryable, Rejected) as error:
            _log.warning("epoch.not-raised", epoch=epoch, reason=str(error))

    async def write_back(self, lost: RolledBack) -> RolledBack:
        """Write what the store lost back from memory; return the error that says so. Raises `lost`
        where that fails."""
        taken, world = self._taken, self._world
        self.close()

        async def attempt() -> int:
            return await write_back(
                world.store,
                self._writer,
                taken.epoch,
                taken.fences,
                world.clock,
                world.witnesses,
                self._contents(),
            )

        try:
            count = await retry(
                attempt, budget_s=limits.STORE_RETRY_S, rng=world.rng, clock=world.clock
            )
        except (Retryable, Rejected) as error:
            _log.error("records.not-written-back", reason=str(error))
            raise lost from error
        return RolledBack(
            f"{lost}: the bus has lost records; {count} were written back from memory, and "
            f"{self._sender} starts anew"
        )

    async def check(self) -> None:
        """`look` now and then, and after each reconnection. Raises RolledBack."""
        world, reconnects = self._world, self._world.bus.counters.reconnects
        due_s = world.clock.now_s() + limits.CHECK_S
        while self.writers:
            await world.clock.sleep_until(world.clock.now_s() + 10 * limits.HEARTBEAT_S)
            again = world.bus.counters.reconnects
            if again == reconnects and world.clock.now_s() < due_s:
                continue
            try:
                await self.look()
            except Retryable as error:
                _log.warning("bucket.unchecked", reason=str(error))
                continue
            reconnects, due_s = again, world.clock.now_s() + limits.CHECK_S

    async def look(self) -> None:
        """Compare what the buckets hold with what was written. Raises RolledBack, Retryable."""
        for writer in self.writers.values():
            await self._check(writer)

    async def _check(self, writer: BucketWriter) -> None:
        name = writer.bucket.name
        written = writer.written
        try:
            loaded = await writer.bucket.load()
        except Removed as error:
            raise RolledBack(f"bucket {name}: it is gone") from error
        if loaded.last < written and not writer.waiting and writer.written == written:
            raise RolledBack(f"bucket {name}: its last write is {loaded.last}, not {written}")
        if writer.waiting or writer.written != written or loaded.last != written:
            return  # It is written at present; what is missing then is found at the next look.
        wanted, there = writer.marker.values, loaded.records
        if wanted != there:
            lost = sum(there.get(key) != value for key, value in wanted.items())
            raise RolledBack(f"bucket {name}: {lost} of {len(wanted)} records are not as written")

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    @property
    def _taken(self) -> Recovery:
        assert self._recovery is not None, "the buckets were not taken over"
        return self._recovery

    def _contents(self) -> dict[str, dict[str, bytes]]:
        return {name: writer.marker.values for name, writer in self.writers.items()}
