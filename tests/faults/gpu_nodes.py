"""A cluster of real processes whose worker services pose as machines with fake GPUs, and what runs
there, by the files of its ranks: for tests that kill parts of it."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from slackwater.common.base import limits
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.base import RUN_ATTEMPTS, NodeId
from slackwater.schemas.hangs import Hang
from slackwater.schemas.jobs import JobRecord
from slackwater.services.worker.processes import RankFiles


class Running(NamedTuple):
    """A rank's process that lives."""

    node: str
    rank: int
    attempt: int
    """The job's."""
    pid: int


class GpuNodes:
    """Nodes w1, w2, ... with GPUs, and a client of their master."""

    def __init__(self, cluster: EmbeddedCluster, client: Client) -> None:
        self.cluster, self.client = cluster, client
        self.names = [f"w{n}" for n in range(1, cluster.options.nodes + 1)]

    def state_dir(self, node: str) -> Path:
        return Path(self.cluster.supervisor.state_dir) / f"worker-{node}"

    def signal(self, node: str, signum: int) -> None:
        """Signal the node's worker service, if it is there at this moment."""
        self.cluster.supervisor.kill(f"worker-{node}", signum)

    def resume(self) -> None:
        for node in self.names:
            self.signal(node, signal.SIGCONT)

    def running(self, job: str) -> list[Running]:
        """List the job's processes on all nodes, as their files tell."""
        found = []
        for node in self.names:
            for path in (self.state_dir(node) / "jobs" / job).glob("rank*.process"):
                rank, number = _named(path.name)
                files = RankFiles(self.state_dir(node), job, rank, number)
                identity = files.identity()
                if identity is not None and identity.alive():
                    found.append(Running(node, rank, number // RUN_ATTEMPTS, identity.pid))
        return found

    async def used(self, job: JobRecord) -> set[NodeId]:
        """Name the nodes whose GPUs the master keeps for the job, or for what is left of it."""
        return {
            info.heartbeat.node
            for info in await self.client.nodes()
            if set(info.gpus_used) & set(job.gpu_ids.get(info.heartbeat.node, ()))
        }


async def hang_of(nodes: GpuNodes, id: str, within_s: float) -> Hang | None:
    """Return what the master says of a hang of the job; None: nothing in this time."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if (info := await nodes.client.job_info(id)).hang is not None:
            return info.hang
        assert info.job.state not in ("failed", "completed"), info.job.reason
        await asyncio.sleep(0.2)
    return None


def _named(name: str) -> tuple[int, int]:
    """Return rank and process number of a file `rank<k>.process` or `rank<k>.<n>.process`."""
    rank, _, rest = name.removeprefix("rank").partition(".")
    number = rest.removesuffix("process").rstrip(".")
    return int(rank), int(number or 0)


@asynccontextmanager
async def gpu_nodes(nodes: int, gpus: int, **options: Any) -> AsyncIterator[GpuNodes]:
    made = ClusterOptions(
        controllers=1, aggregators=1, nodes=nodes, gpus_per_node=gpus, restarts_max=10_000,
        restart_wait_s_max=0.05, **options,
    )  # fmt: skip
    async with EmbeddedCluster(made) as cluster, connect(cluster.url, "test") as client:
        patient = Client(
            client.bus, client.clock, budget_s=limits.RETRY_BUDGET_S, objects=client.objects
        )
        each = GpuNodes(cluster, patient)
        try:
            yield each
        finally:
            each.resume()
