"""`slackwater up`: a cluster on this machine, for as long as the command runs."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from slackwater.cli import detached_cluster
from slackwater.cli.machine import announce, running_jobs
from slackwater.client.address import CLUSTER
from slackwater.common.base import limits
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import ConfigRejected, Rejected, SlackwaterError
from slackwater.common.base.private_files import write_private
from slackwater.common.bus import local_clusters
from slackwater.common.bus.access import DEFAULT_CLUSTER, address_file
from slackwater.common.bus.local_clusters import Listed
from slackwater.common.bus.users import OPERATOR, TENANT
from slackwater.common.embedded import (
    ClusterOptions,
    EmbeddedCluster,
    Supervisor,
    controllers_for,
    whole_cores,
)
from slackwater.console.gpus import gpu_type_named
from slackwater.console.names import DEFAULT_GPU_POLICY, gpu_policy_named, policy_named
from slackwater.console.options import Json
from slackwater.console.outcome import err, reported
from slackwater.console.sizes import size_bytes
from slackwater.console.where import named
from slackwater.schemas.base import AGGREGATORS_MAX, ID_PATTERN, NODE_GPUS_MAX, NODE_SLOTS_MAX
from slackwater.schemas.gpus import FAKE
from slackwater.schemas.machine import LocalCluster, ServiceStatus

TOLD_S: Final = 0.5
"""Seconds between two updates of what `slackwater status` shows."""
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_Name = Annotated[
    str,
    typer.Option(envvar=CLUSTER, help="Name the cluster, so that several can run on this machine."),
]
_Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, help="Port of the bus server; 0: the one it had before, or any free one."
    ),
]
_Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return once it is ready; `slackwater down` ends it.")
]
_Aggregators = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=AGGREGATORS_MAX,
        help="Aggregators in the pool; by default as many as the machine has cores, less one. "
        "With a fraction as --cpu-share: 10.",
        show_default=False,
    ),
]
_Controllers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=limits.CLUSTERS_MAX,
        help="Aggregator clusters; by default 1, or 2 from 8 aggregators on.",
        show_default=False,
    ),
]
_Lenders = Annotated[
    int, typer.Option(min=0, max=limits.LENDERS_MAX, help="Lenders of idle memory (slabd).")
]
DEFAULT_POLICY: Final = "edf"
_Share = Annotated[
    float,
    typer.Option(
        help="Cores of one aggregator. Less than 1 emulates slower ones, and shrinks until all "
        "of them together take half of the machine."
    ),
]
_Memory = Annotated[
    str | None,
    typer.Option(
        help="Bytes that all aggregators may hold, e.g. 8G; by default half of the machine."
    ),
]
_Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Hold buckets in this GPU's memory and fold them there: cuda, or cuda:1; by default "
        "aggregators use the host's.",
        show_default=False,
    ),
]
_Policy = Annotated[
    str,
    typer.Option(
        help="How jobs share aggregators: edf (deadlines), cyclic (the paper's), static (own "
        "servers) or an installed policy's name."
    ),
]
_GpuPolicy = Annotated[
    str,
    typer.Option(
        help="How jobs are given GPUs: fifo, sf, tiresias-las, pollux or another policy; "
        "`slackwater policy set` changes it later."
    ),
]
_Slots = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=NODE_SLOTS_MAX,
        help="Processes without GPUs that each node runs at a time; jobs wait for room. By default "
        "64.",
        show_default=False,
    ),
]
_Nodes = Annotated[
    int,
    typer.Option(
        min=1,
        max=limits.LOCAL_NODES_MAX,
        help="Number of worker services, each of which acts as a node.",
    ),
]
_Gpus = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=NODE_GPUS_MAX,
        metavar="N",
        help="GPUs that each node reports; by default those of NVIDIA's driver if there is one "
        "node, else none.",
    ),
]
_Racks = Annotated[
    int,
    typer.Option(
        min=1,
        max=limits.LOCAL_NODES_MAX,
        help="Racks that these nodes stand in; the GPUs of a job are kept in one if it fits.",
    ),
]
_GpuType = Annotated[
    str,
    typer.Option(help="Type of these GPUs. Those of type fake stand for no hardware."),
]
_StateDir = Annotated[
    Path | None,
    typer.Option(
        help="Keep records and logs in this folder; without it records end with the cluster."
    ),
]
_Metrics = Annotated[
    int,
    typer.Option(
        min=0,
        max=65000,
        metavar="PORT",
        help="Serve the services' metrics on this loopback port and those after it; 0: not at all.",
    ),
]
_Users = Annotated[
    list[str] | None,
    typer.Option(
        "--user",
        metavar="NAME",
        help="Let this user in, too: tenant-T submits and follows the jobs of tenant T, operator-N "
        "does all that operators do. Repeat it for others.",
    ),
]


def up(
    name: _Name = DEFAULT_CLUSTER,
    port: _Port = 0,
    detach: _Detach = False,
    aggregators: _Aggregators = None,
    cpu_share: _Share = 1.0,
    controllers: _Controllers = None,
    memory: _Memory = None,
    device: _Device = "",
    policy: _Policy = DEFAULT_POLICY,
    gpu_policy: _GpuPolicy = DEFAULT_GPU_POLICY,
    lenders: _Lenders = 0,
    slab_size: Annotated[str, typer.Option(help="Size of a lender's slab, e.g. 64M.")] = "1G",
    lend: Annotated[str, typer.Option(help="Bytes that each lender lends at most.")] = "4G",
    nodes: _Nodes = 1,
    gpus_per_node: _Gpus = None,
    slots_per_node: _Slots = None,
    racks: _Racks = 1,
    gpu_type: _GpuType = FAKE,
    state_dir: _StateDir = None,
    log_level: Annotated[str, typer.Option(help=f"Log {', '.join(LOG_LEVELS)}.")] = "info",
    metrics: _Metrics = 0,
    user: _Users = None,
    json: Json = False,
) -> None:
    """Run a cluster on this machine until Ctrl-C; with --detach, until `slackwater down`."""
    with reported():
        name = named(name)
        count = aggregators if aggregators is not None else whole_cores(cpu_share)
        log_dir = state_dir / "logs" if state_dir else local_clusters.default_log_dir(name)
        options = ClusterOptions(
            controllers=controllers if controllers is not None else controllers_for(count),
            aggregators=count,
            cpu_share=cpu_share,
            memory_bytes=size_bytes(memory, "--memory") if memory is not None else 0,
            aggregator=_on(device),
            policy=policy if policy == DEFAULT_POLICY else policy_named(policy),
            master={"gpu_policy": gpu_policy_named(gpu_policy)},
            lenders=lenders,
            slabd={
                "slab_bytes": size_bytes(slab_size, "--slab-size"),
                "lend_bytes_max": size_bytes(lend, "--lend"),
            },
            nodes=nodes,
            gpus_per_node="auto" if gpus_per_node is None else gpus_per_node,
            worker={} if slots_per_node is None else {"slots": slots_per_node},
            gpu_type=gpu_type_named(gpu_type),
            racks=racks_named(racks, nodes),
            state_dir=state_dir,
            log_dir=log_dir.absolute(),
            log_level=_log_level(log_level),
            port=port,
            metrics_port=metrics,
            users=_users(user or []),
        )
        _check_name(name)
        if detach:
            detached_cluster.start(name, log_dir.absolute(), json)
        else:
            asyncio.run(keep(options, name, json))


def _on(device: str) -> dict[str, str]:
    """Return the aggregators' configuration. Raises ConfigRejected where this machine lacks the
    device."""
    if not device:
        return {}
    from slackwater.common.transport.devices import device_named  # It loads numpy.

    device_named(device)
    return {"device": device}


def _check_name(name: str) -> None:
    if re.fullmatch(ID_PATTERN, name) is None:
        raise Rejected(
            f"--name {name!r}: a cluster's name has letters, digits, - and _, at most 63 in all, "
            "and begins with a letter or digit"
        )


def racks_named(racks: int, nodes: int) -> int:
    if racks > nodes:
        raise ConfigRejected(f"--racks {racks}: there are {nodes} nodes; give at most as many")
    return racks


def _log_level(text: str) -> str:
    if text not in LOG_LEVELS:
        raise ConfigRejected(f"--log-level {text!r}: choose one of {', '.join(LOG_LEVELS)}")
    return text


def _users(names: list[str]) -> tuple[str, ...]:
    for each in names:
        if not each.startswith((TENANT, f"{OPERATOR}-")) or not re.fullmatch(ID_PATTERN, each):
            raise Rejected(f"--user {each!r}: give {TENANT}TENANT, or {OPERATOR}-NAME")
    return tuple(dict.fromkeys(names))


async def keep(options: ClusterOptions, name: str, json: bool) -> None:
    """Run until a signal comes, or until a part of the cluster is gone for good: then raise its
    reason. Raises KeyboardInterrupt when a signal came before it was ready, or a second one."""
    assert options.log_dir is not None
    entry = LocalCluster(
        name=name,
        pid=os.getpid(),
        started_s=LiveClock().now_s(),
        address_file=str(address_file(name)),
        log_dir=str(options.log_dir),
        state_dir=str(options.state_dir.absolute()) if options.state_dir is not None else "",
    )
    stop = _Stop()
    try:
        with local_clusters.listed(entry) as listed:
            async with EmbeddedCluster(options) as cluster:
                stop.hurries = False
                _list_metrics(cluster, name)
                for user in options.users:
                    listed.let_in(user, cluster.supervisor.url_of(user))
                listed.reachable(cluster.url)
                _tell(listed, cluster.supervisor)
                announce(listed.entry, json)
                await _until_end(stop.asked, listed, cluster.supervisor)
                if stop.asked.is_set():
                    stop.hurries = True
                    listed.tell(state="ending")
                    await _say_what_ends(cluster.url)
                elif cluster.supervisor.failure is not None:
                    raise _failure(cluster.supervisor, cluster.supervisor.failure)
    except asyncio.CancelledError:
        if stop.asked.is_set():
            raise KeyboardInterrupt from None
        raise


class _Stop:
    """SIGINT, SIGTERM and SIGHUP (its terminal went) ask for the end; while the cluster starts or
    ends, they end it at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurries = True
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._heard)

    def _heard(self) -> None:
        self.asked.set()
        if self.hurries and self._task is not None:
            self._task.cancel()


async def _until_end(asked: asyncio.Event, listed: Listed, supervisor: Supervisor) -> None:
    """Wait until the end is asked for or a part is gone for good, and keep the entry up to date."""
    waits = [asyncio.ensure_future(e.wait()) for e in (asked, supervisor.failed)]
    try:
        while not any(wait.done() for wait in waits):
            _tell(listed, supervisor)
            await asyncio.wait(waits, timeout=TOLD_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _tell(listed: Listed, supervisor: Supervisor) -> None:
    services = tuple(
        ServiceStatus(
            name=unit.name, state=unit.state, pid=unit.pid, restarts=unit.restarts, text=unit.text
        )
        for unit in supervisor.status()
    )
    ready = all(service.state == "ready" for service in services)
    listed.tell(
        state="ready" if ready else "restarting",
        services=services,
        run_dir=str(supervisor.run_dir),
    )


async def _say_what_ends(url: str) -> None:
    try:
        jobs = await running_jobs(url)
    except SlackwaterError:
        return  # Its master is gone: no one can tell.
    if jobs:
        word = "job runs and fails" if len(jobs) == 1 else "jobs run and fail"
        err.print(f"{len(jobs)} {word} with the cluster: {', '.join(jobs)}", markup=False)


def _list_metrics(cluster: EmbeddedCluster, name: str) -> None:
    """Write where a Prometheus finds the services' metrics (its `file_sd_configs`)."""
    targets: list[dict[str, Any]] = [
        {
            "targets": [f"127.0.0.1:{fields['metrics_port']}"],
            "labels": {"cluster": name, "service": service, "id": id},
        }
        for stage in cluster.stages
        for service, id, fields in stage
        if fields.get("metrics_port", 0) > 0
    ]
    if targets:
        path = local_clusters.metrics_file(name)
        write_private(path, msgspec.json.encode(targets).decode() + "\n")


def _failure(supervisor: Supervisor, error: SlackwaterError) -> SlackwaterError:
    log = f"; its log: {supervisor.failed_log}" if supervisor.failed_log else ""
    return type(error)(f"the cluster ends: {error}{log}")
