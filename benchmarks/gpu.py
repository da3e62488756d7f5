"""Aggregation on a GPU: the fused kernel, and parameters pulled on the device.

The kernel (two and four workers; SGD with momentum, Adam; float32 and bfloat16 gradients) against
the same update written as cupy expressions (rules.py on cupy arrays, what a user would write); the
floor is the rate at which the device copies memory. Then a pull of the same bytes from another
process: opened by CUDA IPC and copied on the device, against staged through host memory. All in
turn, medians.

    python benchmarks/gpu.py [--megabytes 100] [--rounds 15] [--json benchmarks/results/gpu.json]

`--device fake` runs the same code without a GPU: to try this program, never for figures.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, Row, Skipped, show, write_json

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.domains.slots import rules
from slackwater.common.domains.slots.gpu_kernels import kernels_of
from slackwater.common.domains.slots.kernels import KERNEL_DTYPES
from slackwater.common.domains.slots.rules import RULES, Hyper
from slackwater.common.transport.base import Channel
from slackwater.common.transport.devices import device_named
from slackwater.common.transport.gpu import DeviceArray, DeviceRegion
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.schemas.tensors import DType

Update = Callable[[], object]
CASES: list[tuple[str, DType, int]] = [
    ("momentum", "float32", 2),
    ("momentum", "float32", 4),
    ("adam", "float32", 2),
    ("momentum", "bfloat16", 2),
]
NO_RUN = "no run yet: it needs a CUDA device"


def seconds(update: Update, device: Any) -> float:
    begun_s = time.perf_counter()
    update()
    device.await_program()
    return time.perf_counter() - begun_s


def medians(updates: dict[str, Update], device: Any, rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in updates}
    for warm in (True, *[False] * rounds):
        for name, update in updates.items():
            spent_s = seconds(update, device)
            if not warm:
                taken[name].append(spent_s)
    return {name: statistics.median(values) for name, values in taken.items()}


def placed(device: Any, values: np.ndarray) -> DeviceArray:
    made = DeviceArray(device.allocate(values.nbytes), 0, values.shape, values.dtype)
    made.assign(values)
    return made


def kernel(
    device: Any, rule: str, dtype: DType, workers: int, elements: int, rounds: int
) -> list[Row]:
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal(workers * elements, dtype=np.float32)
    raw = drawn if dtype == "float32" else (drawn.view(np.uint32) >> 16).astype(np.uint16)
    slots = placed(device, raw.view(KERNEL_DTYPES[dtype]))
    buffers = [placed(device, np.ones(elements, np.float32)) for _ in range(2)]
    states = [
        (
            placed(device, np.ones(elements, np.float32)),
            placed(device, np.ones(elements, np.float32)),
        )
        for _ in range(RULES[rule].states)
    ]
    k = rules.scalars(Hyper(0.01, weight_decay=1e-4), 10, workers)
    fold = kernels_of(device).fold_chunk
    asarray = device.cupy.asarray if device.name != "fake" else np.asarray
    gradients = [asarray(raw[rank * elements : (rank + 1) * elements]) for rank in range(workers)]
    old = asarray(np.ones(elements, np.float32))
    olds = [asarray(np.ones(elements, np.float32)) for _ in states]

    def fused() -> None:
        span = 0, elements
        assert fold(rule, slots, elements, workers, span, (buffers[0], buffers[1]), states, k)

    taken_s = medians(
        {
            "fused": fused,
            "cupy": lambda: rules.step(rule, rules.mean(gradients, k), old, olds, k),
            "copy": lambda: buffers[0].assign(buffers[1]),
        },
        device,
        rounds,
    )
    moved = raw.nbytes + 2 * (1 + len(states)) * buffers[0].nbytes
    floor = 2 * buffers[0].nbytes / taken_s["copy"] / 1e9
    rate, peer = moved / taken_s["fused"] / 1e9, moved / taken_s["cupy"] / 1e9
    name = f"{rule}, {dtype}, W={workers}"
    return [Figure(name, rate, peer, "GB/s", "cupy expressions", 2.0, floor=floor)]


# A pull from another process ----------------------------------------------------------------------


async def own(name: str, path: str, nbytes: int) -> None:
    """The other process: it owns the parameters."""
    region = DeviceRegion.on(device_named(name), nbytes, "parameters", pin=True)

    async def serve(channel: Channel) -> None:
        channel.send(channel.grant(region))

    async def refuse(region: Region, note: bytes) -> None:
        region.close()

    await ShmFabric().listen(path, lambda _: None, serve, refuse)
    print("listening", flush=True)
    await asyncio.Event().wait()


async def pulls(device: Any, path: str, nbytes: int, rounds: int) -> list[Row]:
    mine = DeviceArray(device.allocate(nbytes), 0, (nbytes,), np.uint8)
    twin = DeviceArray(device.allocate(nbytes), 0, (nbytes,), np.uint8)
    opened: dict[str, tuple[Channel, Any]] = {}
    for way, fabric in (("ipc", ShmFabric(device=device)), ("staged", ShmFabric())):
        channel = await fabric.connect(path, b"", deadline_s=10)
        opened[way] = channel, await channel.open(await channel.receive())
    bounce = np.empty(nbytes, np.uint8)
    unpin = device.pin(bounce.data)

    async def ipc() -> None:
        mine.memory.copy_from(0, opened["ipc"][1].loan[0], 0, nbytes)

    async def staged() -> None:
        channel, remote = opened["staged"]
        await channel.read(remote, 0, bounce.data)
        mine.memory.upload(0, bounce.data)

    async def local() -> None:
        mine.memory.copy_from(0, twin.memory, 0, nbytes)

    ways: dict[str, Callable[[], Awaitable[None]]] = {"ipc": ipc, "staged": staged, "local": local}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, pull in ways.items():
            begun_s = time.perf_counter()
            await pull()
            taken[way].append(1e3 * (time.perf_counter() - begun_s))
    unpin()
    for channel, _ in opened.values():
        await channel.close()
    ms = {way: statistics.median(values[1:]) for way, values in taken.items()}
    name = f"pull of {nbytes / 1e6:.0f} MB by IPC"
    return [
        Figure(
            name, ms["ipc"], ms["staged"], "ms", "staged through the host", 0.2,
            lower_is_better=True, floor=ms["local"],
        )
    ]  # fmt: skip


def pull(device: Any, nbytes: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        command = [sys.executable, __file__, "--own", device.name, path, str(nbytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
            try:
                assert owner.stdout is not None
                assert owner.stdout.readline() == b"listening\n"
                return asyncio.run(pulls(device, path, nbytes, rounds))
            finally:
                owner.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="Aggregation on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--own", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        name, path, nbytes = options.own
        asyncio.run(own(name, path, int(nbytes)))
    elements = int(options.megabytes * 1e6) // 16 * 4
    rows: list[Row] = []
    note = ""
    try:
        device: Any = device_named(options.device)
    except ConfigRejected as error:
        rows, note = [Skipped("GPU aggregation", f"{NO_RUN} ({error})")], NO_RUN
    else:
        for rule, dtype, workers in CASES:
            rows += kernel(device, rule, dtype, workers, elements, options.rounds)
        rows += pull(device, 4 * elements, options.rounds)
        note = f"device {device.name}, {device.total_bytes // 2**30} GiB"
    show("GPU aggregation", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/gpu.py", rows, note)


if __name__ == "__main__":
    main()
