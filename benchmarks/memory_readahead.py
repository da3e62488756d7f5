"""Scans of a block device over tcp with Leap in front of it, without it, and of a local cache.

fio reads single pages at depth 1, one after the other, every seventh, and in random order. All of
them are in two lenders. The local cache is the same device over shm: its pages lie in memory that
it maps, and compiled code answers there as it does for a page that was prefetched. The hit rate is
of the pages that were not at hand: those that prefetching had brought or was bringing; the accuracy
is of the pages that were prefetched; both as the device's heartbeats tell. Rounds are interleaved,
figures are medians.

    python benchmarks/memory_readahead.py [--rounds 5] [--seconds 3] [--size 128] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import secrets
import shutil
import statistics
import tempfile
from pathlib import Path

from figures import Figure, Row, paired, show, this_command, write_json
from lending import MIB, lenders
from memory import LENDERS, SCANS, SLAB_BYTES, Samples, device, sample, until_mapped

from slackwater.common import codec
from slackwater.common.bus.base import Delivery
from slackwater.common.client import Client, connect
from slackwater.schemas import subjects
from slackwater.schemas.memory import DeviceHeartbeat

BEAT_S = 2.2
"""Longer than two heartbeats: what was counted has been told by then."""
DEVICES = {"tcp": ("tcp", 8), "tcp-bare": ("tcp", 0), "shm": ("shm", 8)}
MOST = 3.0
"""Times a page of the local cache, at the median."""
LEAST = 0.95


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
                before = await heard.counted()
                for name, sock in servers.items():
                    found = await asyncio.to_thread(
                        sample, folder, name, sock, job, size, arguments.seconds
                    )
                    samples.setdefault((job, name), []).append(found)
                moved = [b - a for a, b in zip(before, await heard.counted(), strict=True)]
                samples[job, "tcp"][-1] |= rates(*moved)
    return [row for job in SCANS for row in rows(samples, job)]


def rates(hits: int, waited: int, prefetched: int, late: int) -> dict[str, float]:
    return {
        "hit rate": 100 * hits / max(1, hits + waited),
        "accuracy": 100 * hits / max(1, prefetched),
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
    for rate in ("hit rate", "accuracy", "late", "prefetched"):
        middle = statistics.median(one[rate] for one in samples[job, "tcp"])
        goal = LEAST if rate == "hit rate" and scan else None
        made.append(Figure(f"{job}: {rate}", middle, 100.0, "%", "all pages", goal=goal))
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
