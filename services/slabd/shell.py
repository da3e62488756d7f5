"""The lender's shell: listeners, the look at memory once a second, what others see of it."""

import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, get_args

import structlog

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.common.native import descriptors, memlock
from slackwater.common.shell.definition import Level, Port, ServiceDefinition
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.namesake import yield_to_namesake
from slackwater.common.shell.world import World
from slackwater.common.transport.base import Fabric, Listener
from slackwater.common.transport.negotiate import live_fabrics
from slackwater.common.transport.region import Region
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import (
    EvictNow,
    LenderRecord,
    ListSlabs,
    SetLending,
    SlabdHeartbeat,
    SlabState,
)
from slackwater.services.slabd import drain_record
from slackwater.services.slabd.config import SlabdConfig
from slackwater.services.slabd.core import LenderCore
from slackwater.services.slabd.effects import (
    CloseSession,
    LenderAction,
    LendSlab,
    MakeSlab,
    ReleaseSlab,
    RenewSlab,
    SendToDevice,
)
from slackwater.services.slabd.monitor import KernelMonitor, Monitor
from slackwater.services.slabd.sessions import MAPPING, Sessions
from slackwater.services.slabd.slabs import Slabs, at_once, in_thread

_SOCKET: Final = "slabs.sock"
_log = structlog.get_logger()


class Slabd:
    """One instance: the parts, put together.

    `fabrics` replaces the real ones, `addresses` says where to listen on each, `monitor` is another
    view of the machine, `mapping` the kinds that map memory; all for tests. `virtual`: time is
    simulated, no threads.
    """

    def __init__(
        self,
        config: SlabdConfig,
        world: World,
        fabrics: Mapping[str, Fabric] | None = None,
        addresses: Mapping[str, str] | None = None,
        monitor: Monitor | None = None,
        *,
        mapping: frozenset[str] = MAPPING,
        virtual: bool = False,
    ) -> None:
        self._config = config
        self._clock = world.clock
        self._bus = world.bus
        self._fabrics = (
            dict(fabrics)
            if fabrics is not None
            else live_fabrics(config.transport or None, tls=config.tls_ends())
        )
        self._addresses = dict(addresses) if addresses is not None else _addresses(config)
        self._monitor: Monitor = monitor if monitor is not None else KernelMonitor()
        self._listeners: list[tuple[str, Listener]] = []
        self._incarnation = 0
        self._node = NodeId(config.node or socket.gethostname().split(".")[0])
        self.core = LenderCore(config, world.rng)
        self.sessions = Sessions(*config.cluster_tokens, mapping=mapping)
        self.slabs = Slabs(config.slab_bytes, self.sessions, at_once if virtual else in_thread)

    # A life ---------------------------------------------------------------------------------------

    async def start(self, port: Port) -> None:
        """Find the memory again before anybody can ask for it."""
        self._incarnation = port.epoch
        descriptors.allow_all()
        port.post(await self.slabs.recover(port.process))
        self.sessions.begin(port)
        for kind, address in self._addresses.items():
            listener = await self._fabrics[kind].listen(
                address,
                partial(self.sessions.accept, kind),
                partial(self.sessions.serve, kind),
                None,  # A lender takes no regions: it lends its own.
            )
            self._listeners.append((kind, listener))
        self.slabs.prepare = self._prepare
        for region in self.slabs.regions.values():
            await self.slabs.off_loop(partial(self._prepare, region))

    def _prepare(self, region: Region) -> None:
        """Register the slab with NICs; one that cannot be registered is lent over other
        transports."""
        for kind, listener in self._listeners:
            try:
                listener.prepare(region)
            except Rejected as error:
                _log.warning(
                    "slab.not-registered", label=region.label, kind=kind, reason=str(error)
                )

    async def watch(self, port: Port) -> None:
        """Look at the machine's memory, once a period."""
        while True:
            port.post(self._monitor.sample(self.slabs.resident_bytes()))
            await self._clock.sleep_until(self._clock.now_s() + self._config.sample_s)

    async def yield_to_namesake(self, port: Port) -> None:
        """To devices two lenders of one id are one."""
        await yield_to_namesake(self._bus, "slabd", self._config.id, port.epoch, SlabdHeartbeat)

    async def stop(self) -> None:
        for _, listener in self._listeners:
            await listener.close()
        self.slabs.close()

    # Heartbeat and gauges -------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        return tuple((kind, listener.address) for kind, listener in self._listeners)

    def heartbeat(self, now_s: float) -> SlabdHeartbeat:
        core = self.core
        return SlabdHeartbeat(
            service="slabd",
            id=self._config.id,
            incarnation=self._incarnation,
            at_s=now_s,
            node=self._node,
            addresses=self.addresses,
            slab_bytes=self._config.slab_bytes,
            free_slabs=len(core.having("free")),
            lent_slabs=len(core.having("lent", "evicting", "held")),
            devices=len(self.sessions),
            total_bytes=core.sizing.total_bytes,
            used_bytes=core.sizing.others_bytes,
            headroom_bytes=core.sizing.headroom_bytes,
            pressure=core.sizing.pressure,
            lending=core.lending,
        )

    def service_gauges(self) -> Iterator[Level]:
        """Yield the levels that the metrics show."""
        states = Counter(slab.state for slab in self.core.slabs.values())
        for state in get_args(SlabState):
            yield Level("lender_slabs", {"state": state}, float(states[state]))
        sizing = self.core.sizing
        for what, nbytes in (
            ("total", sizing.total_bytes),
            ("others", sizing.others_bytes),
            ("headroom", sizing.headroom_bytes),
        ):
            yield Level("lender_memory_bytes", {"of": what}, float(nbytes))
        yield Level("lender_pressure_ratio", {}, sizing.pressure)
        yield Level("lender_devices", {}, float(len(self.sessions)))

    def definition(self) -> ServiceDefinition:
        return ServiceDefinition(
            service="slabd",
            id=self._config.id,
            core=self.core,
            description="Lends idle memory in slabs, and takes it back when the machine needs it.",
            buckets={drain_record.bucket(self._config.id): LenderRecord},
            endpoints={"slabs": ListSlabs, "evict": EvictNow, "lending": SetLending},
            handlers=handlers(
                LenderAction,
                on(MakeSlab, self.slabs.make),
                on(LendSlab, self.slabs.lend),
                on(RenewSlab, self.slabs.renew),
                on(ReleaseSlab, self.slabs.release),
                on(SendToDevice, self.sessions.send),
                on(CloseSession, self.sessions.close),
            ),
            heartbeat=self.heartbeat,
            service_gauges=self.service_gauges,
            on_start=self.start,
            on_stop=self.stop,
            tasks=(self.watch, self.yield_to_namesake),
        )


def _addresses(config: SlabdConfig) -> dict[str, str]:
    """Return the addresses to listen at. Raises ConfigRejected."""
    for fault in config.faults():
        raise ConfigRejected(f"slabd: {fault}")
    addresses: dict[str, str] = {}
    if config.transport in ("", "shm"):
        path = config.shm_path or str(Path(config.state_dir) / _SOCKET)
        os.makedirs(Path(path).parent, mode=0o700, exist_ok=True)
        addresses["shm"] = path
    if config.tls_address and config.transport in ("", "tls"):
        addresses["tls"] = config.tls_address
    if config.tcp_address and config.transport not in ("shm", "tls"):
        addresses["tcp" if config.transport != "verbs" else "verbs"] = config.tcp_address
    return addresses


def definition(config: SlabdConfig, world: World) -> ServiceDefinition:
    stay_in_memory()  # Threads inherit it: so before there are any.
    return Slabd(config, world).definition()


def stay_in_memory() -> None:
    """A lender that is swapped out reads a page from disk to give it away; where two machines swap
    to each other, both would stand still. It lends without that, too, and says so."""
    for lacks in (memlock.lock_memory(as_touched=True), memlock.become_io_flusher()):
        if lacks:
            _log.warning("lender.may-be-swapped", reason=lacks)
