"""A cluster whose nodes, and whose only aggregator, are emulated machines (namespaces.py)."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from interference import forward, lent
from namespaces import Machine

from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client, connect
from slackwater.common.shell.config import write_config

HOST = "host"
"""The machine of the aggregator."""


def _units(
    supervisor: Supervisor,
    hosts: dict[str, Machine],
    workers: Mapping[str, dict[str, Any]],
    one_core_each: bool,
) -> list[UnitSpec]:
    token = os.urandom(16).hex()
    wanted: list[tuple[str, str, dict[str, Any], str]] = [
        ("master", "m1", {"aggregators_max": 1}, ""),
        ("profiler", "p1", {}, ""),
        ("controller", "c1", {"retry_s": 60.0}, ""),
        ("aggregator", "a1", {"tcp_address": f"{hosts[HOST].address}:4700", "transport": "tcp",
                              "cluster_token": token, "cpu_share": 1.0, "node": HOST}, HOST),
    ]  # fmt: skip
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
        if one_core_each and at in workers:
            command = ("/usr/bin/taskset", "-c", str(list(workers).index(at)), *command)
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
    one_core_each: bool = False,
) -> AsyncIterator[Client]:
    """Start it, and yield a client once all nodes are there. `workers`: machine -> fields of its
    worker service; `one_core_each`: what runs on the nth of them has the nth core to itself."""
    supervisor = Supervisor(log_dir=logs)
    try:
        url = await supervisor.start_nats()
        forwarder = await forward(url)
        async with connect(url, "benchmark") as client:
            await supervisor.start_units(_units(supervisor, hosts, workers, one_core_each))
            for _ in range(100):
                if len(await client.nodes()) == len(workers):
                    break
                await asyncio.sleep(0.1)
            yield client
        forwarder.close()
        await forwarder.wait_closed()
    finally:
        await supervisor.stop()
