"""Writes to coded and copied spans, beside the same device with one slab a span, and nbdkit.

fio writes random pages at depth 1 and 32 through the NBD server. The devices (disk, 8+2, 2-copies)
borrow from the same ten lenders; nbdkit's memory plugin (`-t 1`) is in the same rounds. A row is
the median of ratios of a round. Before them, without devices: what one compiled call takes for a
page's fragments, alone and 32 at a time, beside coding and packing them member by member.

    python benchmarks/memory_coded.py [--rounds 3] [--seconds 2] [--transport shm,tcp] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from figures import Row, Skipped, paired, show, this_command, write_json
from lending import MIB, lenders
from memory import WRITES, Samples, device, nbdkit, sample, until_mapped

from slackwater.common.shell.client import connect
from slackwater.memory.resilience import fragments, scatter
from slackwater.memory.resilience.coding import Code, ErasureCode
from slackwater.memory.resilience.replication import Copies
from slackwater.memory.store import PAGE_BYTES

LENDERS = 10
SLAB_BYTES = 4 * MIB
SIZE = 64 * MIB
KINDS = ("disk", "8+2", "2-copies")
PEER = "nbdkit -t 1"
CALL_US = 6.0
"""The most that one page of 8 + 2 takes."""
CALLS = 200


async def measure(arguments: argparse.Namespace, transport: str) -> list[Row]:
    token = secrets.token_hex(16)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        slabs = 2 + 6 * SIZE // SLAB_BYTES // LENDERS
        lending = lenders(folder, LENDERS, SLAB_BYTES, slabs, token)
        url = (await stack.enter_async_context(lending)).url
        client = await stack.enter_async_context(connect(url, "benchmark"))
        servers = {PEER: stack.enter_context(nbdkit(folder, SIZE, "-t", "1"))}
        backup = Path(tempfile.mkdtemp(dir=arguments.backup_dir, prefix="slackwater-"))
        stack.callback(shutil.rmtree, backup)
        for kind in KINDS:
            made = device(
                folder, url, transport, SIZE, token, backup, 8, SLAB_BYTES, resilience=kind
            )
            servers[kind] = stack.enter_context(made)
            name = servers[kind].name.removeprefix("nbd-")
            await until_mapped(client, name, servers[kind], SIZE)
        samples: Samples = {}
        for _ in range(arguments.rounds):
            for job in WRITES:
                for name, sock in servers.items():
                    found = await asyncio.to_thread(
                        sample, folder, name, sock, job, SIZE, arguments.seconds
                    )
                    samples.setdefault((job, name), []).append(found)
    return rows(samples, transport)


def rows(samples: Samples, transport: str) -> list[Row]:
    made: list[Row] = []
    for job in WRITES:
        measured, unit = ("p50", "us") if job.endswith("depth 1") else ("iops", "IOPS")
        asked = [(kind, measured, unit, PEER) for kind in KINDS]
        asked += [(kind, measured, unit, "disk") for kind in KINDS[1:]]
        asked += [(kind, "cpu", "us", "disk") for kind in KINDS[1:]]
        for kind, what, unit_, peer in asked:
            label = f"{transport}, {kind}: {job}" + (", CPU a request" if what == "cpu" else "")
            ours, peers = ([one[what] for one in samples[job, name]] for name in (kind, peer))
            less = unit_ == "us"
            made.append(paired(label, ours, peers, unit_, peer, lower_is_better=less))
    return made


def calls() -> list[Row]:
    """Measure microseconds a page: of the compiled call, and of what it replaced."""
    made: list[Row] = []
    for name, code in (("8+2", ErasureCode(8, 2)), ("2-copies", Copies(2))):
        for count in (1, 32):
            ours, peers = [], []
            one, other = compiled_and_packed(code, count)
            for _ in range(CALLS):
                ours.append(microseconds(one) / count)
                peers.append(microseconds(other) / count)
            label = f"{name}: fragments of a page, {count} in a call"
            goal = CALL_US if count == 1 else None
            bound = paired(label, ours, [1.0] * CALLS, "us", "us", goal, lower_is_better=True)
            made += [bound, paired(label, ours, peers, "us", "packed", None, lower_is_better=True)]
    return made


def microseconds(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    for _ in range(5):
        work()
    return (time.perf_counter() - begin_s) / 5 * 1e6


def compiled_and_packed(code: Code, count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Put the fragments into slabs of this process by both; each has run once before."""
    length, pages = fragments.slot_bytes(code), np.arange(count)
    data = np.random.default_rng(1).integers(0, 256, (count, PAGE_BYTES), np.uint8)
    slabs = [np.zeros((count, length), np.uint8) for _ in range(code.width)]
    members = [SimpleNamespace(mapped=slab.reshape(-1).data) for slab in slabs]
    into, flat = scatter.target(code, cast(Any, members)), data.reshape(-1).data

    def packed() -> None:
        parts, generations = code.encode(data), np.full(count, 3)
        for index, slab in enumerate(slabs):
            slab[pages] = fragments.pack(code, index, 7, pages, generations, parts[index])

    def compiled() -> None:
        scatter.write(code, into, 7, pages, 3, flat)

    compiled()
    packed()
    return compiled, packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one fio run")
    parser.add_argument("--transport", default="shm,tcp")
    parser.add_argument("--backup-dir", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = calls()
    missing = [program for program in ("fio", "nbdkit") if shutil.which(program) is None]
    found += [Skipped("coded devices", f"{program} is not installed") for program in missing]
    if not missing:
        for transport in arguments.transport.split(","):
            found += asyncio.run(measure(arguments, transport))
    show(f"Coded and copied writes, load {os.getloadavg()[0]:.1f}", found)
    if arguments.json is not None:
        write_json(arguments.json, this_command(), found)


if __name__ == "__main__":
    main()
