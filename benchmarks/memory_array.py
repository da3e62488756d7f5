"""Scans of an array four times its local memory against the same scans of plain memory, in one run.

A compiled loop reads every word of one page after the other and notes how long each page took:
sequentially, with a stride of 7 pages, and in random order. The array's pages live in two lenders,
over shm or tcp; the peers are a plain numpy array of the same size, and the array without
prefetching. Rounds are interleaved, figures are medians of rounds of the median page. The hit rate
is Leap's: of the pages that were not here, those that prefetching had brought or was bringing;
`waited` counts those among all pages of the scan that the program still had to wait for.

    python benchmarks/memory_array.py [--rounds 3] [--size 64] [--transport shm,tcp]
        [--json FILE]
"""

import argparse
import asyncio
import os
import secrets
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, accuracy, show, spread, this_command, write_json
from lending import MIB, lenders
from numba import njit, types

from slackwater.memory import RemoteArray

WORDS = 512
SLAB_BYTES = 32 * MIB
STRIDE = 7
MAP_TRIES = 200
clock_gettime: Any = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))


@njit(nogil=True)  # type: ignore[untyped-decorator]
def scan(words: Any, order: Any, took_ns: Any) -> Any:
    """Sum all words, page by page."""
    now = np.zeros(2, np.int64)
    total = 0
    for i in range(order.size):
        clock_gettime(1, now.ctypes.data)
        began = now[0] * 1_000_000_000 + now[1]
        page = words[order[i]]
        for j in range(page.size):
            total += page[j]
        clock_gettime(1, now.ctypes.data)
        took_ns[i] = now[0] * 1_000_000_000 + now[1] - began
    return total


def orders(pages: int) -> dict[str, Any]:
    every = np.arange(pages)
    return {
        "sequential": every,
        f"stride {STRIDE}": np.concatenate([every[i::STRIDE] for i in range(STRIDE)]),
        "random": np.random.default_rng(1).permutation(pages),
    }


def measure(array: Any, order: Any, figures: Any) -> dict[str, float]:
    """Measure one scan; `figures` tells the pager's counters."""
    took_ns = np.zeros(order.size, np.int64)
    before = figures()
    total = int(scan(array, order, took_ns))
    after = figures()
    assert total == array.shape[0] * (array.shape[0] - 1) // 2 * WORDS, "a page was wrong"
    moved = {name: after[name] - before[name] for name in after}
    return {
        "median": statistics.median(took_ns.tolist()) / 1e3,
        "mean": float(took_ns.mean()) / 1e3,
        "hit rate": moved.get("hits", 0) / max(1, moved.get("accesses", 0)),
        "accuracy": accuracy(moved.get("hits", 0), moved.get("prefetched", 0)),
        "waited": moved.get("missed", 0) / order.size,
    }


def fill(array: Any) -> None:
    for page in range(array.shape[0]):
        array[page] = page


def remote(pages: int, url: str, kind: str, window: int, folder: str) -> RemoteArray:
    """Written until all of it is behind slabs: spans are mapped when they are hot."""
    made = RemoteArray(
        (pages, WORDS), np.int64, cache_bytes=pages * 4096 // 4, url=url, transport=kind,
        backup=Path(folder) / f"{kind}-{window}", node="here", window=window,
    )  # fmt: skip
    for _ in range(MAP_TRIES):
        fill(made.array)
        made.flush()
        if made.figures()["remote_pages"] >= pages:
            return made
    raise SystemExit("the lenders did not take the array: is there room for it?")


def rounds(arguments: argparse.Namespace, url: str, kind: str, folder: str) -> list[Figure]:
    pages = arguments.size * MIB // 4096
    plain = np.empty((pages, WORDS), np.int64)
    fill(plain)
    seen: dict[tuple[str, str], list[dict[str, float]]] = {}
    with (
        remote(pages, url, kind, 8, folder) as leap,
        remote(pages, url, kind, 0, folder) as bare,
    ):
        subjects: dict[str, tuple[Any, Any]] = {
            "plain": (plain, dict),
            "leap": (leap.array, leap.figures),
            "bare": (bare.array, bare.figures),
        }
        for array, figures in subjects.values():
            measure(array, np.arange(pages), figures)
        for _ in range(arguments.rounds):
            for name, order in orders(pages).items():
                for subject, (array, figures) in subjects.items():
                    seen.setdefault((name, subject), []).append(measure(array, order, figures))
        del subjects, array
    return rows(seen, kind)


def rows(seen: dict[tuple[str, str], list[dict[str, float]]], kind: str) -> list[Figure]:
    made = []
    for name in dict.fromkeys(name for name, _ in seen):
        ours, plain, bare = (seen[name, subject] for subject in ("leap", "plain", "bare"))
        goal = None if name == "random" else 3.0
        for measure_, peer, peers, most in (
            ("median", "plain memory", plain, goal),
            ("median", "no prefetching", bare, None),
            ("mean", "no prefetching", bare, None),
        ):
            values = [one[measure_] for one in ours]
            made.append(
                Figure(
                    f"{kind}: {name}, {measure_} page", statistics.median(values),
                    statistics.median(one[measure_] for one in peers), "us", peer,
                    goal=most, lower_is_better=True, spread=spread(values),
                )
            )  # fmt: skip
        for rate in ("hit rate", "accuracy", "waited"):
            values = [one[rate] * 100 for one in ours]
            least = 0.95 if rate == "hit rate" and goal else None
            made.append(
                Figure(
                    f"{kind}: {name}, {rate}", statistics.median(values), 100.0, "%",
                    "all pages", goal=least,
                )
            )  # fmt: skip
    return made


async def run(arguments: argparse.Namespace) -> list[Figure]:
    token = secrets.token_hex(16)
    os.environ["SLACKWATER_CLUSTER_TOKEN"] = token
    made: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(
        dir=arguments.backup_dir, prefix="slackwater-"
    ) as backup:  # fmt: skip
        slabs = 4 * max(arguments.size, 32) * MIB // SLAB_BYTES
        async with lenders(Path(folder), 2, SLAB_BYTES, slabs, token) as supervisor:
            for kind in arguments.transport.split(","):
                made += await asyncio.to_thread(rounds, arguments, supervisor.url, kind, backup)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=64, help="MiB; whole slabs of 32")
    parser.add_argument("--transport", default="shm,tcp")
    parser.add_argument("--backup-dir", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments))
    show("Arrays in remote memory", found)
    if arguments.json is not None:
        write_json(arguments.json, this_command(), found)


if __name__ == "__main__":
    main()
