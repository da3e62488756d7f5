"""Asynchronous jobs over a slow link: reads of the parameters an iteration, and updates a second
against what the queueing model says (Lin et al. 2018, section 3.3, exact mean value analysis).

The workers are in a network namespace of their own, behind a link that is shaped in both directions
(`tc`); K of them train one job over tcp. The times of one iteration are measured with one worker:
computing is known, what is left is one transfer up and one down.

    python benchmarks/async_reads.py [--workers 1 2 3 4 5 6] [--rate-mbit 100] [--mbytes 2]
        [--compute-s 0.3] [--seconds 15] [--json FILE]
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from aggregation import Member
from figures import Figure, Row, show, write_json
from interference import forward, lent
from namespaces import BURST, HUB, Machine, in_a_namespace, machines, sh

from slackwater.agent import Agent
from slackwater.common.domains.models.queueing import StepTimes, throughputs
from slackwater.common.embedded import Supervisor, UnitSpec
from slackwater.common.native import blas_threads
from slackwater.common.shell.config import write_config

HOST = "host1"
READS_GOAL = 1.05


def worker(url: str, job: str, rank: int, workers: int, mbytes: float, compute_s: float) -> None:
    """Answer `go SECONDS` with iterations, reads of parameters, those that were overtaken,
    seconds."""
    elements = int(mbytes * 1e6 / 4)
    gradient = np.full(elements, 1e-6, np.float32)
    rng = np.random.default_rng(rank)
    with Agent(
        url=url, job=job, rank=rank, workers=workers, tensors={"w": (elements,)},
        consistency="asynchronous", transport="tcp",
    ) as agent:  # fmt: skip
        agent.step({"w": gradient})
        print("ready", flush=True)
        for line in sys.stdin:
            begun_s = time.monotonic()
            until_s = begun_s + float(line.split()[1])
            before, first = agent.reads, agent.iteration
            while time.monotonic() < until_s:
                time.sleep(compute_s * rng.uniform(0.8, 1.2))  # Equal sleeps keep their phases.
                agent.step({"w": gradient})
            reads, torn = (now - then for now, then in zip(agent.reads, before, strict=True))
            print(agent.iteration - first, reads, torn, time.monotonic() - begun_s, flush=True)


def units(supervisor: Supervisor, hosts: Sequence[Machine] = ()) -> list[UnitSpec]:
    """Describe a cluster with an aggregator that is reached over tcp, or with one on each of the
    `hosts`. With several, jobs stay on those that they begin with."""
    token, servers = os.urandom(16).hex(), max(1, len(hosts))
    aggregators = [
        (
            "aggregator",
            f"a{number + 1}",
            {
                "transport": "tcp", "cluster_token": token, "cpu_share": 1.0,
                "tcp_address": f"{hosts[number].address if hosts else HUB}:4700",
                "url": lent(supervisor.url),
            },
        )
        for number in range(servers)
    ]  # fmt: skip
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        ("master", "m1", {"aggregators_max": servers}),
        ("profiler", "p1", {}),
        ("controller", "c1", {"unprofiled_after_s": 1e9} if hosts else {}),
        *aggregators,
    ]
    specs = []
    for service, id, fields in wanted:
        state_dir = supervisor.state_dir / f"{service}-{id}"
        state_dir.mkdir(parents=True)
        config = supervisor.run_dir / f"{service}-{id}.toml"
        write_config(config, {"id": id, "url": supervisor.url, "state_dir": state_dir} | fields)
        command = (sys.executable, "-m", f"slackwater.services.{service}", "--config", str(config))
        inside = hosts[int(id[1:]) - 1].command if service == "aggregator" and hosts else None
        specs.append(
            UnitSpec(
                name=f"{service}-{id}",
                command=inside(*command) if inside else command,
                environment=blas_threads.one_each(os.environ),
            )
        )
    return specs


async def measure(
    url: str, host: Machine, workers: int, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Return updates a second, reads an iteration, and the part of reads that was overtaken."""
    members = [
        Member(
            host.command(
                sys.executable, __file__, "--worker", url, f"reads-{workers}", str(rank),
                str(workers), str(options.mbytes), str(options.compute_s),
            )
        )
        for rank in range(workers)
    ]  # fmt: skip
    try:
        await asyncio.gather(*(asyncio.to_thread(member.hear) for member in members))
        for member in members:
            member.tell(f"go {options.seconds}")
        told = await asyncio.gather(*(asyncio.to_thread(member.hear) for member in members))
    finally:
        await asyncio.gather(*(asyncio.to_thread(member.end) for member in members))
    each = [tuple(map(float, line.split())) for line in told]
    iterations, reads, torn = (sum(one[column] for one in each) for column in range(3))
    rate = sum(one[0] / one[3] for one in each)  # Each by its own clock: the last one waits.
    return rate, reads / iterations, torn / max(1.0, reads)


async def run(options: argparse.Namespace, host: Machine) -> list[Row]:
    supervisor = Supervisor()
    rows: list[Row] = []
    step: StepTimes | None = None
    try:
        url = await supervisor.start_nats()
        forwarder = await forward(url)
        await supervisor.start_units(units(supervisor))
        for workers in (1, *(k for k in options.workers if k > 1)):
            rate, reads, torn = await measure(lent(url), host, workers, options)
            if step is None:
                link_s = max(0.0, 1.0 / rate - options.compute_s) / 2.0
                step = StepTimes(worker_s=options.compute_s, uplink_s=link_s, downlink_s=link_s)
            model = float(throughputs(step, workers)[workers])
            print(
                f"K = {workers}: {reads:.3f} reads an iteration ({torn:.1%} overtaken), "
                f"{rate:.2f} updates/s, model {model:.2f} ({rate / model - 1.0:+.0%})",
                flush=True,
            )
            rows.append(
                Figure(
                    f"{workers} workers, updates per second", rate, model, "1/s", "exact model",
                    None,
                )
            )  # fmt: skip
            if reads > READS_GOAL:
                print(f"K = {workers}: over {READS_GOAL} reads an iteration", flush=True)
        forwarder.close()
    finally:
        await supervisor.stop()
    return rows


def inside(options: argparse.Namespace) -> None:
    """Put the workers behind the link: what they push and what they read each have it alone."""
    with machines(options.rate_mbit, HOST) as hosts:
        shaped = f"dev {HOST} root tbf rate {options.rate_mbit}mbit burst {BURST} limit 4mb"
        sh("tc", "qdisc", "add", *shaped.split())
        rows = asyncio.run(run(options, hosts[HOST]))
    show(f"Asynchronous, {options.mbytes} MB, {options.rate_mbit} Mbit/s", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/async_reads.py", rows)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--worker"]:
        url, job, rank, workers, mbytes, compute_s = arguments[1:]
        worker(url, job, int(rank), int(workers), float(mbytes), float(compute_s))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--rate-mbit", type=int, default=100)
    parser.add_argument("--mbytes", type=float, default=2.0)
    parser.add_argument("--compute-s", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return in_a_namespace(arguments, lambda: inside(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
