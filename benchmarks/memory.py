"""The block device in remote memory against nbdkit's memory plugin and Redis, in one run.

fio's nbd engine drives both over Unix sockets: 4 KiB random reads (all hits in remote memory) and
writes at depth 32 and 1, 1 MiB reads and writes. The device borrows from two lenders, over shm and
over tcp; its backup file is in `--backup-dir` (the default, /dev/shm, stands for a fast disk: every
write goes there as well, which the peer does not do). Rounds are interleaved, figures are medians;
nbdkit is the better of its default and `-t 1`, round by round. Beside them the CPU time that the
servers spend on a request, which other load on the machine disturbs less, and that of the lenders,
also at 32 pages a request.

    python benchmarks/memory.py [--rounds 3] [--seconds 3] [--size 256] [--transport shm,tcp]
        [--json FILE]
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from figures import Figure, Row, Skipped, show, spread, this_command, write_json
from lending import MIB, lenders

from slackwater.common.base import codec
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client, connect
from slackwater.schemas import subjects
from slackwater.schemas.memory import DeviceHeartbeat

SLAB_BYTES = 32 * MIB
LENDERS = 2
WRITES = {
    "randwrite 4k depth 1": ("randwrite", "4k", 1),
    "randwrite 4k depth 32": ("randwrite", "4k", 32),
}
"""Write patterns that memory_coded.py runs with coding and with copies."""
JOBS = {
    "randread 4k depth 32": ("randread", "4k", 32),
    "randread 4k depth 1": ("randread", "4k", 1),
    "randwrite 4k depth 32": ("randwrite", "4k", 32),
    "read 1M depth 4": ("read", "1M", 4),
    "write 1M depth 4": ("write", "1M", 4),
}
LENDERS_JOBS = {
    "read 128k depth 4": ("read", "128k", 4),
    "write 128k depth 4": ("write", "128k", 4),
}
"""32 pages a request: what the lenders' CPU time is asked at."""
SCANS = {
    "sequential 4k": ("read", "4k", 1),
    "stride 7 of 4k": ("read:24k", "4k", 1),
    "random 4k": ("randread", "4k", 1),
}
"""Scans that show prefetching at work: memory_readahead.py."""
REDIS = {"depth 32": "IOPS", "depth 1": "us"}
NBDKITS = ("nbdkit", "nbdkit -t 1")
GOALS = {
    "shm": {"iops": 1.0, "p50": 1.0, "bandwidth": 0.8},
    "tcp": {"iops": 1.0, "p50": 2.5, "bandwidth": 0.4},
}
Sample = dict[str, float]
Samples = dict[tuple[str, str], list[Sample]]
"""Samples by job and server."""
RAMP_S = 0.3
LENDER = re.compile(r"s\d+")
"""Its id, and the name of its configuration."""


def milliseconds(seconds: float) -> str:
    """Write a duration for fio, which would take the whole seconds of "0.7" alone."""
    return f"{round(seconds * 1000)}ms"


def fio(sock: Path, job: str, size: int, seconds: float) -> Sample:
    mode, block, depth = (JOBS | LENDERS_JOBS | SCANS | WRITES)[job]
    done = subprocess.run(
        [
            "fio", "--name=t", "--ioengine=nbd", f"--uri=nbd+unix:///?socket={sock}",
            f"--rw={mode}", f"--bs={block}", f"--size={size}", f"--iodepth={depth}",
            "--time_based", f"--runtime={milliseconds(seconds)}", "--randrepeat=0",
            f"--ramp_time={milliseconds(RAMP_S)}", "--output-format=json",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    [found] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    side = found["write" if "write" in mode else "read"]
    return {
        "iops": side["iops"],
        "bandwidth": side["bw_bytes"] / 1e6,
        "p50": side["clat_ns"]["percentile"]["50.000000"] / 1e3,
        "requests": side["total_ios"],
    }


def cpu_s(folder: Path) -> dict[str, float]:
    """CPU seconds so far of each server of this run, by what names it in its command."""
    seen: dict[str, float] = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        for word in words:
            if word.startswith(str(folder)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    seen[Path(word).stem] = times.user + times.system
                break
    return seen


def sample(folder: Path, name: str, sock: Path, job: str, size: int, seconds: float) -> Sample:
    """fio's figures, and CPU microseconds a request: `cpu` of the one that serves the socket,
    `lender_cpu` of the lenders."""
    before = cpu_s(folder)
    found = fio(sock, job, size, seconds)
    spent = {key: value - before.get(key, 0.0) for key, value in cpu_s(folder).items()}
    requests = max(1.0, found["requests"] * (seconds + RAMP_S) / seconds)
    found["cpu"] = spent.get(sock.stem, 0.0) / requests * 1e6
    lent = sum(used for name, used in spent.items() if LENDER.fullmatch(name))
    found["lender_cpu"] = lent / requests * 1e6
    return found


@contextlib.contextmanager
def nbdkit(folder: Path, size: int, *options: str) -> Iterator[Path]:
    sock = folder / f"nbdkit{len(options)}"
    command = ["nbdkit", "-f", "-U", str(sock), *options, "memory", str(size)]
    process = subprocess.Popen(command)
    try:
        await_socket(sock, process)
        yield sock
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def device(
    folder: Path,
    url: str,
    transport: str,
    size: int,
    token: str,
    backup: Path,
    prefetch: int = 8,
    slab_bytes: int = SLAB_BYTES,
    resilience: str = "disk",
) -> Iterator[Path]:
    name = transport if prefetch else f"{transport}-bare"
    if resilience != "disk":
        name += f"-{resilience.replace('+', '-')}"
    sock = folder / f"nbd-{name}"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "slackwater.cli.main", "memory", "export", "--size", str(size),
            "--socket", str(sock), "--backup", str(backup / f"backup-{name}"),
            "--id", f"d-{name}", "--node", "here", "--transport", transport,
            "--slab-size", str(slab_bytes), "--prefetch", str(prefetch),
            "--resilience", resilience,
        ],
        env={**os.environ, "SLACKWATER_URL": url, "SLACKWATER_CLUSTER_TOKEN": token},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await_socket(sock, process)
        yield sock
    finally:
        process.terminate()
        process.wait()


def await_socket(sock: Path, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + 60
    while not sock.exists():
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise SystemExit(f"{process.args} did not come up")  # type: ignore[str-bytes-safe]
        time.sleep(0.05)


async def until_mapped(client: Client, name: str, sock: Path, size: int) -> DeviceHeartbeat:
    """Write until every span of the device is in remote memory, and once more; its state then."""
    beats: list[DeviceHeartbeat] = []

    async def hear(delivery: Delivery) -> None:
        beats.append(codec.decode(delivery.payload, DeviceHeartbeat))

    subject = subjects.telemetry("device", f"d-{name}", "heartbeat")
    subscription = await client.bus.subscribe(subject, hear)
    async with asyncio.timeout(120):
        while not beats or beats[-1].mapped_spans < beats[-1].spans:
            await asyncio.to_thread(fio, sock, "write 1M depth 4", size, 2.0)
    await asyncio.to_thread(fio, sock, "write 1M depth 4", size, 3.0)
    await subscription.unsubscribe()
    return beats[-1]


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[Path]:
    sock = folder / "redis"
    server = subprocess.Popen(
        ["redis-server", "--port", "0", "--unixsocket", str(sock), "--save", "", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await_socket(sock, server)
        yield sock
    finally:
        server.terminate()
        server.wait()


def redis_sample(sock: Path, seconds: float) -> Sample:
    """GET of 4 KiB by redis-benchmark: requests per second with 32 clients, and the median in
    microseconds with one."""
    found = {}
    for clients in (32, 1):
        done = subprocess.run(
            ["redis-benchmark", "-s", str(sock), "-t", "set,get", "-d", "4096", "-r", "50000",
             "-n", str(int(20_000 * seconds)), "-c", str(clients), "--csv"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        [line] = [line for line in done.stdout.splitlines() if line.startswith('"GET"')]
        _, rate, _, _, middle_ms, *_ = (word.strip('"') for word in line.split(","))
        found[f"depth {clients}"] = float(rate) if clients > 1 else float(middle_ms) * 1e3
    return found


async def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    size, token = arguments.size * MIB, secrets.token_hex(16)
    kinds = arguments.transport.split(",")
    servers, cache = dict[str, Path](), None
    async with contextlib.AsyncExitStack() as stack:
        lending = lenders(folder, LENDERS, SLAB_BYTES, 2 * size // SLAB_BYTES, token)
        url = (await stack.enter_async_context(lending)).url
        client = await stack.enter_async_context(connect(url, "benchmark"))
        if shutil.which("redis-server") is not None:
            cache = stack.enter_context(redis(folder))
        if shutil.which("nbdkit") is not None:
            for name, *options in (("nbdkit",), ("nbdkit -t 1", "-t", "1")):
                servers[name] = stack.enter_context(nbdkit(folder, size, *options))
                await asyncio.to_thread(fio, servers[name], "write 1M depth 4", size, 3.0)
        for kind in kinds:
            backup = Path(tempfile.mkdtemp(dir=arguments.backup_dir, prefix="slackwater-"))
            stack.callback(shutil.rmtree, backup)
            servers[kind] = stack.enter_context(device(folder, url, kind, size, token, backup))
            await until_mapped(client, kind, servers[kind], size)
        samples: Samples = {}
        for _ in range(arguments.rounds):
            await one_round(samples, folder, servers, arguments)
            if cache is not None:
                found = await asyncio.to_thread(redis_sample, cache, arguments.seconds)
                samples.setdefault(("GET", "redis"), []).append(found)
    return figures(samples, kinds)


async def one_round(
    samples: Samples, folder: Path, servers: dict[str, Path], arguments: argparse.Namespace
) -> None:
    for job in (*JOBS, *LENDERS_JOBS):
        for name, sock in servers.items():
            if name in NBDKITS and job in LENDERS_JOBS:
                continue
            found = await asyncio.to_thread(
                sample, folder, name, sock, job, arguments.size * MIB, arguments.seconds
            )
            samples.setdefault((job, name), []).append(found)


def figures(samples: Samples, kinds: list[str]) -> list[Row]:
    """One row for each transport, job and measure."""
    made: list[Row] = []
    for kind in kinds:
        for job in JOBS:
            measure = "p50" if job.endswith("depth 1") else "iops" if "4k" in job else "bandwidth"
            unit = {"p50": "us", "iops": "IOPS", "bandwidth": "MB/s"}[measure]
            goal = GOALS[kind][measure]
            made.append(beside_nbdkit(samples, kind, job, measure, f"{kind}: {job}", unit, goal))
            name = f"{kind}: {job}, CPU a request"
            made.append(beside_nbdkit(samples, kind, job, "cpu", name, "us", None))
        made += lender_rows(samples, kind)
        for depth, unit in REDIS.items():
            name = f"{kind}: randread 4k {depth}"
            measure = "p50" if unit == "us" else "iops"
            ours = [one[measure] for one in samples[f"randread 4k {depth}", kind]]
            if ("GET", "redis") in samples:
                peers = [one[depth] for one in samples["GET", "redis"]]
                made.append(row(name, ours, peers, unit, "Redis GET", 1.0))
            else:
                made.append(Skipped(f"{name}, beside Redis", "redis-server is not installed"))
    return made


def beside_nbdkit(
    samples: Samples, kind: str, job: str, measure: str, name: str, unit: str, goal: float | None
) -> Row:
    """`cpu` is that of the process behind the socket."""
    if (job, "nbdkit") not in samples:
        return Skipped(name, "nbdkit is not installed")
    best = min if unit == "us" else max
    rounds = zip(*(samples[job, peer] for peer in NBDKITS), strict=True)
    peers = [best(one[measure] for one in round_) for round_ in rounds]
    return row(name, [one[measure] for one in samples[job, kind]], peers, unit, "nbdkit", goal)


def lender_rows(samples: Samples, kind: str) -> list[Row]:
    """CPU of the lenders, per KiB: one microsecond is the goal over tcp, at 32 pages a request
    (fig. 2.12b: none, with verbs; shm is one-sided, too)."""
    made: list[Row] = []
    for job, kib in (("randread 4k depth 32", 4), *((job, 128) for job in LENDERS_JOBS)):
        ours = [one["lender_cpu"] / kib for one in samples[job, kind]]
        goal = 1.0 if kind == "tcp" and job in LENDERS_JOBS else None
        made.append(row(f"{kind}: {job}, lenders' CPU a KiB", ours, [1.0], "us", "a KiB", goal))
    return made


def row(
    name: str, ours: list[float], peers: list[float], unit: str, peer: str, goal: float | None
) -> Figure:
    middle = statistics.median(ours)
    return Figure(
        name=name,
        ours=middle,
        peer=statistics.median(peers),
        unit=unit,
        peer_name=peer,
        goal=goal,
        lower_is_better=unit == "us",
        spread=spread(ours) if middle and len(ours) > 1 else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one fio run")
    parser.add_argument("--size", type=int, default=256, help="MiB of the device")
    parser.add_argument("--transport", default="shm,tcp")
    parser.add_argument("--backup-dir", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: list[Row] = [Skipped("the block device", "fio is not installed")]
    if shutil.which("fio") is not None:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure(arguments, Path(folder)))
    show(f"Remote memory, load {os.getloadavg()[0]:.1f}", found)
    if arguments.json is not None:
        write_json(arguments.json, this_command(), found)


if __name__ == "__main__":
    main()
