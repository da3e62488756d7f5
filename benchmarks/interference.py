"""A job with a congested aggregator, with and without mitigation (AutoPS, appendix D).

Every machine is a network namespace of its own on one bridge: two for aggregators, one for each of
two workers, one for whoever takes the background flows. Each sends through a shaped link (`tc
htb`): its NIC. Nobody sees the host's network, and all of it ends with this program. The paper's
setting: a job "2s-2w" that emulates AlexNet, background flows of 1 MB messages that leave the
machine of the most loaded aggregator, no aggregator to spare.

Two jobs of one kind take turns, a few iterations each: one under `static`, whose tensors stay where
they are, one under `cyclic`, whose controller finds the congested link from transfer times and
moves what is there to the other aggregator. For every number of flows the second begins anew.

The link gives every flow an equal part, as a NIC its queue pairs: the job has one to each worker,
so that n background flows leave it 2 / (2 + n). Each of them is one connection, which always has
more to send.

    python benchmarks/interference.py [--flows 2 4 8 16 32] [--rate-mbit 200]
        [--bytes-scale 0.015] [--json FILE] [--logs FOLDER]
"""

import argparse
import asyncio
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregation import Member
from figures import Figure, Row, favour, show, spread, write_json
from namespaces import BACKGROUND_PORT, HUB, Machine, in_a_namespace, machines

from slackwater.agent import Agent
from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.base import Delivery
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client, connect
from slackwater.common.shell.config import write_config
from slackwater.loadgen.emulate import Emulation, iterate
from slackwater.loadgen.replay.workload import COMPUTE_S
from slackwater.schemas import subjects
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import Located, LocateJob, MigrationEvent

MODEL = "alexnet"
STATIC = "static"
WORKERS = 2
SERVERS = 2
WINDOW = 3
"""Iterations of a monitor window; 100 outside benchmarks."""
MESSAGE_BYTES = 1_000_000
WAKE_BYTES = 32_768
GOAL = 5.6
"""The least that the paper reports at 32 flows; its most is 14.3."""
BUS_PORT = 4222


# The bus ------------------------------------------------------------------------------------------


async def forward(url: str) -> asyncio.Server:
    """The embedded bus listens on loopback only: lend it the hub's address."""
    host, port = url.rpartition("/")[2].rpartition("@")[2].split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65_536):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass  # One end is gone: the other learns it now.
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    return await asyncio.start_server(accept, HUB, BUS_PORT)


def lent(url: str) -> str:
    """Return the bus's address as machines reach it, with the token where it asks for one."""
    token, at, _ = url.rpartition("/")[2].rpartition("@")
    return f"nats://{token}{at}{HUB}:{BUS_PORT}"


# Background flows ---------------------------------------------------------------------------------


def sink() -> None:
    """Takes whatever comes, until its standard input ends."""
    into = bytearray(1 << 18)
    with (
        selectors.DefaultSelector() as ready,
        socket.create_server(("", BACKGROUND_PORT)) as listener,
    ):
        ready.register(listener, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    return
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is listener:
                    connection = listener.accept()[0]
                    # Not woken for every packet: what it costs is taken from the job's machine.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE_BYTES)
                    ready.register(connection, selectors.EVENT_READ)
                elif not _received(key.fileobj, into):
                    ready.unregister(key.fileobj)
                    key.fileobj.close()


def _received(connection: socket.socket, into: bytearray) -> bool:
    try:
        return connection.recv_into(into) > 0
    except ConnectionError:
        return False


def flood(address: str, connections: int) -> None:
    """Sends messages of 1 MB on all connections, as fast as they are taken."""
    message = memoryview(bytes(MESSAGE_BYTES))
    sent: dict[int, int] = {}
    with selectors.DefaultSelector() as ready:
        for _ in range(connections):
            connection = socket.create_connection((address, BACKGROUND_PORT))
            connection.setblocking(False)
            ready.register(connection, selectors.EVENT_WRITE)
            sent[connection.fileno()] = 0
        ready.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    return
                assert isinstance(key.fileobj, socket.socket)
                done = sent[key.fd]
                sent[key.fd] = (done + key.fileobj.send(message[done:])) % MESSAGE_BYTES


# Workers ------------------------------------------------------------------------------------------


def worker(url: str, rank: int, bytes_scale: float) -> None:
    """`open JOB`, `go JOB ITERATIONS` (answers the seconds of one), `close JOB`."""
    emulation = Emulation(MODEL, bytes_scale)
    shapes = {spec.name: spec.shape for spec in emulation.tensors}
    agents: dict[str, Agent] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        verb, job, *rest = line.split()
        if verb == "open":
            if job == STATIC:  # It was submitted, with its policy: what the program says is not it.
                os.environ |= {"SLACKWATER_JOB": job, "SLACKWATER_RESULT": os.devnull}
            else:
                os.environ.pop("SLACKWATER_RESULT", None)
            agents[job] = Agent(
                url=url, job=job, rank=rank, workers=WORKERS, servers=SERVERS, tensors=shapes,
                transport="tcp", fractional_share=True,
            )  # fmt: skip
            print("opened", flush=True)
        elif verb == "go":
            count = int(rest[0])
            begun_s = time.perf_counter()
            for _ in range(count):
                iterate(emulation, agents[job], COMPUTE_S[MODEL], lambda tensor, buffer: None)
            agents[job].wait()  # The last one's pushes and pulls are part of it.
            print(f"{(time.perf_counter() - begun_s) / count:.6f}", flush=True)
        else:
            agents.pop(job).close()
            print("closed", flush=True)


@dataclass
class Stack:
    """The cluster and its workers."""

    supervisor: Supervisor
    client: Client
    hosts: dict[str, Machine]
    workers: list[Member]
    rate_mbit: int
    floods: list[Member] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)

    async def told(self, line: str) -> list[str]:
        """Return the workers' answers to `line`."""
        for member in self.workers:
            member.tell(line)
        return list(await asyncio.gather(*(asyncio.to_thread(m.hear) for m in self.workers)))

    async def go(self, job: str, iterations: int) -> float:
        """Seconds of one of these iterations: the slower worker's."""
        return max(map(float, await self.told(f"go {job} {iterations}")))

    async def homes(self, job: str) -> dict[str, int]:
        """Aggregator -> elements of the job on it."""
        subject = subjects.command("controller", "c1", "locate")
        located = await self.client.ask(subject, LocateJob(job=job), Located)
        found: dict[str, int] = {}
        for place, bucket in zip(located.places, located.buckets, strict=True):
            found[place.aggregator] = found.get(place.aggregator, 0) + bucket.elements
        return found

    def said(self, job: str, fact: str) -> list[JobEvent]:
        return [f for f in self.facts if isinstance(f, JobEvent) and (f.job, f.fact) == (job, fact)]

    def congest(self, host: str, flows: int) -> None:
        self.hosts[host].share(self.rate_mbit, WORKERS, flows)
        me = (sys.executable, __file__, "--flood", self.hosts["sink"].address, str(flows))
        self.floods.append(Member(self.hosts[host].command(*me)))
        assert self.floods[-1].hear() == "ready"

    def calm(self, host: str = "") -> None:
        while self.floods:
            self.floods.pop().end()
        if host:
            self.hosts[host].share(self.rate_mbit, 1, 0)


# The run ------------------------------------------------------------------------------------------


def units(supervisor: Supervisor, hosts: dict[str, Machine]) -> list[UnitSpec]:
    """Return two aggregators on each of two machines: a1 and a3 on one, a2 and a4 on the other."""
    token = os.urandom(16).hex()
    inside = lent(supervisor.url)
    wanted: list[tuple[str, str, dict[str, Any], Machine | None]] = [
        ("master", "m1", {"aggregators_max": 2 * SERVERS}, None),
        ("profiler", "p1", {"warm_up_iterations": 1, "profile_iterations": 5,
                            "window_iterations": WINDOW}, None),
        ("controller", "c1", {"retry_s": 60.0}, None),
    ]  # fmt: skip
    for number in range(2 * SERVERS):
        host = hosts[f"host{number % 2 + 1}"]
        fields = {
            "transport": "tcp", "tcp_address": f"{host.address}:{4700 + number}", "url": inside,
            "cluster_token": token, "cpu_share": 0.25, "telemetry_s": 1.0,
        }  # fmt: skip
        wanted.append(("aggregator", f"a{number + 1}", fields, host))
    specs = []
    for service, id, fields, where in wanted:
        state_dir = supervisor.state_dir / f"{service}-{id}"
        state_dir.mkdir(parents=True)
        config = supervisor.run_dir / f"{service}-{id}.toml"
        write_config(config, {"id": id, "url": supervisor.url, "state_dir": state_dir} | fields)
        module = f"slackwater.services.{service}"
        command = (sys.executable, "-m", module, "--config", str(config))
        specs.append(
            UnitSpec(
                name=f"{service}-{id}",
                command=where.command(*command) if where is not None else command,
                environment=blas_threads.one_each(os.environ),
            )
        )
    return specs


async def train_until(stack: Stack, job: str, fact: str, within: int) -> None:
    """Iterate until the controller has said so of the job, `within` iterations at most."""
    for _ in range(within):
        if stack.said(job, fact):
            return
        await stack.go(job, 1)
        await asyncio.sleep(0.05)
    raise RuntimeError(f"job {job} was not {fact!r} within {within} iterations")


async def begin(stack: Stack, job: str) -> None:
    await stack.told(f"open {job}")
    await train_until(stack, job, "steady", 60)


async def until_free(stack: Stack, wanted: int) -> None:
    """The pool has so many free aggregators again."""
    async with asyncio.timeout(60.0):
        while True:
            infos = await stack.client.aggregators()
            if sum(info.alive and info.record.cluster is None for info in infos) == wanted:
                return
            await asyncio.sleep(0.1)


@dataclass
class Outcome:
    alone_s: float
    congested_s: list[float]
    mitigated_s: list[float]
    found_s: float
    """From the first flow to the end of the migration."""
    moved: bool


async def compare(stack: Stack, number: int, flows: int) -> Outcome:
    """One number of flows: both jobs take turns."""
    job = f"mitigated-{number}"
    await begin(stack, job)
    alone = [await stack.go(each, 4) for each in (STATIC, job, STATIC, job)]
    loads, other = await stack.homes(job), await stack.homes(STATIC)
    busiest = max(loads, key=lambda id: (loads[id], id))
    same = max(other, key=lambda id: (other[id], id))
    host = f"host{(int(busiest[1:]) - 1) % 2 + 1}"
    if f"host{(int(same[1:]) - 1) % 2 + 1}" != host:
        raise RuntimeError(f"the jobs differ: {loads} and {other}")
    begun_s = time.monotonic()
    stack.congest(host, flows)
    for _ in range(12 * WINDOW):
        if any(isinstance(f, MigrationEvent) and f.job == job and f.cause == "interfered"
               and f.fact == "finished" for f in stack.facts):  # fmt: skip
            break
        await stack.go(job, 1)
    found_s = time.monotonic() - begun_s
    moved = set(await stack.homes(job)) != set(loads)
    congested, mitigated = [], []
    for _ in range(2):
        congested.append(await stack.go(STATIC, 2))
        mitigated += [await stack.go(job, 3) for _ in range(2)]
    stack.calm(host)
    await stack.told(f"close {job}")
    # It leaves a congested link alone for five minutes. A new one begins without what was known.
    stack.supervisor.kill("controller-c1", 9)
    await stack.supervisor.until_ready("controller-c1")
    await until_free(stack, SERVERS)
    return Outcome(statistics.median(alone), congested, mitigated, found_s, moved)


async def run(options: argparse.Namespace, hosts: dict[str, Machine]) -> list[Row]:
    supervisor = Supervisor(log_dir=options.logs)
    members: list[Member] = []
    rows: list[Row] = []
    try:
        url = await supervisor.start_nats()
        forwarder = await forward(url)
        async with connect(url, "benchmark") as client:
            stack = Stack(supervisor, client, hosts, members, options.rate_mbit)
            await watch(stack)
            await supervisor.start_units(units(supervisor, hosts))
            me = (sys.executable, __file__)
            sinking = Member(hosts["sink"].command(*me, "--sink"))
            for rank in range(WORKERS):
                where = (lent(url), str(rank), str(options.bytes_scale))
                command = hosts[f"worker{rank}"].command(*me, "--worker", *where)
                members.append(Member(command))
            try:
                await asyncio.gather(*(asyncio.to_thread(m.hear) for m in (sinking, *members)))
                spec = JobSpec(
                    id=STATIC, workers=WORKERS, servers=SERVERS, aggregation="static",
                    fractional_share=True,
                )  # fmt: skip
                await client.submit(spec)
                await begin(stack, STATIC)
                await asyncio.to_thread(favour)
                for number, flows in enumerate(options.flows):
                    outcome = await compare(stack, number, flows)
                    rows.append(figure(flows, outcome))
                    report(flows, outcome)
            finally:
                stack.calm()
                for member in (sinking, *members):
                    await asyncio.to_thread(member.end)
        forwarder.close()
    finally:
        await supervisor.stop()
    return rows


async def watch(stack: Stack) -> None:
    async def take(delivery: Delivery) -> None:
        try:
            stack.facts.append(codec.decode(delivery.payload, JobEvent | MigrationEvent))
        except Rejected:
            return  # A fact of another type.

    await stack.client.bus.subscribe("sw.v1.evt.>", take)


def figure(flows: int, outcome: Outcome) -> Figure:
    return Figure(
        f"{flows} flows, iterations per second",
        1.0 / statistics.median(outcome.mitigated_s),
        1.0 / statistics.median(outcome.congested_s),
        "1/s",
        "without mitigation",
        GOAL if flows >= 32 else None,
        spread=spread(outcome.mitigated_s),
    )


def report(flows: int, outcome: Outcome) -> None:
    congested_s = statistics.median(outcome.congested_s)
    mitigated_s = statistics.median(outcome.mitigated_s)
    print(
        f"{flows:2d} flows: alone {outcome.alone_s:.3f} s, congested {congested_s:.3f} s "
        f"({outcome.alone_s / congested_s:.0%} of its speed), mitigated {mitigated_s:.3f} s "
        f"({outcome.alone_s / mitigated_s:.0%}), ratio {congested_s / mitigated_s:.2f}, "
        f"{'moved' if outcome.moved else 'stayed'} {outcome.found_s:.1f} s after the flows began",
        flush=True,
    )


def inside(options: argparse.Namespace) -> None:
    with ExitStack() as held:
        held.enter_context(tempfile.TemporaryDirectory())
        hosts = held.enter_context(
            machines(options.rate_mbit, "host1", "host2", "worker0", "worker1", "sink")
        )
        rows = asyncio.run(run(options, hosts))
    show(f"AlexNet 2s-2w, links of {options.rate_mbit} Mbit/s, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/interference.py", rows)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--sink"]:
        sink()
        return 0
    if arguments[:1] == ["--flood"]:
        flood(arguments[1], int(arguments[2]))
        return 0
    if arguments[:1] == ["--worker"]:
        worker(arguments[1], int(arguments[2]), float(arguments[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flows", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--rate-mbit", type=int, default=200)
    parser.add_argument("--bytes-scale", type=float, default=0.015)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="where the services' logs are kept")
    options = parser.parse_args(arguments)
    return in_a_namespace(arguments, lambda: inside(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
