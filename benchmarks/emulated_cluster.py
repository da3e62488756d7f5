"""A cluster whose nodes, and the machine of its aggregators, are emulated (namespaces.py)."""

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
"""The machine of the aggregators."""
NODE = "EMULATED_NODE"
"""Names the machine in the environment of what runs there."""


def _units(
    supervisor: Supervisor,
    hosts: dict[str, Machine],
    workers: Mapping[str, dict[str, Any]],
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
            "traffic": "off", "network_interface": "nic",
            "environment": ("GLOO_SOCKET_IFNAME", NODE),
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
        if at:
            command = hosts[at].command(*command)
        environment = blas_threads.one_each(os.environ) | {
            "GLOO_SOCKET_IFNAME": "nic",
            NODE: at,
        }
        specs.append(UnitSpec(name=f"{service}-{id}", command=command, environment=environment))
    return specs


@contextlib.asynccontextmanager
async def cluster(
    hosts: dict[str, Machine],
    workers: Mapping[str, dict[str, Any]],
    logs: Path | None = None,
    aggregators: int = 1,
) -> AsyncIterator[Client]:
    """Start it, and yield a client once all nodes are there. `workers`: machine -> fields of its
    worker service; `aggregators`: with fewer than jobs, one waits until another has been
    profiled."""
    supervisor = Supervisor(log_dir=logs)
    try:
        url = await supervisor.start_nats()
        forwarder = await forward(url)
        async with connect(url, "benchmark") as client:
            await supervisor.start_units(_units(supervisor, hosts, workers, aggregators))
            for _ in range(100):
                if len(await client.nodes()) == len(workers):
                    break
                await asyncio.sleep(0.1)
            yield client
        forwarder.close()
        await forwarder.wait_closed()
    finally:
        await supervisor.stop()
