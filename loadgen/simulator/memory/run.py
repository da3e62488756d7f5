"""One policy over one cluster: containers page for `seconds`, and each machine's memory is noted.

`disk` is the baseline: paging goes to each machine's own disk. Under the others each machine has a
lender and a device, by their own cores (world.py): `infiniswap` draws the lenders that a device
asks evenly, as the paper does, `weighted` as the live device does
(common/domains/memory/placement.py). All have the same containers on the same machines. As nobody's
speed is simulated, containers want the same memory under each.
"""

from random import Random
from time import perf_counter
from typing import Annotated, Final

import msgspec
import numpy as np

from slackwater.loadgen.simulator.memory.containers import (
    GIB,
    PER_MACHINE,
    Floats,
    place,
)
from slackwater.loadgen.simulator.memory.paging import PAGE_BYTES, Paging, Second, Swap
from slackwater.loadgen.simulator.memory.world import Times, World
from slackwater.schemas.memory import SetLending, SlabState

POLICIES: Final = ("disk", "infiniswap", "weighted")
Some = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0)]


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--set POLICY.option=value`, or `memory.option=value` for all."""

    memory_gib: Some = 64.0
    """Memory of a machine."""
    headroom_gib: Some = 8.0
    slab_gib: Some = 1.0
    device_gib: Some = 64.0
    """Each machine's swap: as large as its memory. The paper does not say; what hangs on it is in
    docs/reproduction/memory_cluster.md."""
    system_gib: Share = 2.7
    """Memory that a machine uses without containers: so that the baseline's imbalance is the
    paper's."""
    touches: Share = 15_000.0
    """Pages that a container touches a second: so that the traffic is the published one."""
    seconds: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1300
    """The published run's length."""
    drain_s: Share = 0.0
    """Then a tenth of the lenders is drained at once; 0: never."""


class MachineRow(msgspec.Struct):
    """One row of machines.csv: shares of the machine's memory, averaged over the run."""

    machine: int
    containers: int
    own: float
    """System and containers."""
    lent: float
    used: float
    used_end: float
    slabs_end: int


class MemoryOutcome(msgspec.Struct):
    policy: str
    seed: int
    containers: int
    rows: list[MachineRow]
    by_second: list[tuple[float, float, float]]
    """Mean, largest and smallest share of memory in use."""
    paged_bytes: float
    """Read from and written to swap."""
    read_remote: float
    """Share of the pages read from swap that came from remote memory."""
    filled: float
    """Share of the lent slabs' bytes, at the end, that hold a page somebody may still read."""
    over_limit_bytes: float
    facts: dict[str, int]
    map_ms: float
    evict_us: float
    """Medians."""
    steps: int
    wall_s: float


class MemoryRun:
    def __init__(
        self,
        policy: str,
        machines: int,
        settings: MemorySettings,
        seed: int,
        containers: int = 0,
    ) -> None:
        self._policy, self._seed, self._settings = policy, seed, settings
        self._machines = machines
        self._memory = int(settings.memory_gib * GIB)
        self._system = int(settings.system_gib * GIB)
        self.containers = place(
            machines,
            containers or round(machines * PER_MACHINE),
            self._memory,
            self._system,
            Random(f"{seed} containers"),
        )
        slab = int(settings.slab_gib * GIB)
        spans = max(1, round(settings.device_gib / settings.slab_gib))
        self._swap = Swap(machines, spans, slab // PAGE_BYTES)
        self._paging = Paging(
            self.containers, machines, self._swap, float(settings.seconds), settings.touches
        )
        self.world: World | None = None
        if policy != "disk":
            self.world = World(
                machines, spans, self._memory, int(settings.headroom_gib * GIB), slab, seed,
                self._swap.map, self._swap.unmap, Times(), even=policy == "infiniswap",
            )  # fmt: skip
        phases = Random(f"{seed} phases")
        self._phase_s = [phases.random() for _ in range(machines)]
        self._paged = self._read = self._read_remote = 0.0

    def run(self) -> MemoryOutcome:
        began_s = perf_counter()
        own, lent = np.zeros(self._machines), np.zeros(self._machines)
        by_second: list[tuple[float, float, float]] = []
        seconds = self._settings.seconds
        for second in range(1, seconds + 1):
            happened = self._paging.step(float(second))
            self._note(happened)
            used = (self._paging.resident_bytes() + self._system) / self._memory
            slabs = self._tell(second, happened, used)
            own += used / seconds
            lent += slabs / seconds
            both = used + slabs
            by_second.append((float(both.mean()), float(both.max()), float(both.min())))
        return self._outcome(own, lent, used, slabs, by_second, perf_counter() - began_s)

    def _tell(self, second: int, happened: Second, used: Floats) -> Floats:
        """Every machine's daemon and device look, each at its own moment of the second. Returns
        each machine's share of memory in lent slabs."""
        world = self.world
        if world is None:
            return np.zeros(self._machines)
        if second == int(self._settings.drain_s):
            for machine in world.machines[::10]:
                drain = SetLending(lending=False)
                world.at(float(second), lambda m=machine, d=drain: world.command(m, d))  # type: ignore[misc]
        counts = np.rint(happened.read + happened.written).astype(np.int64)
        for machine in world.machines:
            at_s = second + self._phase_s[machine.number]
            others = int(used[machine.number] * self._memory)
            paged = counts[machine.number]

            def look(machine=machine, others=others, paged=paged) -> None:  # type: ignore[no-untyped-def]
                world.sampled(machine, others)
                world.measured(machine, paged)

            world.at(at_s, look)
        world.run_until(second + 1.0)
        return self._lent()

    def _lent(self) -> Floats:
        """Pre-allocated slabs that nobody has count as free memory: they are given up at once."""
        assert self.world is not None
        free: tuple[SlabState, ...] = ("free", "making")
        slabs = [
            machine.states.total() - sum(machine.states[state] for state in free)
            for machine in self.world.machines
        ]
        return np.array(slabs) * (self._settings.slab_gib * GIB) / self._memory

    def _note(self, happened: Second) -> None:
        swap = self._swap
        share = np.divide(swap.remote, swap.used, out=np.zeros_like(swap.used), where=swap.used > 0)
        self._read += float(happened.read.sum())
        self._read_remote += float((happened.read * share).sum())
        self._paged += float(happened.read.sum() + happened.written.sum()) * PAGE_BYTES

    def _outcome(
        self,
        own: Floats,
        lent: Floats,
        used_end: Floats,
        lent_end: Floats,
        by_second: list[tuple[float, float, float]],
        wall_s: float,
    ) -> MemoryOutcome:
        count = np.bincount([c.machine for c in self.containers], minlength=self._machines)
        slab_share = self._settings.slab_gib * GIB / self._memory
        rows = [
            MachineRow(
                m, int(count[m]), float(own[m]), float(lent[m]), float(own[m] + lent[m]),
                float(used_end[m] + lent_end[m]), round(float(lent_end[m]) / slab_share),
            )
            for m in range(self._machines)
        ]  # fmt: skip
        world = self.world
        slabs = sum(row.slabs_end for row in rows)
        pages = slabs * self._swap.span_pages
        return MemoryOutcome(
            self._policy,
            self._seed,
            len(self.containers),
            rows,
            by_second,
            self._paged,
            self._read_remote / self._read if self._read else 0.0,
            float(self._swap.remote.sum()) / pages if pages else 0.0,
            self._paging.over_limit_pages() * PAGE_BYTES,
            dict(sorted(world.facts.items())) if world else {},
            _median(world.map_s if world else []) * 1e3,
            _median(world.evict_s if world else []) * 1e6,
            world.steps if world else 0,
            wall_s,
        )


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
