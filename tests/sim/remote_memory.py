"""Remote memory in virtual time: real lenders in real shells, a real device over the real kernels,
while machines run out of memory, networks break, daemons and the device die.

The network, the clock, the descriptor store and the disk's speed are the model's. A checker
remembers every page that was written (loadgen/memory/checker.py): each page that is read must be
right, or the read must fail; after a kill of the device, nothing that a flush covered may be
missing.
"""

import asyncio
import random
from pathlib import Path

import numpy as np
from tests.sim.lenders import MEMORY_BYTES, SLAB_BYTES, SPAN_PAGES, Lender, SlowDisk, checked
from tests.unit.memory import page_states

from slackwater.common.base import codec
from slackwater.common.base.background import Background
from slackwater.common.base.effects import Publish
from slackwater.common.base.errors import Retryable, SlackwaterError
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.world import SimWorld
from slackwater.common.transport.memory import MemoryFabric, MemoryNetwork
from slackwater.loadgen.memory.checker import PAGE_BYTES, Checker
from slackwater.memory.control.core import DeviceCore
from slackwater.memory.control.lenders import Lenders
from slackwater.memory.control.spans import DeviceSettings
from slackwater.memory.pages import prefetch_cache
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.table import counters, make_table, page_range
from slackwater.memory.prefetch.readahead import ReadAhead
from slackwater.memory.resilience.resilience import resilience
from slackwater.memory.store import Pages
from slackwater.schemas import subjects
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import DeviceHello, DeviceId, SlabdHeartbeat

PAGES = SPAN_PAGES * 6
PAUSE_S = 0.02
LENDERS = {"disk": 3, "2+1": 5, "2-copies": 4}


class Life:
    """One life of the device's process."""

    def __init__(self, system: "RemoteMemory", number: int) -> None:
        self.background = Background()
        strategy = resilience(system.resilience, self.background)
        places = 4 * prefetch_cache.WAYS if system.ahead else 0
        table = make_table(PAGES, strategy.span_pages(SLAB_BYTES), slots=64, places=places)
        disk = SlowDisk(system.file, table, self.background)
        disk.turn_s *= system.pause_s / PAUSE_S
        self.device = Device(table, disk, strategy, self.background)
        self.ahead = ReadAhead(self.device)
        settings = DeviceSettings(
            id=DeviceId("d1"), node="client", spans=len(table.state), width=strategy.width,
            needed=strategy.needed, hot=3.0, hold_s=2.0, secret=f"s{number}",
        )  # fmt: skip
        hello = DeviceHello(
            device=DeviceId("d1"), node=NodeId("client"), incarnation=number, token="c"
        )
        self.core = DeviceCore(settings, SLAB_BYTES, random.Random(system.seed * 1000 + number))
        checked(self.core, self.check_invariants)
        self.lenders = Lenders(
            self.core,
            self.device,
            {"memory": system.fabric},
            system.sim.clock,
            codec.encode(hello),
            publish=self._published,
            changed=lambda: None,
        )
        self.lenders.populates = False
        self.facts: list[str] = []
        self._bus = system.sim.client(f"device-{number}").bus
        self.users: set[asyncio.Task[None]] = set()

    def check_invariants(self) -> None:
        self.core.spans.check_invariants()
        page_states.check_invariants(self.device.table)

    async def read(self, reader: int, pages: Pages, target: memoryview) -> None:
        """Read as a client's connection does: noted, served, and then the prefetcher looks."""
        s = self.device.table.prefetched
        if s.words[prefetch_cache.PLACES]:
            s.notes[s.words[prefetch_cache.NOTED]] = reader, pages[0], len(pages)
            s.words[prefetch_cache.NOTED] += 1
        self.ahead.look_soon()
        await self.ahead.read_pages(pages, target)

    def _published(self, effect: Publish) -> None:
        self.facts.append(effect.subject.rsplit(".", 1)[1])

    async def start(self) -> None:
        async def hear(delivery: Delivery) -> None:
            self.lenders.seen(codec.decode(delivery.payload, SlabdHeartbeat))

        await self._bus.subscribe(subjects.telemetries("slabd", what="heartbeat"), hear)
        self.device.backup.start()
        self._ticking = asyncio.ensure_future(self.lenders.run())

    async def kill(self) -> None:
        """Not a line of it runs any more; its channels break."""
        assert self.background.failure is None
        ends = (*self.users, self._ticking)
        for task in ends:
            task.cancel()
        await self.ahead._fetches.close()
        await asyncio.gather(*ends, return_exceptions=True)
        await self.lenders.rest()
        await self.device.backup.close()
        self.lenders._closed = True
        self.lenders._runner.timers.close()
        for channel in tuple(self.lenders._channels.values()):
            await channel.close()
        await self._bus.close()


class RemoteMemory:
    """A device, its lenders and its users. `sim`, `network`: of a larger simulation; None: it is
    one by itself."""

    def __init__(
        self,
        seed: int,
        file: Path,
        *,
        mapped: bool,
        resilience: str = "disk",
        ahead: bool = False,
        sim: SimWorld | None = None,
        network: MemoryNetwork | None = None,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.seed, self.file, self.mapped, self.ahead = seed, file, mapped, ahead
        self.pause_s = pause_s
        """Most seconds between two things that a user does."""
        self.hits = self.changed = 0
        """Prefetched pages that were read, and that were changed first."""
        self.resilience = resilience
        self.rng = random.Random(f"faults/{seed}")
        self.sim = sim or SimWorld(seed)
        self.network = network or MemoryNetwork(seed=seed, latency_s=0.0003)
        self.fabric = MemoryFabric(self.network, mapped=mapped)
        self.lenders = [Lender(self, f"s{n + 1}") for n in range(LENDERS[resilience])]
        self.checker = Checker()
        self.life: Life | None = None
        self.lives = 0
        self.happened: dict[str, int] = {}
        self.facts: list[str] = []
        self.busy: set[int] = set()

    @property
    def clients(self) -> list[str]:
        """The clients of the bus that it has now."""
        lenders = [f"slabd-{lender.id}-{lender.life}" for lender in self.lenders]
        return [*lenders, f"device-{self.lives}"]

    async def begin(self) -> None:
        for lender in self.lenders:
            await lender.start()
        await self.device_starts()
        await asyncio.sleep(6.0)  # Slabs are made one a sample, three samples apart at first.

    async def device_starts(self) -> None:
        self.lives += 1
        self.life = Life(self, self.lives)
        await self.life.start()

    # The workload ---------------------------------------------------------------------------------

    def users_start(self, count: int) -> None:
        assert self.life is not None
        for number in range(count):
            task = asyncio.ensure_future(self._use(self.life, number))
            self.life.users.add(task)

    async def _use(self, life: Life, number: int) -> None:
        """Write, read, discard and flush, one thing after the other."""
        rng = random.Random(f"{self.seed}/{self.lives}/{number}")
        scans = self.ahead and number < 2
        at = 0
        while True:
            await asyncio.sleep(rng.uniform(0.0, self.pause_s))
            at = first = (at + 1) % PAGES if scans else rng.randrange(PAGES)
            count = 1 if scans else rng.choice((1, 1, 4, 12))
            wanted = [p for p in range(first, min(PAGES, first + count))]
            pages = [page for page in wanted if page not in self.busy]
            if not pages:
                continue
            self.busy.update(pages)
            try:
                await self._one(life, rng, pages, number, scans)
            finally:
                self.busy.difference_update(pages)

    async def _one(
        self, life: Life, rng: random.Random, pages: list[int], number: int, scans: bool
    ) -> None:
        what = rng.random()
        if what < 0.90 and scans:
            await self._read(life, pages, number)
        elif what < 0.45:
            await self._write(life, pages)
        elif what < 0.90:
            await self._read(life, pages, number)
        elif what < 0.94:
            await self._discard(life, pages[:1])
        else:
            covered = self.checker.snapshot()
            await life.device.flush()
            self.checker.flushed(covered)

    async def _write(self, life: Life, pages: list[int]) -> None:
        begun = [(page, *self.checker.begin(page)) for page in pages]
        source = memoryview(b"".join(data for _, _, data in begun))
        try:
            await life.device.write_pages(np.array(pages, np.int64), source)
        except (OSError, SlackwaterError):
            for page, generation, _ in begun:
                self.checker.failed(page, generation)
        else:
            for page, generation, _ in begun:
                self.checker.acknowledged(page, generation)

    async def _read(self, life: Life, pages: list[int], number: int) -> None:
        target = np.empty(len(pages) * PAGE_BYTES, np.uint8).data
        try:
            await life.read(number, np.array(pages, np.int64), target)
        except (OSError, SlackwaterError):
            self.happened["failed read"] = self.happened.get("failed read", 0) + 1
            return
        for i, page in enumerate(pages):
            self.checker.check(page, target[i * PAGE_BYTES : (i + 1) * PAGE_BYTES])

    async def _discard(self, life: Life, pages: list[int]) -> None:
        for page in pages:
            generation, _ = self.checker.begin(page, discard=True)
            await life.device.discard(page, 1)
            self.checker.acknowledged(page, generation)

    # Faults ---------------------------------------------------------------------------------------

    async def fault(self) -> None:
        lender = self.rng.choice(self.lenders)
        kind = self.rng.choice(
            ("squeeze", "squeeze", "relax", "cut", "daemon", "device", "evict", "deaf", "blackout")
        )
        self.happened[kind] = self.happened.get(kind, 0) + 1
        if kind == "squeeze":
            lender.machine.others_bytes = self.rng.randrange(MEMORY_BYTES)
        elif kind == "relax":
            lender.machine.others_bytes = 0
        elif kind == "cut":
            self.network.cut(lender.address)
            await asyncio.sleep(self.rng.choice((0.05, 0.5, 4.0)))
            self.network.heal(lender.address)
        elif kind == "daemon":
            await lender.kill()
            await asyncio.sleep(self.rng.choice((0.01, 0.5, 4.0)))
            await lender.start()
        elif kind == "blackout":  # Its memory is lost, too.
            await lender.kill()
            lender.kept.clear()
            await asyncio.sleep(self.rng.choice((0.01, 1.0)))
            await lender.start()
        elif kind == "evict":
            await self._operator_evicts(lender)
        elif kind == "deaf":
            await self._deaf()
        else:
            await self.device_dies()

    async def _operator_evicts(self, lender: Lender) -> None:
        bus = self.sim.client(f"operator-{self.rng.random()}").bus
        subject = subjects.command("slabd", lender.id, "evict")
        try:
            await bus.request(subject, b'{"t":"slabd.evict","count":2}', timeout_s=1.0, json=True)
        except Retryable:
            self.happened["evict unanswered"] = self.happened.get("evict unanswered", 0) + 1
        await bus.close()

    async def _deaf(self) -> None:
        """The device hears nothing for a while: EVICT stays unanswered, slabs go by force."""
        assert self.life is not None
        for lender in self.lenders:
            lender.machine.others_bytes = MEMORY_BYTES * 3 // 4
        feed, kept = self.life.lenders.feed, []
        self.life.lenders.feed = kept.append  # type: ignore[method-assign]
        await asyncio.sleep(2.5)
        self.life.lenders.feed = feed  # type: ignore[method-assign]
        for event in kept:
            feed(event)
        for lender in self.lenders:
            lender.machine.others_bytes = 0

    def _count(self, life: Life) -> None:
        self.facts += life.facts
        seen = counters(life.device.table)
        self.hits += seen["prefetch_hit_pages"]
        self.changed += seen["prefetch_changed_pages"]

    async def device_dies(self) -> None:
        assert self.life is not None
        self._count(self.life)
        await self.life.kill()
        self.busy.clear()
        self.checker.crashed()
        await self.device_starts()
        for page in range(PAGES):
            await self._settle(page)
        self.users_start(4)

    async def _settle(self, page: int) -> None:
        assert self.life is not None
        target = np.empty(PAGE_BYTES, np.uint8).data
        await self.life.device.read_pages(page_range(page, 1), target)
        self.checker.settle(page, target)

    def watch(self) -> None:
        """Raise the error with which a user ended: then the run is over."""
        assert self.life is not None
        for task in self.life.users:
            if task.done() and not task.cancelled():
                task.result()

    # The end --------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """No fault any more: everything must be readable, and right."""
        assert self.life is not None
        for lender in self.lenders:
            lender.machine.others_bytes = 0
        for task in self.life.users:
            task.cancel()
        await asyncio.gather(*self.life.users, return_exceptions=True)
        for task in self.life.users:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        await asyncio.sleep(1.0)
        for page in self.checker.written():
            await self._settle(page)
        self._count(self.life)
        await self.life.kill()
        for lender in self.lenders:
            await lender.end()
