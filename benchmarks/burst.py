"""A burst of job arrivals: 1,000 submissions at once, each made durable before it is acknowledged.

A real nats-server (`sync_interval: always`) and a real master on loopback; a few client connections
submit all jobs at once, with `common.client`, which asks again when it is told to. The peer puts as
many of the same records, as concurrently, straight into a key-value bucket of the same server. In
the end the master is killed (SIGKILL) and started anew: every job must be there, and once.

Goal (the paper: "can be easily overwhelmed by a burst of job arrivals"): all acknowledged within
3 s, none lost, none twice, and no queue over its bound. By kinds of jobs: `by-hand` wait for their
users, `waiting` ones for two slots of a worker node, `too-large` ones for a node larger than any.

    python benchmarks/burst.py [--jobs 1000] [--rounds 3] [--clients 4] [--profile FILE]
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import nats
import uvloop
from figures import Figure, show
from nats.js.kv import KeyValue
from rich.console import Console
from rich.table import Table

from slackwater.common.base import codec, limits
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.client import Client, connect
from slackwater.schemas import subjects
from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.job_requests import JobList, ListJobs
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.service import GetStats, Stats

GOAL_S = 3.0
PROGRAM = ("python", "-m", "train", "--model", "vgg19")
WORKERS = {"by-hand": 1, "waiting": 1, "too-large": 8}
SLOTS = 2
PEEK_S = 0.02


@dataclass(frozen=True)
class Burst:
    """Figures of one burst: seconds to the last acknowledgement, to the median one, how often
    somebody was told to come again, and the most that was seen in the master's queues at once."""

    whole_s: float
    median_s: float
    told_to_retry: int
    steps_waiting: int
    unanswered: int


def spec_of(kind: str, name: str) -> JobSpec:
    program = () if kind == "by-hand" else PROGRAM
    return JobSpec(id=name, model="vgg19", program=program, workers=WORKERS[kind])


def master(verb: str) -> str:
    return subjects.command("master", subjects.MASTER, verb)


async def announce_node(client: Client) -> None:
    """A worker node that never answers: arrivals are what is measured, not processes."""
    subject = subjects.telemetry("worker", "w0", "heartbeat")
    heartbeat = WorkerHeartbeat(
        service="worker", id="w0", incarnation=1, at_s=0.0, node=NodeId("w0"), slots=SLOTS
    )
    await client.bus.publish(subject, codec.encode(heartbeat))


async def told_to_retry(client: Client) -> int:
    """Submissions that were turned away so far."""
    answer = await client.bus.request("$SRV.STATS.master", b"", timeout_s=limits.REQUEST_TIMEOUT_S)
    endpoints = msgspec.json.decode(answer)["endpoints"]
    return int(next(each["num_errors"] for each in endpoints if each["name"] == "submit"))


async def arrive(clients: list[Client], watcher: Client, specs: list[JobSpec]) -> Burst:
    """All `specs` at once, shared out among the clients' connections."""
    took_s: list[float] = []
    deepest = {"steps_waiting": 0, "requests_unanswered": 0}

    async def submit(number: int) -> None:
        begin_s = time.perf_counter()
        await clients[number % len(clients)].submit(specs[number])
        took_s.append(time.perf_counter() - begin_s)

    async def watch() -> None:
        while len(took_s) < len(specs):
            stats = await watcher.ask(master("stats"), GetStats(), Stats)
            for gauge, most in deepest.items():
                deepest[gauge] = max(most, int(stats.gauges[gauge]))
            await asyncio.sleep(PEEK_S)

    refused = await told_to_retry(watcher)
    watching = asyncio.create_task(watch())  # Ends by itself.
    begin_s = time.perf_counter()
    await asyncio.gather(*(submit(number) for number in range(len(specs))))
    whole_s = time.perf_counter() - begin_s
    await watching
    return Burst(
        whole_s=whole_s,
        median_s=statistics.median(took_s),
        told_to_retry=await told_to_retry(watcher) - refused,
        steps_waiting=deepest["steps_waiting"],
        unanswered=deepest["requests_unanswered"],
    )


async def put(buckets: list[KeyValue], specs: list[JobSpec]) -> float:
    """Seconds that as many bare puts take, all at once."""
    records = [codec.encode_record(JobRecord(spec=spec), epoch=1) for spec in specs]
    begin_s = time.perf_counter()
    await asyncio.gather(
        *(
            buckets[number % len(buckets)].put(spec.id, record)
            for number, (spec, record) in enumerate(zip(specs, records, strict=True))
        )
    )
    return time.perf_counter() - begin_s


def patient(client: Client) -> Client:
    """A busy machine starts a master in seconds."""
    return Client(client.bus, client.clock, limits.START_S)


async def known(client: Client) -> list[str]:
    """The ids of all jobs that the master has."""
    found: list[str] = []
    while True:
        page = await client.ask(master("list"), ListJobs(offset=len(found)), JobList)
        found += [record.spec.id for record in page.jobs]
        if not page.jobs:
            return found


async def measure(
    url: str, options: argparse.Namespace
) -> tuple[dict[str, list[Burst]], list[float], set[str]]:
    """Bursts by kind, the peer's seconds, and the ids that were acknowledged."""
    bursts: dict[str, list[Burst]] = {}
    peer_s: list[float] = []
    acknowledged: set[str] = set()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connect(url, f"burst-{number}"))
            for number in range(options.clients)
        ]
        watcher = await stack.enter_async_context(connect(url, "watch"))
        bare = [await nats.connect(url) for _ in range(options.clients)]
        buckets = [await nc.jetstream().create_key_value(bucket="bench") for nc in bare]
        await patient(watcher).jobs()
        for round in range(options.rounds):
            for kind in options.kinds:
                names = [f"{kind}-{round}-{number}" for number in range(options.jobs)]
                specs = [spec_of(kind, name) for name in names]
                await announce_node(watcher)
                bursts.setdefault(kind, []).append(await arrive(clients, watcher, specs))
                acknowledged.update(names)
                peer_s.append(await put(buckets, specs))
        for nc in bare:
            await nc.close()
    return bursts, peer_s, acknowledged


@contextmanager
def running(config: Path, profile: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A master; ends it by SIGKILL unless it ended before (a profile wants SIGTERM)."""
    module = ["-m", "slackwater.services.master", "--config", str(config)]
    cprofile = ["-m", "cProfile", "-o", profile] if profile else []
    process = subprocess.Popen([sys.executable, *cprofile, *module])
    try:
        yield process
    finally:
        if profile:
            process.terminate()
        else:
            process.kill()
        process.wait(30)


async def survivors(url: str) -> list[str]:
    async with connect(url, "after") as client:
        return await known(patient(client))


def report(bursts: dict[str, list[Burst]], peer_s: list[float], jobs: int, unsafe: int) -> bool:
    """Prints all; whether every goal is met."""
    rows = []
    for kind, seen in bursts.items():
        whole_s = statistics.median(each.whole_s for each in seen)
        rows.append(
            Figure(f"{jobs} at once, {kind}", whole_s, statistics.median(peer_s), "s",
                   "as many bare puts", lower_is_better=True)
        )  # fmt: skip
    show("burst of arrivals", rows)
    table = Table()
    columns = ("kind", "slowest burst (s)", "median wait (s)", "turned away", "steps", "unanswered")
    for column in columns:
        table.add_column(column)
    for kind, seen in bursts.items():
        table.add_row(
            kind,
            f"{max(each.whole_s for each in seen):.3f}",
            f"{statistics.median(each.median_s for each in seen):.3f}",
            str(max(each.told_to_retry for each in seen)),
            f"{max(each.steps_waiting for each in seen)} of {limits.STEPS_WAITING_MAX}",
            f"{max(each.unanswered for each in seen)} of {limits.ADMISSIONS_MAX}",
        )
    console = Console()
    console.print(table)
    slowest_s = max(each.whole_s for seen in bursts.values() for each in seen)
    met = slowest_s <= GOAL_S and not unsafe
    console.print(
        f"all acknowledged within {slowest_s:.2f} s (goal {GOAL_S:g} s); lost or twice after a "
        f"kill: {unsafe}; load {os.getloadavg()[0]:.1f}: {'met' if met else 'NOT met'}"
    )
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4, help="connections")
    parser.add_argument("--kinds", nargs="+", choices=tuple(WORKERS), default=list(WORKERS))
    parser.add_argument("--profile", default="", help="write the master's profile there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slackwater-bench-") as folder:
        server = NatsServer(Path(folder) / "nats")
        server.start()
        config = Path(folder) / "master.toml"
        config.write_text(f'id = "main"\nurl = "{server.url}"\n')
        try:
            with running(config, options.profile):
                bursts, peer_s, acknowledged = uvloop.run(measure(server.url, options))
            with running(config):
                found = uvloop.run(survivors(server.url))
        finally:
            server.stop()
    unsafe = len(acknowledged ^ set(found)) + len(found) - len(set(found))
    if not report(bursts, peer_s, options.jobs, unsafe):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
