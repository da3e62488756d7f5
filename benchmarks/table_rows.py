"""Rows of a sparse table, read and added to: beside Redis, and an array under a lock.

    python benchmarks/table_rows.py [--rounds 5] [--json FILE]

20,000 rows of 300 float32 in one aggregator; ids at random. *get* reads rows: one-sided where the
table is mapped (shm), from afar over tcp. *update* adds to rows, and returns once that is applied;
each update is a batch that counts once, whoever is killed. Redis (redis-server over a Unix socket,
no persistence) is asked by requests that were encoded before, in one pipeline: MGET; SET, which
replaces; and a script that adds, as no command does. The array is shared by processes under a lock,
as people write it: numpy's take and add.at. *counts*: 20,000 entries (word, topic, +-1) of Zipf's
law at 100 topics, through a task's cache, beside HINCRBY in a pipeline.

The goals are those of research for ps-lite and Redis; ps-lite itself is not asked here.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from multiprocessing import Lock
from pathlib import Path
from typing import Any, Final

import numpy as np
from figures import Figure, Row, Skipped, paired, show, write_json
from transport import receive_exactly

from slackwater.agent.table_agent import TableAgent
from slackwater.agent.table_rows import RowUpdates
from slackwater.agent.worker_bucket import TableKind
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.elastic.app import Table
from slackwater.elastic.cache import TableCache

SPARSE = {"t": TableKind(sparse=True)}
ROWS, WIDTH, BATCHES = 20_000, 300, (1, 100, 1000)
WORDS, TOPICS, ENTRIES = 20_000, 100, 20_000
SECONDS: Final = 0.4
DRAWN: Final = 32
"""Batches of ids that calls take in turn."""
PS_LITE_PULL: Final = {1: 28e3, 100: 1.55e6, 1000: 1.3e6}
PS_LITE_PUSH: Final = {1: 29e3, 100: 1.4e6, 1000: 1.1e6}
"""Rows a second, of one client and one server on a machine of this kind, measured before."""
Measure = Callable[[], float]
ADD: Final = """
local a = redis.call('GET', KEYS[1]) local o = {}
for i = 0, #a / 4 - 1 do
  o[i + 1] = struct.pack('<f', struct.unpack('<f', a, i * 4 + 1) + 1.0)
end
redis.call('SET', KEYS[1], table.concat(o))
return 1
"""


def rate(call: Callable[[int], None], units: int) -> float:
    """Return units a second of calls, numbered from 0 on."""
    call(0)
    begun_s, calls = time.perf_counter(), 0
    while (took_s := time.perf_counter() - begun_s) < SECONDS:
        call(calls)
        calls += 1
    return calls * units / took_s


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


class Redis:
    """Requests that are encoded before, and answers whose length is known."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._value = np.ones(WIDTH, np.float32).tobytes()
        for first in range(0, ROWS, 1000):
            keys = range(first, first + 1000)
            self._ask(b"".join(command(b"SET", b"%d" % k, self._value) for k in keys), 5 * 1000)
        self._socket.sendall(command(b"SCRIPT", b"LOAD", ADD.encode()))
        self._sha = self._socket.recv(100).split(b"\r\n")[1]

    def _ask(self, request: bytes, answer_bytes: int) -> memoryview:
        answer = memoryview(bytearray(answer_bytes))
        # Both ways at once: a pipeline is longer than a socket holds.
        sent = 0
        while sent < len(request):
            sent += self._socket.send(request[sent : sent + (1 << 20)])
        receive_exactly(self._socket, answer)
        return answer

    def get(self, ids: Sequence[np.ndarray]) -> Measure:
        count = len(ids[0])
        requests = [command(b"MGET", *(b"%d" % i for i in each)) for each in ids]
        head = len(b"*%d\r\n" % count)
        each_bytes = len(b"$%d\r\n" % len(self._value)) + len(self._value) + 2

        def call(number: int) -> None:
            answer = self._ask(requests[number % len(requests)], head + count * each_bytes)
            framed = np.frombuffer(answer, np.uint8, count * each_bytes, head)
            start = each_bytes - 2 - len(self._value)
            rows = framed.reshape(count, each_bytes)[:, start:-2]
            np.ascontiguousarray(rows).view(np.float32)

        return lambda: rate(call, count)

    def put(self, ids: Sequence[np.ndarray]) -> Measure:
        requests = [
            b"".join(command(b"SET", b"%d" % i, self._value) for i in each) for each in ids[:4]
        ]
        count = len(ids[0])
        return lambda: rate(lambda n: void(self._ask(requests[n % 4], 5 * count)), count)

    def add(self, ids: Sequence[np.ndarray]) -> Measure:
        requests = [
            b"".join(command(b"EVALSHA", self._sha, b"1", b"%d" % i) for i in each)
            for each in ids[:4]
        ]
        count = len(ids[0])
        return lambda: rate(lambda n: void(self._ask(requests[n % 4], 4 * count)), count)

    def count(self, words: np.ndarray, topics: np.ndarray) -> Measure:
        """HINCRBY of 1,000 entries at a time."""
        pairs = list(zip(words[:1000].tolist(), topics[:1000].tolist(), strict=True))
        more, less = (
            b"".join(command(b"HINCRBY", b"w%d" % w, b"%d" % t, by) for w, t in pairs)
            for by in (b"1", b"-1")
        )

        def call(number: int) -> None:
            self._socket.sendall(less if number % 2 else more)
            lines = 0
            while lines < len(pairs):
                lines += self._socket.recv(1 << 16).count(b"\n")

        return lambda: rate(call, len(pairs))


def void(value: object) -> None:
    """Drop what a call returned."""


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[Redis]:
    path = folder / "redis"
    server = subprocess.Popen(
        ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder],
        stdout=subprocess.DEVNULL,
    )
    try:
        until_s = time.monotonic() + 10.0
        while not path.exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        yield Redis(str(path))
    finally:
        server.terminate()
        server.wait()


class Locked:
    """An array that processes share, under a lock."""

    def __init__(self) -> None:
        self._table = np.frombuffer(mmap(-1, ROWS * WIDTH * 4), np.float32).reshape(ROWS, WIDTH)
        self._table += 1
        self._lock = Lock()

    def get(self, ids: Sequence[np.ndarray]) -> Measure:
        def call(number: int) -> None:
            with self._lock:
                self._table.take(ids[number % len(ids)], 0)

        return lambda: rate(call, len(ids[0]))

    def add(self, ids: Sequence[np.ndarray]) -> Measure:
        delta = np.ones((len(ids[0]), WIDTH), np.float32)

        def call(number: int) -> None:
            with self._lock:
                np.add.at(self._table, ids[number % len(ids)], delta)

        return lambda: rate(call, len(ids[0]))


class Ours:
    def __init__(self, url: str, transport: str, width: int = WIDTH, rows: int = ROWS) -> None:
        self.agent = TableAgent(
            {"t": np.ones((rows, width), np.float32)}, SPARSE, url=url, rank=0, workers=1,
            job=f"rows-{transport}-{width}", transport=transport,
        )  # fmt: skip

    def get(self, ids: Sequence[np.ndarray]) -> Measure:
        return lambda: rate(lambda n: void(self.agent.rows("t", ids[n % len(ids)])), len(ids[0]))

    def add(self, ids: Sequence[np.ndarray]) -> Measure:
        delta = np.full((len(ids[0]), WIDTH), 2.0**-20, np.float32)
        return lambda: rate(
            lambda n: void(self.agent.add({"t": RowUpdates(ids[n % len(ids)], delta)})), len(ids[0])
        )

    def count(self, words: np.ndarray, topics: np.ndarray) -> Measure:
        """Entries as a task's kernel leaves them, summed by row, through the cache."""
        tables = {"t": Table(WORDS, TOPICS, dtype="int32", sparse=True)}
        cache = TableCache(tables, self.agent.newest, self.agent.rows)
        rows, at = np.unique(words, return_inverse=True)
        flat = at * TOPICS + topics

        def call(number: int) -> None:
            sign = -1.0 if number % 2 else 1.0
            sums = np.bincount(flat, minlength=len(rows) * TOPICS).astype(np.float32)
            cache.update("t", sign * sums.reshape(len(rows), TOPICS), rows)
            cache.complete()
            self.agent.add(cache.log)
            cache.sent()

        return lambda: rate(call, len(words))


def measures(ours: dict[str, Ours], peers: dict[str, Any]) -> dict[str, dict[str, Measure]]:
    """Name each row, and what is measured for it, by contender."""
    rng, made = np.random.default_rng(0), {}
    for batch in BATCHES:
        ids = [rng.choice(ROWS, batch, replace=False) for _ in range(DRAWN)]
        for transport, own in ours.items():
            if transport != "counts":
                made[f"get, {transport}, {batch} rows"] = {
                    "ours": own.get(ids),
                    **{name: peer.get(ids) for name, peer in peers.items()},
                }
        made[f"update, shm, {batch} rows"] = {
            "ours": ours["shm"].add(ids),
            **{name: peer.add(ids) for name, peer in peers.items()},
            **({"redis SET": peers["redis"].put(ids)} if "redis" in peers else {}),
        }
        made[f"update, tcp, {batch} rows"] = {
            "ours": ours["tcp"].add(ids),
            "lock": peers["lock"].add(ids),
        }
    words = rng.zipf(1.3, ENTRIES).clip(1, WORDS) - 1
    topics = rng.integers(0, TOPICS, ENTRIES)
    made[f"counts, shm, {ENTRIES} entries"] = {
        "ours": ours["counts"].count(words, topics),
        **({"redis HINCRBY": peers["redis"].count(words, topics)} if "redis" in peers else {}),
    }
    return made


PEERS: Final = {"redis": "Redis MGET or script", "lock": "array and lock"}
GOALS: Final = {
    ("get, shm, 100 rows", "redis"): 5.0, ("get, shm, 1000 rows", "redis"): 5.0,
    ("update, shm, 1000 rows", "redis"): 50.0, ("update, shm, 1000 rows", "redis SET"): 8.0,
    (f"counts, shm, {ENTRIES} entries", "redis HINCRBY"): 50.0,
}  # fmt: skip


def figures(seen: dict[str, dict[str, list[float]]]) -> list[Row]:
    rows: list[Row] = []
    for name, each in seen.items():
        ours = each.pop("ours")
        rows += [
            paired(name, ours, peer, "1/s", PEERS.get(who, who), GOALS.get((name, who)))
            for who, peer in each.items()
        ]
        rows += against_ps_lite(name, ours)
    return rows


def against_ps_lite(name: str, ours: Sequence[float]) -> list[Row]:
    what, transport, size = name.split(", ")
    batch = int(size.split()[0])
    if what == "counts":
        return [Figure(name, float(np.median(ours)), 20e6, "1/s", "goal", 1.0)]
    goals = {
        ("get", "shm"): 20.0 if batch == 1 else 3.0,
        ("get", "tcp"): 0.8,
        ("update", "shm"): 1.0,
    }
    if (what, transport) not in goals or (batch != 1000 and what != "get"):
        return []
    peer = (PS_LITE_PULL if what == "get" else PS_LITE_PUSH)[batch]
    goal = goals[what, transport]
    return [Figure(name, float(np.median(ours)), peer, "1/s", "ps-lite, before", goal)]


async def run(rounds: int, folder: Path) -> list[Row]:
    options = ClusterOptions(controllers=1, aggregators=1)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        peers: dict[str, Any] = {"lock": Locked()}
        if shutil.which("redis-server") is not None:
            peers["redis"] = stack.enter_context(redis(folder))
        else:
            rows.append(Skipped("all beside Redis", "redis-server is not installed"))
        async with EmbeddedCluster(options) as cluster:
            seen = await asyncio.to_thread(compare, cluster.url, peers, rounds)
    return rows + figures(seen)


def compare(url: str, peers: dict[str, Any], rounds: int) -> dict[str, dict[str, list[float]]]:
    ours = {
        "shm": Ours(url, "shm"), "tcp": Ours(url, "tcp"),
        "counts": Ours(url, "shm", TOPICS, WORDS),
    }  # fmt: skip
    found = measures(ours, peers)
    seen = {name: {who: list[float]() for who in each} for name, each in found.items()}
    for turn in range(rounds):
        for name, each in found.items():
            for who, measure in each.items():
                seen[name][who].append(measure())
        print(f"round {turn + 1} of {rounds}", flush=True)
    for own in ours.values():
        own.agent.close()
    return seen


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        rows = asyncio.run(run(options.rounds, Path(folder)))
    show(f"Rows of a sparse table, {ROWS:,} x {WIDTH} float32", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/table_rows.py", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
