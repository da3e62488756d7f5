"""A cluster whose nodes, and the machine of its aggregators, are emulated (namespaces.py)."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from interference import forward, lent
from namespaces import Machine

from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client, connect
from slackwater.common.shell.config import write_config

HOST = "host"
"""The machine of the aggregators."""


class Cores:
    """Gives what runs on a machine a part of this machine's cores, by a cgroup (of version 1)."""

    _CONTROLLERS = ("cpu", "cpuacct")
    _PERIOD_US = 10_000

    def __init__(self, name: str, cores: float) -> None:
        """Raises RuntimeError."""
        self.cores = cores
        self._folders = [
            Path("/sys/fs/cgroup", each, f"slackwater-{os.getpid()}-{name}")
            for each in self._CONTROLLERS
        ]
        for folder in self._folders:
            if not (folder.parent / "cgroup.procs").exists():
                raise RuntimeError(f"{folder.parent}: cgroups of version 1 are needed")
            folder.mkdir()
        (self._folders[0] / "cpu.cfs_period_us").write_text(str(self._PERIOD_US))
        (self._folders[0] / "cpu.cfs_quota_us").write_text(str(round(cores * self._PERIOD_US)))

    def command(self, *inner: str) -> tuple[str, ...]:
        """The command, run there."""
        enters = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in self._folders)
        return ("/bin/sh", "-c", f'{enters}exec "$@"', "sh", *inner)

    @property
    def used_s(self) -> float:
        """Return the processor seconds that were used."""
        return int((self._folders[1] / "cpuacct.usage").read_text()) / 1e9

    def remove(self) -> None:
        for folder in self._folders:
            with contextlib.suppress(OSError):  # A process that ends late keeps it.
                folder.rmdir()


def _units(
    supervisor: Supervisor,
    hosts: dict[str, Machine],
    workers: Mapping[str, dict[str, Any]],
    cores: Mapping[str, Cores],
    aggregators: int,
) -> list[UnitSpec]:
    token = os.urandom(16).hex()
    wanted: list[tuple[str, str, dict[str, Any], str]] = [
        ("master", "m1", {"aggregators_max": aggregators}, ""),
        ("profiler", "p1", {}, ""),
        ("controller", "c1", {}, ""),
    ]  # fmt: skip
    for number in range(aggregators):
        fields = {
            "tcp_address": f"{hosts[HOST].address}:{4700 + number}", "transport": "tcp",
            "cluster_token": token, "cpu_share": 1.0, "node": HOST,
        }  # fmt: skip
        wanted.append(("aggregator", f"a{number + 1}", fields, HOST))
    for name, own in workers.items():
        fields = {
            "node": name, "address": hosts[name].address, "gpus": 0, "warm": "off",
            "traffic": "off", "network_interface": "nic", "environment": ("GLOO_SOCKET_IFNAME",),
        }  # fmt: skip
        wanted.append(("worker", name, fields | own, name))
    specs = []
    for service, id, fields, at in wanted:
        state_dir = supervisor.state_dir / f"{service}-{id}"
        state_dir.mkdir(parents=True)
        config = supervisor.run_dir / f"{service}-{id}.toml"
        url = lent(supervisor.url) if at else supervisor.url
        write_config(config, {"id": id, "url": url, "state_dir": str(state_dir)} | fields)
        command: tuple[str, ...] = (
            sys.executable, "-m", f"slackwater.services.{service}", "--config", str(config),
        )  # fmt: skip
        if at in cores:
            command = cores[at].command(*command)
        if at:
            command = hosts[at].command(*command)
        environment = blas_threads.one_each(os.environ) | {"GLOO_SOCKET_IFNAME": "nic"}
        specs.append(UnitSpec(name=f"{service}-{id}", command=command, environment=environment))
    return specs


@contextlib.asynccontextmanager
async def cluster(
    hosts: dict[str, Machine],
    workers: Mapping[str, dict[str, Any]],
    logs: Path | None = None,
    cores: Mapping[str, Cores] = MappingProxyType({}),
    aggregators: int = 1,
) -> AsyncIterator[Client]:
    """Start it, and yield a client once all nodes are there. `workers`: machine -> fields of its
    worker service; `cores`: of those that have not all of this machine's; `aggregators`: with
    fewer than jobs, one waits until another has been profiled."""
    supervisor = Supervisor(log_dir=logs)
    try:
        url = await supervisor.start_nats()
        forwarder = await forward(url)
        async with connect(url, "benchmark") as client:
            await supervisor.start_units(_units(supervisor, hosts, workers, cores, aggregators))
            for _ in range(100):
                if len(await client.nodes()) == len(workers):
                    break
                await asyncio.sleep(0.1)
            yield client
        forwarder.close()
        await forwarder.wait_closed()
    finally:
        await supervisor.stop()
