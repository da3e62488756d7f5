"""Everything a service has of the outside, in one value: clock, bus, store, kept facts, randomness.

A shell is given a `World` and reaches for nothing else. The live one talks to a NATS server; the
simulated ones of a system share one broker, one storage and one virtual clock, and differ in name
and random numbers only. So the same services run in both, and a seed reproduces a simulated run.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from slackwater.common.base.clock import Clock, LiveClock
from slackwater.common.bus.access import Credentials
from slackwater.common.bus.base import Bus
from slackwater.common.bus.faults import Faults
from slackwater.common.bus.memory import MemoryBroker, Trace
from slackwater.common.bus.nats import NatsBus
from slackwater.common.shell.simulated_loop import SetClock, SimClock, SimLoop
from slackwater.common.store.base import Store
from slackwater.common.store.history import History
from slackwater.common.store.history_memory import MemoryHistory
from slackwater.common.store.history_nats import NatsHistory
from slackwater.common.store.memory import MemoryStorage, StoreFaults
from slackwater.common.store.nats import NatsStore
from slackwater.common.store.objects import CODE, MemoryObjects, NatsObjects, Objects
from slackwater.common.store.witness_file import FolderWitnesses, MemoryWitnesses, Witnesses


@dataclass(frozen=True, slots=True)
class World:
    name: str
    clock: Clock
    bus: Bus
    store: Store
    history: History
    rng: random.Random
    objects: Objects
    witnesses: Witnesses = field(default_factory=MemoryWitnesses)
    """Files in which writers of buckets note what they wrote."""


@asynccontextmanager
async def live_world(
    url: str,
    name: str,
    seed: int | None = None,
    *,
    credentials: Credentials | None = None,
    replicas: int = 1,
    state_dir: str = "",
    on_closed: Callable[[], None] | None = None,
) -> AsyncIterator[World]:
    """Connected to the server at `url` under `name`; the bus is drained and closed on leaving.

    `state_dir`: where the service keeps files; empty: nowhere. Without a seed the random numbers
    (jitter, choices of a policy) differ from start to start.
    """
    clock = LiveClock()
    bus = await NatsBus.connect(
        url, name, credentials=credentials, on_closed=on_closed, clock=clock
    )
    try:
        # Tokens are drawn from it: nobody must be able to foretell the next from those before.
        rng = random.SystemRandom() if seed is None else random.Random(f"{seed}/{name}")
        store = NatsStore(bus, replicas=replicas)
        yield World(
            name,
            clock,
            bus,
            store,
            NatsHistory(bus),
            rng,
            NatsObjects(bus, CODE, replicas=replicas),
            FolderWitnesses(state_dir),
        )
    finally:
        await bus.close()


class SimWorld:
    """One simulated system: its network, its disk and its time. Make it on a `SimLoop`."""

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults | None = None,
        store_faults: StoreFaults | None = None,
        trace: Trace | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop), "a simulation runs under simloop.run_simulated"
        self.seed = seed
        self.clock = SimClock(loop)
        self.broker = MemoryBroker(seed, clock=self.clock, faults=faults, trace=trace)
        self.storage = MemoryStorage(clock=self.clock, faults=store_faults)
        self.history = MemoryHistory(self.broker)
        self.objects = MemoryObjects(self.clock)
        self.clock_offsets_s: dict[str, float] = {}
        """Client -> how far the clock of its host is ahead, for lives that begin from now on."""
        self.witnesses: dict[str, MemoryWitnesses] = {}
        """By client: the disk of its host."""

    def client(self, name: str) -> World:
        """The world as `name` sees it. A client that starts anew after a crash gets a new one."""
        offset_s = self.clock_offsets_s.get(name, 0.0)
        return World(
            name,
            SetClock(self.clock, offset_s) if offset_s else self.clock,
            self.broker.connect(name),
            self.storage.connect(name),
            self.history,
            self.rng(name),
            self.objects,
            self.witnesses.setdefault(name, MemoryWitnesses()),
        )

    def rng(self, name: str) -> random.Random:
        """Random numbers of one client's own: another's draws do not shift them."""
        return random.Random(f"{self.seed}/{name}")
