"""The aggregator's shell: its listeners, its subjects, its memory at the start and at the end."""

import os
import socket
from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from slackwater.common.base import limits
from slackwater.common.base.accounts import account_ids, check_passable
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.native import descriptors
from slackwater.common.native.cgroup import memory_bytes
from slackwater.common.native.link import link_of
from slackwater.common.native.machine_load import Machine
from slackwater.common.shell.definition import Level, Port, ServiceDefinition
from slackwater.common.shell.effect_runner import handlers, on
from slackwater.common.shell.namesake import yield_to_namesake
from slackwater.common.shell.world import World
from slackwater.common.transport.base import Fabric, Listener
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.negotiate import live_fabrics
from slackwater.common.transport.pacing import leftover_of
from slackwater.common.transport.verbs.library import why_not
from slackwater.schemas.base import AggregatorId, NodeId
from slackwater.schemas.checkpoints import CopyBuckets, WriteBuckets
from slackwater.schemas.cluster import AggregatorHeartbeat
from slackwater.schemas.placement import (
    DropJob,
    HostBuckets,
    ListBuckets,
    MigrateInit,
    SlotPlan,
)
from slackwater.schemas.telemetry import TasksObserved
from slackwater.services.aggregator.checkpoints import Checkpoints
from slackwater.services.aggregator.config import AggregatorConfig
from slackwater.services.aggregator.core import AggregatorCore
from slackwater.services.aggregator.effects import (
    AggregatorAction,
    CopyForCheckpoint,
    DropBuckets,
    KeepBucket,
    MakeRegions,
    MoveBucket,
    SetDeadlines,
    SetSlotPlan,
    WriteCheckpoint,
)
from slackwater.services.aggregator.events import TasksMeasured
from slackwater.services.aggregator.executor import (
    Executor,
    KernelThread,
    OffLoop,
    at_once,
    in_thread,
)
from slackwater.services.aggregator.fold_threads import Team
from slackwater.services.aggregator.migration import SHARED, Adoptions, Handovers
from slackwater.services.aggregator.orders import Orders
from slackwater.services.aggregator.plane import DataPlane
from slackwater.services.aggregator.regions import Regions

_SOCKET: Final = "slots.sock"


class Aggregator:
    """One instance: the parts, put together.

    `fabrics` replaces the real ones, `addresses` says where to listen on each; both are for
    processes that hold a whole system. `virtual`: time is simulated, so nothing runs in threads.
    """

    def __init__(
        self,
        config: AggregatorConfig,
        world: World,
        fabrics: Mapping[str, Fabric] | None = None,
        addresses: Mapping[str, str] | None = None,
        *,
        virtual: bool = False,
    ) -> None:
        self._config = config
        self._clock = clock = world.clock
        self._bus = world.bus
        self._fabrics = _fabrics(config, fabrics)
        self._listen = (
            dict(addresses) if addresses is not None else _addresses(config, self._fabrics)
        )
        self._listeners: list[tuple[str, Listener]] = []
        reached = [config.tcp_address, config.tls_address, config.verbs_address]
        link = link_of(config.network_interface, config.network_bytes_s, filter(None, reached))
        self._kernels = None if virtual else KernelThread()
        helpers = 0 if virtual else min(int(config.cpu_share), len(os.sched_getaffinity(0))) - 1
        self._team = Team(helpers) if helpers > 0 else None
        off_loop: OffLoop = at_once if virtual else in_thread
        device = device_named(config.device) if config.device else None
        room = memory_bytes() if device is None else device.total_bytes
        self._memory_bytes = config.memory_bytes_max or room // 2
        self._node = NodeId(config.node or socket.gethostname().split(".")[0])
        self.core = AggregatorCore(config.id, self._memory_bytes)
        self.regions = Regions(
            config.id, off_loop, device, pin=bool({"tcp", "tls"} & {*self._listen})
        )
        self.plane = DataPlane(self.core, self.regions, *config.cluster_tokens)
        self.executor = Executor(
            self.regions.me,
            clock,
            config.cpu_share,
            self._kernels or at_once,
            self.plane.folded,
            self._team,
            self.plane.folded_ahead,
            config.charge_ns_per_byte,
        )
        self.orders = Orders(self.core, self.regions, self.plane, self.executor, clock, off_loop)
        self.orders.handovers = Handovers(
            config.id, config.cluster_token, self._fabrics, clock, world.rng, self.orders.copied,
            config.migration_bytes_s, leftover_of(link),
        )  # fmt: skip
        self.checkpoints = Checkpoints(
            self.core, self.regions, off_loop, lambda error: self.plane.port.fail(error)
        )
        self._adoptions = Adoptions(config.id, config.cluster_token, self.regions, self.orders)
        self.plane.submit = self.executor.submit
        self.plane.submit_ahead = self.executor.submit_ahead
        self.plane.departures = self.orders.handovers.departures
        self.plane.may_leave = self.orders.may_leave
        self.plane.frozen = self.orders.frozen
        self.plane.taken = self.orders.taken
        self._incarnation = 0
        self._virtual = virtual
        self.machine = Machine(link)

    # A life ---------------------------------------------------------------------------------------

    async def start(self, port: Port) -> None:
        """Find the memory again first: whoever connects may be answered at once."""
        self._incarnation = port.epoch
        descriptors.allow_all()  # Every region needs two descriptors.
        recovered = await self.regions.recover(port.process)
        self.plane.begin(port)
        await self.orders.begin(port, recovered)
        for kind, address in self._listen.items():
            if kind == SHARED and self._config.job_accounts:
                check_passable("job_accounts", Path(address).parent)
            listener = await self._fabrics[kind].listen(
                address,
                self.plane.accept,
                self.plane.serve,
                partial(self._adoptions.adopt, shared=kind == SHARED),
                self.plane.prepare,
            )
            self._listeners.append((kind, listener))

    async def run_slot(self, port: Port) -> None:
        await self.executor.run()

    async def yield_to_namesake(self, port: Port) -> None:
        """Controllers heed the newest start of an id alone: an older one would keep its memory."""
        await yield_to_namesake(
            self._bus, "aggregator", self._config.id, port.epoch, AggregatorHeartbeat
        )

    async def report(self, port: Port) -> None:
        """Publish the costs of tasks, once a period."""
        due_s = self._clock.now_s()
        self.machine.begin()
        while True:
            due_s = max(due_s + self._config.telemetry_s, self._clock.now_s())
            await self._clock.sleep_until(due_s)
            costs, jobs = self.executor.observed(), self.executor.accounts()
            percent = 0.0 if self._virtual else self.machine.look()
            reports = tuple(
                TasksObserved(
                    aggregator=AggregatorId(self._config.id),
                    period_s=self._config.telemetry_s,
                    tasks=tuple(costs[first : first + limits.TASKS_PER_MESSAGE]),
                    host_cpu_percent=percent,
                    jobs=jobs if first == 0 else (),
                )
                for first in range(0, len(costs), limits.TASKS_PER_MESSAGE)
            )
            if reports:
                port.post(TasksMeasured(reports))

    async def stop(self) -> None:
        for _, listener in self._listeners:
            await listener.close()
        await self.orders.close()
        await self.checkpoints.close()
        if self._kernels is not None:
            self._kernels.close()
        if self._team is not None:
            self._team.close()
        await self.regions.spill()
        self.regions.close()

    # Heartbeat and gauges -------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        return tuple((kind, listener.address) for kind, listener in self._listeners)

    def heartbeat(self, now_s: float) -> AggregatorHeartbeat:
        bytes_in, bytes_out = self.regions.bytes_moved()
        seen = self.machine.seen
        return AggregatorHeartbeat(
            service="aggregator",
            id=self._config.id,
            incarnation=self._incarnation,
            at_s=now_s,
            node=self._node,
            cpu_share=self._config.cpu_share,
            addresses=self.addresses,
            buckets=len(self.core.buckets),
            jobs=self.core.jobs,
            held_bytes=self.core.held_bytes,
            busy_s=self.executor.busy_s,
            executions=self.executor.executions,
            undercharged=self.executor.undercharged,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            regions_recovered=self.regions.recovered,
            regions_locked=len(self.regions.locked),
            arrived=self.core.arrived(now_s),
            migration_bytes_s=self._config.migration_bytes_s,
            memory_bytes=self._memory_bytes,
            host_cores=seen.cores,
            host_cpu=seen.used,
            own_cpu=seen.own,
            network_budget_bytes_s=self.machine.network_budget_bytes_s,
            network_load_bytes_s=int(seen.network_bytes_s),
            restart_window_s=self._config.restart_window_s,
            node_memory_bytes=self._config.node_memory_bytes_max,
        )

    def service_gauges(self) -> Iterator[Level]:
        """Return the metrics' levels, from the same numbers as the heartbeat."""
        beat = self.heartbeat(self._clock.now_s())
        for name, value in {
            "received_bytes_total": beat.bytes_in,
            "sent_bytes_total": beat.bytes_out,
            "slot_busy_seconds_total": beat.busy_s,
            "fold_cpu_seconds_total": self.executor.cpu_s,
            "folds_total": beat.executions,
            "folds_undercharged_total": beat.undercharged,
            "requests_late_total": self.executor.turns.cycle.late,
            "buckets": beat.buckets,
            "jobs": beat.jobs,
            "held_bytes": beat.held_bytes,
            "memory_limit_bytes": beat.memory_bytes,
            "cpu_share_cores": beat.cpu_share,
            "network_budget_bytes_per_second": beat.network_budget_bytes_s,
            "network_bytes_per_second": beat.network_load_bytes_s,
            "regions_recovered": beat.regions_recovered,
            "regions_locked": beat.regions_locked,
        }.items():
            yield Level(f"aggregator_{name}", {}, value)

    def definition(self) -> ServiceDefinition:
        orders = self.orders
        return ServiceDefinition(
            service="aggregator",
            id=self._config.id,
            core=self.core,
            description="Holds master copies of tensors, aggregates and applies updates.",
            endpoints={
                "host": HostBuckets,
                "drop": DropJob,
                "migrate": MigrateInit,
                "held": ListBuckets,
                "turns": SlotPlan,
                "copy": CopyBuckets,
                "write": WriteBuckets,
            },
            handlers=handlers(
                AggregatorAction,
                on(MakeRegions, orders.make),
                on(DropBuckets, orders.drop),
                on(KeepBucket, orders.keep),
                on(MoveBucket, orders.move),
                on(SetDeadlines, orders.deadlines),
                on(SetSlotPlan, orders.turns),
                on(CopyForCheckpoint, self.checkpoints.copy),
                on(WriteCheckpoint, self.checkpoints.write),
            ),
            heartbeat=self.heartbeat,
            service_gauges=self.service_gauges,
            on_start=self.start,
            on_stop=self.stop,
            tasks=(self.run_slot, self.report, self.yield_to_namesake),
        )


def _fabrics(config: AggregatorConfig, given: Mapping[str, Fabric] | None) -> dict[str, Fabric]:
    if given is not None:
        return dict(given)
    if config.verbs_address and (why := why_not()):
        raise ConfigRejected(f"aggregator: verbs_address is set, and there is {why}")
    return live_fabrics(
        config.transport or None,
        rdma_device=config.rdma_device,
        job_accounts=account_ids(config.job_accounts),
        tls=config.tls_ends(),
    )


def _addresses(config: AggregatorConfig, kinds: Container[str]) -> dict[str, str]:
    """Return the addresses to listen at, best first. Raises ConfigRejected."""
    for fault in config.faults():
        raise ConfigRejected(f"aggregator: {fault}")
    addresses: dict[str, str] = {}
    if config.transport in ("", "shm"):
        path = config.shm_path or str(Path(config.state_dir) / _SOCKET)
        os.makedirs(Path(path).parent, mode=0o700, exist_ok=True)
        addresses["shm"] = path
    beside = f"{config.tcp_address.rpartition(':')[0]}:0" if config.tcp_address else ""
    # A region on a GPU is staged by its owner, and over verbs the owner takes no part.
    verbs = "" if config.device else config.verbs_address or beside
    offered = {"verbs": verbs, "tls": config.tls_address, "tcp": config.tcp_address}
    for kind, address in offered.items():
        if not address or kind not in kinds or config.transport not in ("", kind):
            continue
        addresses[kind] = address
    if not addresses:
        kind = config.transport
        raise ConfigRejected(f'aggregator: transport = "{kind}" needs a {kind}_address')
    return addresses


def definition(config: AggregatorConfig, world: World) -> ServiceDefinition:
    return Aggregator(config, world).definition()
