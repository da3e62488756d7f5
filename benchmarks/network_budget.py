"""One budget of a link for gradients and copies: with it, and as if links were without end.

Every machine is a network namespace of its own on one bridge: two for aggregators, one for each
job's worker. Each sends through a shaped link. Four jobs emulate AlexNet, each of which fills a
third of a link and little of a processor. By their processor time alone all fit on one aggregator;
its link is then asked for more than it carries, and only the loss tells. With the budget known
(`network_bytes_s`) controllers deal them over both machines.

Then a job trains beside another's tensors, which leave the same machine (`drain`): within
`migration_bytes_s` alone, which is more than the link has, and within what the budget leaves.

Both clusters run twice, in turns; what is shown are medians.

    python benchmarks/network_budget.py [--rate-mbit 160] [--rounds 2] [--json FILE]
        [--logs FOLDER]
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregation import Member
from figures import Figure, Row, show, spread, write_json
from interference import forward, lent
from namespaces import Machine, in_a_namespace, machines

from slackwater.agent import Agent
from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.base import Delivery
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client, connect
from slackwater.common.shell.config import write_config
from slackwater.loadgen.emulate import Emulation, iterate
from slackwater.schemas import subjects
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import Located, LocateJob, MigrationEvent

MODEL = "alexnet"
COMPUTE_S = 1.0
JOBS = 4
BYTES_SCALE = 0.022
ITERATIONS = 8
COPIED_BYTES = 48_000_000
"""Parameters of the job whose tensors leave."""
DRAIN_S = 90.0
UNKNOWN = 0
"""Such a network_bytes_s: the interface says 10 Gbit/s, which no shaped link carries."""


# Workers ------------------------------------------------------------------------------------------


def worker(url: str, job: str, elements: int) -> None:
    """`open`, `go ITERATIONS` (answers the seconds of one). `elements`: 0: AlexNet; else it has one
    tensor of so many, and computes for a second."""
    emulation = Emulation(MODEL, BYTES_SCALE)
    shapes = {"all": (elements,)} if elements else {t.name: t.shape for t in emulation.tensors}
    agent: Agent | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("open"):
            agent = Agent(
                url=url, job=job, rank=0, workers=1, servers=1, tensors=shapes, transport="tcp",
                fractional_share=True,
            )  # fmt: skip
            print("opened", flush=True)
            continue
        assert agent is not None
        count = int(line.split()[1])
        begun_s = time.perf_counter()
        for _ in range(count):
            if elements:
                time.sleep(COMPUTE_S)
                agent.gradient_buffer("all")
                agent.push("all")
                agent.wait()
            else:
                iterate(emulation, agent, COMPUTE_S, lambda tensor, buffer: None)
        agent.wait()
        print(f"{(time.perf_counter() - begun_s) / count:.6f}", flush=True)
    if agent is not None:
        agent.close()


@dataclass
class Outcome:
    """One cluster's life."""

    alone_s: float = 0.0
    together_s: list[float] = field(default_factory=list)
    machines: dict[str, int] = field(default_factory=dict)
    """Machine -> jobs on its aggregators."""
    beside_s: list[float] = field(default_factory=list)
    """An iteration beside a copy."""
    before_s: float = 0.0
    copied_s: float = 0.0


class Stack:
    """A cluster and its workers."""

    program = __file__
    """Plays a worker."""

    def __init__(self, supervisor: Supervisor, client: Client, hosts: dict[str, Machine]) -> None:
        self.supervisor, self.client, self.hosts = supervisor, client, hosts
        self.members: dict[str, Member] = {}
        self.facts: list[JobEvent | MigrationEvent] = []

    async def watch(self) -> None:
        async def take(delivery: Delivery) -> None:
            with contextlib.suppress(Rejected):  # A fact of another type.
                self.facts.append(codec.decode(delivery.payload, JobEvent | MigrationEvent))

        await self.client.bus.subscribe("sw.v1.evt.>", take)

    def said(self, job: str, fact: str) -> bool:
        return any((each.job, each.fact) == (job, fact) for each in self.facts)

    async def begin(self, job: str, where: str, elements: int = 0) -> None:
        """Start its program on that machine, and train until the job is settled."""
        command = (sys.executable, self.program, "--worker", lent(self.supervisor.url), job)
        member = Member(self.hosts[where].command(*command, str(elements)))
        self.members[job] = member
        await asyncio.to_thread(member.hear)
        member.tell("open")
        await asyncio.to_thread(member.hear)
        for _ in range(60):
            if self.said(job, "steady"):
                return
            await self.go(1, job)
        raise RuntimeError(f"job {job} was not settled within 60 iterations")

    async def go(self, iterations: int, *jobs: str) -> list[float]:
        """Seconds of one iteration of each, all at the same time."""
        for job in jobs:
            self.members[job].tell(f"go {iterations}")
        answers = (asyncio.to_thread(self.members[job].hear) for job in jobs)
        return [float(each) for each in await asyncio.gather(*answers)]

    async def homes(self, job: str) -> set[str]:
        """Name the aggregators of the job."""
        subject = subjects.command("controller", "c1", "locate")
        located = await self.client.ask(subject, LocateJob(job=job), Located)
        return {place.aggregator for place in located.places}

    async def end(self) -> None:
        for member in self.members.values():
            await asyncio.to_thread(member.end)


# The cluster --------------------------------------------------------------------------------------


def units(
    supervisor: Supervisor, hosts: dict[str, Machine], where: dict[str, tuple[str, int]],
    network_bytes_s: int, divide_bytes: int = 0,
) -> list[UnitSpec]:  # fmt: skip
    """Return the services. `where`: aggregator -> (its machine, bytes that it may hold)."""
    token = os.urandom(16).hex()
    wanted: list[tuple[str, str, dict[str, Any], Machine | None]] = [
        ("master", "m1", {"aggregators_max": len(where)}, None),
        ("profiler", "p1", {"warm_up_iterations": 1, "profile_iterations": 5, "profile_s": 1.0,
                            "window_iterations": 8}, None),
        ("controller", "c1", {"retry_s": 60.0, "policy": "cyclic", "divide_bytes": divide_bytes},
         None),
    ]  # fmt: skip
    for number, (id, (host, memory_bytes)) in enumerate(where.items()):
        machine = hosts[host]
        fields = {
            "tcp_address": f"{machine.address}:{4700 + number}", "url": lent(supervisor.url),
            "transport": "tcp", "cluster_token": token, "cpu_share": 1.0, "telemetry_s": 1.0,
            "node": host, "memory_bytes_max": memory_bytes, "network_bytes_s": network_bytes_s,
        }  # fmt: skip
        wanted.append(("aggregator", id, fields, machine))
    specs = []
    for service, id, fields, at in wanted:
        state_dir = supervisor.state_dir / f"{service}-{id}"
        state_dir.mkdir(parents=True)
        config = supervisor.run_dir / f"{service}-{id}.toml"
        write_config(config, {"id": id, "url": supervisor.url, "state_dir": state_dir} | fields)
        command = (sys.executable, "-m", f"slackwater.services.{service}", "--config", str(config))
        specs.append(
            UnitSpec(
                name=f"{service}-{id}",
                command=at.command(*command) if at is not None else command,
                environment=blas_threads.one_each(os.environ),
            )
        )
    return specs


@contextlib.asynccontextmanager
async def cluster(
    options: argparse.Namespace, hosts: dict[str, Machine], where: dict[str, tuple[str, int]],
    network_bytes_s: int, divide_bytes: int = 0,
) -> AsyncIterator[Stack]:  # fmt: skip
    supervisor = Supervisor(log_dir=options.logs)
    try:
        url = await supervisor.start_nats()
        forwarder = await forward(url)
        async with connect(url, "benchmark") as client:
            stack = Stack(supervisor, client, hosts)
            await stack.watch()
            services = units(supervisor, hosts, where, network_bytes_s, divide_bytes)
            await supervisor.start_units(services)
            try:
                yield stack
            finally:
                await stack.end()
        forwarder.close()
        await forwarder.wait_closed()
    finally:
        await supervisor.stop()


# The runs -----------------------------------------------------------------------------------------


async def packing(
    options: argparse.Namespace, hosts: dict[str, Machine], network_bytes_s: int
) -> Outcome:
    """Four jobs, one after another, and then all at once."""
    many = 8 * 2**30
    where = {f"a{n + 1}": (f"host{n // 2 + 1}", many) for n in range(4)}
    async with cluster(options, hosts, where, network_bytes_s) as stack:
        found = Outcome()
        jobs = [f"j{n}" for n in range(JOBS)]
        for n, job in enumerate(jobs):
            await stack.begin(job, f"worker{n}")
            if n == 0:
                [found.alone_s] = await stack.go(ITERATIONS, job)
        await stack.go(2, *jobs)
        found.together_s = await stack.go(ITERATIONS, *jobs)
        for job in jobs:
            for host in {where[id][0] for id in await stack.homes(job)}:
                found.machines[host] = found.machines.get(host, 0) + 1
        return found


async def copying(
    options: argparse.Namespace, hosts: dict[str, Machine], network_bytes_s: int
) -> Outcome:
    """A job trains on one machine, while another's tensors leave that machine. The first one's
    aggregator has no memory for them."""
    where = {
        "a1": ("host1", COPIED_BYTES), "a2": ("host1", 8 * 2**30), "a3": ("host2", 8 * 2**30),
    }  # fmt: skip
    async with cluster(options, hosts, where, network_bytes_s) as stack:
        found = Outcome()
        await stack.begin("small", "worker0")
        await stack.begin("large", "worker1", COPIED_BYTES // 4)
        homes = await stack.homes("small"), await stack.homes("large")
        if homes != ({"a1"}, {"a2"}):
            raise RuntimeError(f"the jobs are on {homes}, and not on a1 and a2")
        [found.before_s] = await stack.go(ITERATIONS, "small")
        begun_s = time.monotonic()
        draining = asyncio.create_task(_drain(stack))
        while not draining.done():
            found.beside_s += await stack.go(1, "small")
        await draining
        found.copied_s = time.monotonic() - begun_s
        return found


async def _drain(stack: Stack) -> None:
    request = f"d{os.getpid()}-{time.monotonic_ns()}"
    async with asyncio.timeout(DRAIN_S):
        while True:
            if not (await stack.client.drain("a2", request, DRAIN_S)).left:
                return
            await asyncio.sleep(0.2)


async def run(options: argparse.Namespace, hosts: dict[str, Machine]) -> list[Row]:
    budget = options.rate_mbit * 125_000
    known: list[Outcome] = []
    unknown: list[Outcome] = []
    paced: list[Outcome] = []
    unpaced: list[Outcome] = []
    for turn in range(options.rounds):
        for budget_bytes_s, packed, copied in (
            ((budget, known, paced), (UNKNOWN, unknown, unpaced))
            if turn % 2
            else ((UNKNOWN, unknown, unpaced), (budget, known, paced))
        ):
            packed.append(await packing(options, hosts, budget_bytes_s))
            copied.append(await copying(options, hosts, budget_bytes_s))
            report(budget_bytes_s, packed[-1], copied[-1])
    return [
        compared(
            "4 jobs of 31 % of a link each: the slowest one's iteration",
            "links unknown",
            [max(each.together_s) for each in known],
            [max(each.together_s) for each in unknown],
            min(each.alone_s for each in known),
        ),
        compared(
            "a job beside a copy from its machine: its slowest iteration",
            "migration_bytes_s alone",
            [max(each.beside_s) for each in paced],
            [max(each.beside_s) for each in unpaced],
            min(each.before_s for each in paced),
        ),
    ]


def compared(
    name: str, peer_name: str, ours: list[float], peer: list[float], floor_s: float
) -> Figure:
    """Return the figure of rounds that were run next to each other."""
    return Figure(
        name, statistics.median(ours), statistics.median(peer), "s", peer_name,
        lower_is_better=True, floor=floor_s, spread=spread(ours),
        ratios=tuple(a / b for a, b in zip(ours, peer, strict=True)),
    )  # fmt: skip


def report(budget_bytes_s: int, packed: Outcome, copied: Outcome) -> None:
    loss = 1.0 - packed.alone_s / max(packed.together_s)
    where = ", ".join(f"{count} on {host}" for host, count in sorted(packed.machines.items()))
    beside_s = max(copied.beside_s)
    print(
        f"{'budget known  ' if budget_bytes_s else 'budget unknown'}: alone "
        f"{packed.alone_s:.2f} s, together {max(packed.together_s):.2f} s (lost {loss:.0%}), "
        f"jobs: {where}; beside a copy {beside_s:.2f} s (before {copied.before_s:.2f} s), "
        f"copied in {copied.copied_s:.1f} s",
        flush=True,
    )


def inside(options: argparse.Namespace) -> None:
    names = ["host1", "host2", *(f"worker{n}" for n in range(JOBS))]
    with ExitStack() as held:
        hosts = held.enter_context(machines(options.rate_mbit, *names))
        rows = asyncio.run(run(options, hosts))
    show(f"links of {options.rate_mbit} Mbit/s, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/network_budget.py", rows)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--worker"]:
        worker(arguments[1], arguments[2], int(arguments[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate-mbit", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="where the services' logs are kept")
    options = parser.parse_args(arguments)
    return in_a_namespace(arguments, lambda: inside(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
