"""Lenders of a benchmark, in processes of their own, and what they and devices tell of slabs."""

import asyncio
import contextlib
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from figures import Figure, spread

from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.base import Delivery
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.shell.client import Client, connect
from slackwater.common.shell.config import write_config
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas import subjects
from slackwater.schemas.memory import EvictBegun, EvictNow, SlabdHeartbeat, SlabEvent, SpanEvent

MIB = 1024 * 1024
HEADROOM_BYTES = 512 * MIB
READY_S = 120.0
EVICT_S = 5.0
"""Seconds within which a slab that was just evicted is mapped again."""


MAP_MS, PAPER_MAP_MS = 2.0, 54.25
EVICT_MS, PAPER_EVICT_MS = 5.0, 0.363
"""The goals, and the paper's medians, of slabs of 1 GB over InfiniBand."""
REGISTERED = "a slab of 1 GB, 53.99 ms of it registration; ours has 1 MiB and registers nothing"


def slab_times(
    name: str,
    took_s: Sequence[float],
    goal_ms: float,
    goal: float | None = 1.0,
    *,
    paper_ms: float | None = None,
    unlike: str = "",
) -> list[Figure]:
    """A row, one more beside the paper's figure, or none where it never happened."""
    if not took_s:
        return []
    what, ours_ms = f"{name} ({len(took_s)} times)", statistics.median(took_s) * 1e3
    own = "our goal" if goal is not None else "our goal for one at a time"
    rows = [
        Figure(what, ours_ms, goal_ms, "ms", own, goal, lower_is_better=True, spread=spread(took_s))
    ]
    if paper_ms is not None:
        bound = None if unlike else 1.0
        rows.append(Figure(what, ours_ms, paper_ms, "ms", "paper", bound, True, unlike=unlike))
    return rows


class Events:
    """How long mapping and eviction took, as devices and lenders tell it."""

    def __init__(self) -> None:
        self.map_s: list[float] = []
        self.evict_s: list[float] = []
        self.forced = 0
        """Slabs that were taken without their device's DONE."""

    async def listen(self, client: Client) -> None:
        async def span(delivery: Delivery) -> None:
            event = codec.decode(delivery.payload, SpanEvent)
            if event.fact == "mapped":
                self.map_s.append(event.took_s)

        async def slab(delivery: Delivery) -> None:
            event = codec.decode(delivery.payload, SlabEvent)
            if event.fact == "evicted":
                self.evict_s.append(event.took_s)
            self.forced += event.fact == "revoked"

        await client.bus.subscribe(subjects.events("device"), span)
        await client.bus.subscribe(subjects.events("slab"), slab)


async def evict_one(client: Client, *lenders: str) -> None:
    """A slab of the first of them that lends any. Raises Rejected if for a while none does."""
    give_up_s = client.clock.now_s() + EVICT_S
    while True:
        for lender in lenders:
            try:
                subject = subjects.command("slabd", lender, "evict")
                await client.ask(subject, EvictNow(count=1), EvictBegun)
                return
            except Rejected:
                if client.clock.now_s() >= give_up_s:
                    raise
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def lenders(
    folder: Path, count: int, slab_bytes: int, slabs: int, token: str = ""
) -> AsyncIterator[Supervisor]:
    """`count` of them (s0, s1, ...), each a machine of its own with so many slabs, all made.
    With a token they listen on tcp as well."""
    supervisor = Supervisor()
    try:
        url = await supervisor.start_nats()
        specs = []
        for id in (f"s{number}" for number in range(count)):
            config, state = folder / f"{id}.toml", folder / id
            state.mkdir()
            values = {
                "id": id, "node": id, "url": url, "state_dir": str(state),
                "slab_bytes": slab_bytes, "lend_bytes_max": slabs * (slab_bytes + PAGE_BYTES),
                "headroom_bytes": HEADROOM_BYTES,
            }  # fmt: skip
            if token:
                values |= {"tcp_address": "127.0.0.1:0", "cluster_token": token}
            write_config(config, values)
            command = (sys.executable, "-m", "slackwater.services.slabd", "--config", str(config))
            specs.append(UnitSpec(name=id, command=command))
        await supervisor.start_units(specs)
        await _until_made(url, count, slabs)
        yield supervisor
    finally:
        await supervisor.stop()


async def _until_made(url: str, count: int, slabs: int) -> None:
    """Slabs are faulted in one after another."""
    free: dict[str, int] = {}
    beat = asyncio.Event()

    async def hear(delivery: Delivery) -> None:
        heard = codec.decode(delivery.payload, SlabdHeartbeat)
        free[heard.id] = heard.free_slabs
        beat.set()

    async with connect(url, "benchmark") as client:
        await client.bus.subscribe(subjects.telemetries("slabd", what="heartbeat"), hear)
        try:
            async with asyncio.timeout(READY_S):
                while sum(made >= slabs for made in free.values()) < count:
                    beat.clear()
                    await beat.wait()
        except TimeoutError:
            raise SystemExit(f"{slabs} slabs were wanted of each, made: {free}") from None
