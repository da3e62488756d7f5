"""Scans of a block device over tcp with Leap in front of it, without it, and of a local cache.

fio reads single pages at depth 1, one after the other, every seventh, and in random order. All of
them are in two lenders. The local cache is the same device over shm: its pages lie in memory that
it maps, and compiled code answers there as it does for a page that was prefetched. The hit rate is
of the pages that were not at hand: those that prefetching had brought or was bringing; the accuracy
is of the pages that were prefetched; both as the device's heartbeats tell. What was prefetched for
one job is written, and so forgotten, before the next. Rounds are interleaved, figures are medians.

Then scans that take turns on one connection, as programs do that swap: two, four and eight of them,
one after the other, by every seventh page and backwards by threes.

    python benchmarks/memory_readahead.py [--rounds 5] [--seconds 3] [--size 128] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, Row, accuracy, paired, show, this_command, write_json
from lending import MIB, lenders
from memory import LENDERS, SCANS, SLAB_BYTES, Samples, device, sample, until_mapped

from slackwater.common.base import codec
from slackwater.common.bus.base import Delivery
from slackwater.common.shell.client import Client, connect
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.schemas import subjects
from slackwater.schemas.memory import DeviceHeartbeat

BEAT_S = 2.2
"""Longer than two heartbeats: what was counted has been told by then."""
DEVICES = {"tcp": ("tcp", 8), "tcp-bare": ("tcp", 0), "shm": ("shm", 8)}
MOST = 3.0
"""Times a page of the local cache, at the median."""
LEAST = 0.95
TURNS = (2, 4, 8)
"""Scans that take turns on one connection."""
STEPS = (1, 7, -3)
PAGE_BYTES = 4096


class Heard:
    """The newest heartbeat of the device that prefetches."""

    def __init__(self) -> None:
        self.beat: DeviceHeartbeat | None = None

    async def listen(self, client: Client) -> None:
        async def hear(delivery: Delivery) -> None:
            self.beat = codec.decode(delivery.payload, DeviceHeartbeat)

        await client.bus.subscribe(subjects.telemetry("device", "d-tcp", "heartbeat"), hear)

    async def counted(self) -> tuple[int, int, int, int]:
        """(hits, pages waited for, pages prefetched, hits that were late), up to now."""
        await asyncio.sleep(BEAT_S)
        beat = self.beat
        assert beat is not None, "until_mapped has heard it"
        return (
            beat.prefetch_hit_pages, beat.read_waited_pages, beat.prefetched_pages,
            beat.prefetch_late_pages,
        )  # fmt: skip


async def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    size, token = arguments.size * MIB, secrets.token_hex(16)
    samples: Samples = {}
    heard, servers = Heard(), dict[str, Path]()
    async with contextlib.AsyncExitStack() as stack:
        slabs = 2 * len(DEVICES) * size // SLAB_BYTES // LENDERS
        lending = lenders(folder, LENDERS, SLAB_BYTES, slabs, token)
        url = (await stack.enter_async_context(lending)).url
        client = await stack.enter_async_context(connect(url, "benchmark"))
        await heard.listen(client)
        backup = Path(tempfile.mkdtemp(dir=arguments.backup_dir, prefix="slackwater-"))
        stack.callback(shutil.rmtree, backup)
        for name, (kind, window) in DEVICES.items():
            made = device(folder, url, kind, size, token, backup, window)
            servers[name] = stack.enter_context(made)
            await until_mapped(client, name, servers[name], size)
        for _ in range(arguments.rounds):
            for job in SCANS:
                await forget(servers["tcp"], size)
                before = await heard.counted()
                for name, sock in servers.items():
                    found = await asyncio.to_thread(
                        sample, folder, name, sock, job, size, arguments.seconds
                    )
                    samples.setdefault((job, name), []).append(found)
                moved = [b - a for a, b in zip(before, await heard.counted(), strict=True)]
                samples[job, "tcp"][-1] |= rates(*moved)
            for scans in TURNS:
                await forget(servers["tcp"], size)
                before = await heard.counted()
                for name, sock in servers.items():
                    found = await take_turns(sock, scans, size, arguments.seconds)
                    samples.setdefault((turns(scans), name), []).append(found)
                moved = [b - a for a, b in zip(before, await heard.counted(), strict=True)]
                samples[turns(scans), "tcp"][-1] |= rates(*moved)
    of_turns = [row for scans in TURNS for row in turn_rows(samples, turns(scans))]
    return [row for job in SCANS for row in rows(samples, job)] + of_turns


async def forget(sock: Path, size: int) -> None:
    """Write every page, so that no prefetched one is left."""
    client = await NbdClient.connect(sock)
    for offset in range(0, size, MIB):
        await client.write(offset, bytes(MIB))
    await client.close()


def turns(scans: int) -> str:
    return f"{scans} scans in turns"


def walk(pages: int, step: int) -> Iterator[int]:
    """Read all of so many pages, again and again."""
    while True:
        for first in range(abs(step)):
            passing = range(first, pages, abs(step))
            yield from passing if step > 0 else reversed(passing)


async def take_turns(sock: Path, scans: int, size: int, seconds: float) -> dict[str, float]:
    """Scan as many parts of the device, a page of each in turn, on one connection."""
    part = size // PAGE_BYTES // scans
    walks = [(i * part, walk(part, STEPS[i % len(STEPS)])) for i in range(scans)]
    client = await NbdClient.connect(sock)
    took_us: list[float] = []
    end_s = time.perf_counter() + seconds
    while (now_s := time.perf_counter()) < end_s:
        for first, pages in walks:
            await client.read((first + next(pages)) * PAGE_BYTES, PAGE_BYTES)
            before_s, now_s = now_s, time.perf_counter()
            took_us.append(1e6 * (now_s - before_s))
    await client.close()
    return {"p50": statistics.median(took_us)}


def turn_rows(samples: Samples, job: str) -> list[Row]:
    ours, bare, _ = ([one["p50"] for one in samples[job, name]] for name in DEVICES)
    median = paired(f"{job}: median page", ours, bare, "us", "no prefetching", None, True)
    return [median, *rate_rows(samples, job, goal=LEAST)]


def rates(hits: int, waited: int, prefetched: int, late: int) -> dict[str, float]:
    return {
        "hit rate": 100 * hits / max(1, hits + waited),
        "accuracy": 100 * accuracy(hits, prefetched),
        "late": 100 * late / max(1, hits + waited),
        "prefetched": 100 * prefetched / max(1, hits + waited),
    }


def rows(samples: Samples, job: str) -> list[Row]:
    scan = not job.startswith("random")
    most = MOST if scan else None
    ours, bare, near = ([one["p50"] for one in samples[job, name]] for name in DEVICES)
    made: list[Row] = [
        paired(f"{job}: median page", ours, near, "us", "local cache", most, True),
        paired(f"{job}: median page", ours, bare, "us", "no prefetching", None, True),
        paired(
            f"{job}: device's CPU a page",
            [one["cpu"] for one in samples[job, "tcp"]],
            [one["cpu"] for one in samples[job, "tcp-bare"]],
            "us", "no prefetching", None, True,
        ),
    ]  # fmt: skip
    return made + rate_rows(samples, job, goal=LEAST if scan else None)


def rate_rows(samples: Samples, job: str, goal: float | None) -> list[Row]:
    """Print a row. `goal`: of the hit rate."""
    made: list[Row] = []
    for rate in ("hit rate", "accuracy", "late", "prefetched"):
        middle = statistics.median(one[rate] for one in samples[job, "tcp"])
        wanted = goal if rate == "hit rate" else None
        made.append(Figure(f"{job}: {rate}", middle, 100.0, "%", "all pages", goal=wanted))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one fio run")
    parser.add_argument("--size", type=int, default=128, help="MiB of each device")
    parser.add_argument("--backup-dir", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("not installed: fio (a Debian package)")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(arguments, Path(folder)))
    show("Leap in front of a block device", found)
    if arguments.json is not None:
        write_json(arguments.json, this_command(), found)


if __name__ == "__main__":
    main()
