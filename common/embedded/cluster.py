"""A whole cluster on one machine: what `slackwater up` and `loadgen replay` start.

An aggregator is a slot of `cpu_share` cores. Fractions of a core emulate a pool. They are fitted
to the machine: together they get at most half of the cores, so that what a job loses is its
neighbours' doing and not the machine's. Likewise with memory: together they may hold
half of what this process may have.

Aggregators listen for both transports, tcp on the loopback interface, with one secret per cluster,
so that Agents and handovers have the choice that they have between real hosts.
"""

import asyncio
import itertools
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.bus.users import BUS_WATCH, OWNER
from slackwater.common.embedded.announcement import announce
from slackwater.common.embedded.supervisor import Supervisor
from slackwater.common.embedded.unit import UnitSpec
from slackwater.common.native import blas_threads
from slackwater.common.native.cgroup import memory_bytes
from slackwater.common.shell.config import write_config
from slackwater.schemas.gpus import FAKE

AGGREGATORS: Final = 10
"""The number of aggregators in an emulated pool."""
SERVERS_OF_A_JOB: Final = 2
CPU_SHARE: Final = 0.1
"""The share of one core that an aggregator of an emulated pool has on a development machine."""
MEMORY_BYTES_MIN: Final = 1024 * 1024
_ANY_FREE_PORT: Final = "127.0.0.1:0"
_TOKEN_BYTES: Final = 32
_log = structlog.get_logger()


def fit_cpu_share(requested: float, aggregators: int, cores: int) -> float:
    """The share of each of `aggregators`. A fraction of a core emulates a pool: `requested`, or
    less, so that all of them together use at most half of `cores`. Whole cores are as asked for: a
    slot of them stretches nothing. Raises ConfigRejected when less than CPU_SHARE_MIN is left."""
    if aggregators < 1 or not requested > 0:
        raise ConfigRejected(
            f"{aggregators} aggregators with a share of {requested} cores: both must be positive"
        )
    if requested >= 1.0:
        return requested
    share = min(requested, cores / 2 / aggregators)
    if share < limits.CPU_SHARE_MIN:
        most = int(cores / 2 / limits.CPU_SHARE_MIN)
        raise ConfigRejected(
            f"{aggregators} aggregators on {cores} cores leave {share:.3f} cores for each, fewer "
            f"than the {limits.CPU_SHARE_MIN} at which shares can be enforced; start at most {most}"
            if requested >= limits.CPU_SHARE_MIN
            else f"a share of {requested} cores is below the {limits.CPU_SHARE_MIN} at which "
            "shares can be enforced; ask for more"
        )
    return share


def whole_cores(cpu_share: float, cores: int | None = None) -> int:
    """Return how many aggregators a machine gets: its cores less one, which the jobs keep, and at
    least one. Fractions of a core emulate a pool: AGGREGATORS of them."""
    if cpu_share < 1.0:
        return AGGREGATORS
    return max(1, (cores if cores is not None else len(os.sched_getaffinity(0))) - 1)


def controllers_for(aggregators: int) -> int:
    """Return 2 where each cluster has room for a job's own servers and another job's profiling."""
    return 2 if aggregators >= 2 * 2 * SERVERS_OF_A_JOB else 1


def memory_budget(requested_bytes: int) -> int:
    """Return the bytes that all aggregators together may hold: `requested_bytes`, or half of this
    process's memory. Raises ConfigRejected when nothing could be held in it."""
    if 0 < requested_bytes < MEMORY_BYTES_MIN:
        raise ConfigRejected(
            f"{requested_bytes} bytes of memory for all aggregators: give {MEMORY_BYTES_MIN} or "
            "more, or 0 for half of what this process may have"
        )
    return requested_bytes or memory_bytes() // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of a cluster. The mappings go into the services' configuration files as they are."""

    controllers: int = 2
    aggregators: int = AGGREGATORS
    lenders: int = 0
    """Lenders of memory (slabd), each posing as a machine of its own: node m1, m2, ..."""
    nodes: int = 1
    """Worker services, each posing as a machine of its own: node w1, w2, ..."""
    gpus_per_node: int | Literal["auto"] = "auto"
    """GPUs that each of them says it has; auto: one alone has those that the machine's driver
    tells, several have none."""
    gpu_type: str = FAKE
    """Their type. Fake ones are scheduled like others, and do not exist."""
    racks: int = 1
    """Racks that these nodes say they stand in."""
    cpu_share: float = 1.0
    """Cores of each aggregator; less emulates a pool (CPU_SHARE), for emulated jobs."""
    charge_ns_per_byte: float = 0.0
    """Nanoseconds that aggregators charge a fold for each byte, in place of its measured time
    (AggregatorConfig); 0: they measure."""
    memory_bytes: int = 0
    """Bytes that all aggregators together may hold; 0: half of this process's memory."""
    state_dir: Path | None = None
    """Where records outlive the cluster; None: a temporary folder."""
    log_dir: Path | None = None
    """Where all logs are written; None: in a temporary folder, which goes with the cluster."""
    log_level: str = ""
    """The log level of all services: debug, info, warning or error; empty: their default."""
    port: int = 0
    """The port of the bus server; 0: the one that state_dir keeps, else any free one."""
    metrics_port: int = 0
    """Services serve their metrics on this loopback port and those after it; 0: none do."""
    users: tuple[str, ...] = ()
    """Users of the bus beside the services and its owner (common/bus/users.py)."""
    policy: str = ""
    """The controllers' assignment policy; empty: their default."""
    transport: Literal["", "auto", "shm", "verbs", "tcp"] = ""
    """`shm` or `tcp`: all that aggregators offer and jobs use; `auto`: the best of both; empty: the
    same, unless the SLACKWATER_TRANSPORT of this process's environment tells the jobs."""
    master: Mapping[str, Any] = field(default_factory=dict)
    controller: Mapping[str, Any] = field(default_factory=dict)
    aggregator: Mapping[str, Any] = field(default_factory=dict)
    profiler: Mapping[str, Any] = field(default_factory=dict)
    worker: Mapping[str, Any] = field(default_factory=dict)
    slabd: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Unit name -> variables (failpoints, for instance)."""
    restarts_max: int = limits.RESTARTS_MAX
    restart_wait_s_max: float = limits.RESTART_WAIT_S_MAX


class EmbeddedCluster:
    """`async with EmbeddedCluster(options) as cluster: cluster.url`."""

    def __init__(self, options: ClusterOptions, cores: int | None = None) -> None:
        self.options = options
        cores = cores if cores is not None else len(os.sched_getaffinity(0))
        self.cpu_share = fit_cpu_share(options.cpu_share, options.aggregators, cores)
        if self.cpu_share < options.cpu_share:
            _log.info("cpu_share.shrunk", asked=options.cpu_share, used=round(self.cpu_share, 4))
        self._supervisor: Supervisor | None = None
        token = secrets.token_hex(_TOKEN_BYTES)
        self.stages = service_stages(options, self.cpu_share, token)

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "the cluster is not started"
        return self._supervisor

    @property
    def url(self) -> str:
        """With the token that the bus asks for: not to be shown."""
        return self.supervisor.url

    async def __aenter__(self) -> "EmbeddedCluster":
        options = self.options
        names = [_unit_name(service, id) for stage in self.stages for service, id, _ in stage]
        self._supervisor = supervisor = Supervisor(
            options.state_dir,
            options.log_dir,
            options.restarts_max,
            options.port,
            [OWNER, BUS_WATCH, *names, *options.users],
        )
        try:
            url = await supervisor.start_nats()
            for stage in self.stages:
                await supervisor.start_units(
                    [self._spec(service, id, fields) for service, id, fields in stage]
                )
        except BaseException:
            await supervisor.stop()
            raise
        self._announcing = supervisor.spawn(announce(url, lambda: supervisor.units))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._announcing.cancel()
        await asyncio.gather(self._announcing, return_exceptions=True)
        await self.supervisor.stop()

    def _spec(self, service: str, id: str, fields: Mapping[str, Any]) -> UnitSpec:
        name = _unit_name(service, id)
        supervisor = self.supervisor
        url = supervisor.url_of(name)
        state_dir = supervisor.state_dir / name
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if fields.get("accounts") or fields.get("job_accounts"):
            state_dir.chmod(0o711)  # Jobs pass through it to what is theirs.
        config = supervisor.run_dir / f"{name}.toml"
        write_config(config, {"id": id, "url": url, "state_dir": state_dir, **fields})
        return UnitSpec(
            name=name,
            command=(
                sys.executable,
                "-m",
                f"slackwater.services.{service}",
                "--config",
                str(config),
            ),
            environment={
                **(blas_threads.one_each(os.environ) if service != "worker" else {}),
                **_transport_of_jobs(self.options, service),
                **self.options.environment.get(name, {}),
            },
            restarts_max=self.options.restarts_max,
            restart_wait_s_max=self.options.restart_wait_s_max,
            oom_score_adj=limits.OOM_SCORE_AGGREGATOR if service == "aggregator" else 0,
        )


def _unit_name(service: str, id: str) -> str:
    """Name the unit, and its user of the bus."""
    return f"{service}-{id}"


def _transport_of_jobs(options: ClusterOptions, service: str) -> dict[str, str]:
    """Force the jobs' transport through the environment, which the worker service hands on."""
    if service != "worker" or not options.transport:
        return {}
    return {"SLACKWATER_TRANSPORT": options.transport}


def service_stages(
    options: ClusterOptions, cpu_share: float, cluster_token: str
) -> list[list[tuple[str, str, dict[str, Any]]]]:
    """(service, id, configuration) in the order of start; within a stage, all at once."""
    controller = {"policy": options.policy} if options.policy else {}
    # The pool is split (3.3.3): what a cluster may have leaves each other one a job's profiling.
    per_cluster = max(
        -(-options.aggregators // options.controllers),
        options.aggregators - SERVERS_OF_A_JOB * (options.controllers - 1),
    )
    aggregator: dict[str, Any] = {
        "cpu_share": cpu_share,
        "tcp_address": _ANY_FREE_PORT,
        "cluster_token": cluster_token,
    }
    if options.charge_ns_per_byte:
        aggregator["charge_ns_per_byte"] = options.charge_ns_per_byte
    if not options.aggregator.get("device"):  # A GPU's memory is not the host's.
        budget = memory_budget(options.memory_bytes)
        aggregator |= {"memory_bytes_max": budget, "node_memory_bytes_max": budget}
    if options.transport in ("shm", "verbs", "tcp"):
        aggregator["transport"] = options.transport
    first = [
        ("master", "m1", {"aggregators_max": per_cluster, **options.master}),
        ("profiler", "p1", dict(options.profiler)),
        *(
            ("controller", f"c{n}", {**controller, **options.controller})
            for n in range(1, options.controllers + 1)
        ),
        *(
            ("aggregator", f"a{n}", {**aggregator, **options.aggregator})
            for n in range(1, options.aggregators + 1)
        ),
        *(
            ("slabd", f"s{n}", {"node": f"m{n}", **options.slabd})
            for n in range(1, options.lenders + 1)
        ),
    ]
    gpus: dict[str, Any] = {"gpus": options.gpus_per_node, "gpu_type": options.gpu_type}
    if options.gpus_per_node == "auto":
        gpus = {"gpus": 0} if options.nodes > 1 else {}
    worker = {**gpus, **options.worker}
    stages = [
        first,
        [("worker", f"w{n + 1}", {**_rack(options, n), **worker}) for n in range(options.nodes)],
    ]
    every: dict[str, Any] = {"log_level": options.log_level} if options.log_level else {}
    ports = itertools.count(options.metrics_port)
    return [
        [
            (service, id, {**every, **_metrics(options, ports), **fields})
            for service, id, fields in stage
        ]
        for stage in stages
    ]


def _rack(options: ClusterOptions, node: int) -> dict[str, Any]:
    """Deal nodes to racks as they are numbered."""
    if options.racks == 1:
        return {}
    return {"rack": f"r{node * options.racks // options.nodes + 1}"}


def _metrics(options: ClusterOptions, ports: Iterator[int]) -> dict[str, Any]:
    return {"metrics_port": next(ports)} if options.metrics_port else {}
