"""Measure a device over tcp by the number of lenders that its spans lie at, beside nbdkit.

A span goes to a machine that the device does not use yet, so a device of nine slabs in a cluster of
nine machines has nine lenders. For each number of them: lenders in processes of their own, a device
of 32 slabs, fio at depth 32 and 1; nbdkit's memory plugin (`-t 1`) in the same rounds. A row is the
median of ratios of a round. CPU of the device a request disturbs less on a machine that others use.

    python benchmarks/memory_width.py [--rounds 3] [--seconds 2] [--lenders 2,4,8,16]
        [--json FILE]
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import psutil
from figures import Row, Skipped, paired, show, this_command, write_json
from lending import MIB, lenders
from memory import GOALS, JOBS, Sample, device, nbdkit, sample, until_mapped

from slackwater.common.shell.client import connect

SPANS = 32
SLAB_BYTES = 4 * MIB
PEER = "nbdkit -t 1"
Rounds = list[tuple[Sample, Sample]]
"""The device's and nbdkit's."""


async def measure(arguments: argparse.Namespace, count: int) -> list[Row]:
    """With so many lenders."""
    size, token = SPANS * SLAB_BYTES, secrets.token_hex(16)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        slabs = 2 * SPANS // count
        lending = lenders(folder, count, SLAB_BYTES, slabs, token)
        url = (await stack.enter_async_context(lending)).url
        client = await stack.enter_async_context(connect(url, "benchmark"))
        peer = stack.enter_context(nbdkit(folder, size, "-t", "1"))
        backup = Path(tempfile.mkdtemp(dir=arguments.backup_dir, prefix="slackwater-"))
        stack.callback(shutil.rmtree, backup)
        ours = stack.enter_context(
            device(folder, url, "tcp", size, token, backup, slab_bytes=SLAB_BYTES)
        )
        used = (await until_mapped(client, "tcp", ours, size)).lenders
        seen: dict[str, Rounds] = {job: [] for job in JOBS}
        for _ in range(arguments.rounds):
            for job in JOBS:
                pair = [
                    await asyncio.to_thread(
                        sample, folder, name, sock, job, size, arguments.seconds
                    )
                    for name, sock in (("tcp", ours), (PEER, peer))
                ]
                seen[job].append((pair[0], pair[1]))
        load = os.getloadavg()[0]
        name = f"{used} lenders (load {load:.1f})"
        return [*figures(name, seen), *costs(name, folder)]


def figures(name: str, seen: dict[str, Rounds]) -> list[Row]:
    rows: list[Row] = []
    for job, rounds in seen.items():
        what = "p50" if job.endswith("depth 1") else "iops" if "4k" in job else "bandwidth"
        unit = {"p50": "us", "iops": "IOPS", "bandwidth": "MB/s"}[what]
        for measured, unit_, goal in ((what, unit, GOALS["tcp"][what]), ("cpu", "us", None)):
            ours, peers = zip(*((one[measured], two[measured]) for one, two in rounds), strict=True)
            label = f"{name}: {job}" + (", CPU a request" if measured == "cpu" else "")
            less = unit_ == "us"
            rows.append(paired(label, ours, peers, unit_, PEER, goal, lower_is_better=less))
    return rows


def costs(name: str, folder: Path) -> list[Row]:
    """Count what the device has open, and a lender's threads, with one client."""
    of: dict[str, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        for word in process.info["cmdline"] or []:
            if word in (str(folder / "nbd-tcp"), str(folder / "s0.toml")):
                of[Path(word).stem] = process
    return [
        paired(f"{name}: {what}", [float(value)], [float(count)], unit, "of them")
        for what, value, count, unit in (
            ("descriptors of the device", of["nbd-tcp"].num_fds(), 1, "descriptors"),
            ("resident memory of the device", of["nbd-tcp"].memory_info().rss / MIB, 1, "MiB"),
            ("threads of a lender", of["s0"].num_threads(), 1, "threads"),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one fio run")
    parser.add_argument("--lenders", default="2,4,8,16")
    parser.add_argument("--backup-dir", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: list[Row] = [
        Skipped("a device of many lenders", f"{program} is not installed")
        for program in ("fio", "nbdkit")
        if shutil.which(program) is None
    ]
    if not found:
        for count in map(int, arguments.lenders.split(",")):
            found += asyncio.run(measure(arguments, count))
    show(f"Remote memory by lenders, load {os.getloadavg()[0]:.1f}", found)
    if arguments.json is not None:
        shared = os.getloadavg()[0] > (os.cpu_count() or 1) + 2
        note = "Other work had the processors as well: ratios, not rates." if shared else ""
        write_json(arguments.json, this_command(), found, note)


if __name__ == "__main__":
    main()
