"""4 KiB one-sided reads and writes: ours over shm and tcp, a raw ping-pong, Redis's GET and SET.

The raw ping-pong is transport.py's blocking server, which moves the same bytes over a Unix socket
(beside shm) or loopback TCP (beside tcp). Redis (redis-server, no persistence) is asked over a Unix
socket by the leanest client there is: one socket, RESP written by hand, values of 4 KiB. At depth
32 all three keep 32 requests under way: each asked for by itself, and in batches of 16 (two at a
time), for which ours has `read_scattered` and `write_scattered` over tcp. Rounds are interleaved;
medians over rounds.

    python benchmarks/one_sided.py [--rounds 7] [--json FILE]
"""

import argparse
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from figures import Figure, Row, Skipped, favour, show, spread, write_json
from transport import (
    BATCH,
    CALLS,
    DEPTH,
    GET,
    NAMES,
    PAGE,
    PUT,
    OurClient,
    RawClient,
    Sample,
    fabric_of,
    quantiles,
    receive_exactly,
    spawn,
)

from slackwater.common.transport.base import Scattering

SLAB_BYTES = 8 * 1024 * 1024
KEYS = 1000
RAW_GOAL = 1.5


class RedisClient:
    """Two commands of RESP on one blocking socket."""

    def __init__(self, address: str | tuple[str, int]) -> None:
        unix = isinstance(address, str)
        self._sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self._sock.connect(address)
        if not unix:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._keys = [b"$4\r\n%04d\r\n" % number for number in range(KEYS)]
        self._answer = memoryview(bytearray(len(b"$4096\r\n") + PAGE + 2))
        value = memoryview(bytearray(b"\x01" * PAGE))
        for number in range(KEYS):
            self.ask(PUT, number, value)
            self.take(PUT)

    def ask(self, what: int, number: int, page: memoryview) -> None:
        key = self._keys[number]
        if what == GET:
            self._sock.sendall(b"*2\r\n$3\r\nGET\r\n" + key)
        else:
            head = b"*3\r\n$3\r\nSET\r\n" + key + b"$4096\r\n"
            self._sock.sendmsg([head, page, b"\r\n"])

    def take(self, what: int) -> None:
        """A value of 4 KiB, or +OK."""
        receive_exactly(self._sock, self._answer if what == GET else self._answer[:5])

    def latencies(self, what: int, page: memoryview) -> list[float]:
        taken = []
        for call in range(CALLS):
            begun_s = time.perf_counter()
            self.ask(what, call % KEYS, page)
            self.take(what)
            taken.append(time.perf_counter() - begun_s)
        return taken

    def pipelined(self, what: int, page: memoryview) -> float:
        begun_s = time.perf_counter()
        for call in range(CALLS + DEPTH):
            if call < CALLS:
                self.ask(what, call % KEYS, page)
            if call >= DEPTH:
                self.take(what)
        return CALLS / (time.perf_counter() - begun_s)

    def batched(self, what: int) -> float:
        """Measure batches as the raw client does."""
        page = bytes([1]) * PAGE
        answers = memoryview(bytearray(BATCH * len(self._answer if what == GET else b"+OK\r\n")))
        begun_s = time.perf_counter()
        for first in range(0, CALLS + BATCH, BATCH):
            if first < CALLS:
                keys = [self._keys[(first + number) % KEYS] for number in range(BATCH)]
                if what == GET:
                    parts = [b"*2\r\n$3\r\nGET\r\n" + key for key in keys]
                else:
                    parts = [
                        part
                        for key in keys
                        for part in (b"*3\r\n$3\r\nSET\r\n" + key + b"$4096\r\n", page, b"\r\n")
                    ]
                self._sock.sendall(b"".join(parts))
            if first:
                receive_exactly(self._sock, answers)
        return CALLS / (time.perf_counter() - begun_s)

    def close(self) -> None:
        self._sock.close()


@contextmanager
def redis(folder: str) -> Iterator[dict[str, RedisClient]]:
    """Clients of one server, over a Unix socket and over TCP; none where it is not installed."""
    server = shutil.which("redis-server")
    if server is None:
        yield {}
        return
    path = str(Path(folder) / "redis")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [server, "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", path,
         "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    try:
        for _ in range(500):
            if Path(path).exists():
                break
            time.sleep(0.01)
        clients = {"Redis": RedisClient(path), "Redis, TCP": RedisClient(("127.0.0.1", port))}
        yield clients
        for client in clients.values():
            client.close()
    finally:
        process.terminate()
        process.wait()


Party = OurClient | RawClient | RedisClient


async def sample(party: Party) -> Sample:
    page = memoryview(bytearray(PAGE))
    taken: Sample = {}
    for what in (GET, PUT):
        name = NAMES[what]
        if isinstance(party, OurClient):
            taken |= quantiles(name, await party.latencies(what, page))
            taken[f"{name}, depth 1"] = CALLS / await _seconds(party, what, page)
            taken[f"{name}, depth {DEPTH}"] = await party.pipelined(what)
            if isinstance(party.channel, Scattering):
                taken[f"{name}, depth {DEPTH} in batches"] = await party.batched(what)
        else:
            taken |= quantiles(name, party.latencies(what, page))
            begun_s = time.perf_counter()
            party.latencies(what, page)
            taken[f"{name}, depth 1"] = CALLS / (time.perf_counter() - begun_s)
            taken[f"{name}, depth {DEPTH}"] = party.pipelined(what, page)
            taken[f"{name}, depth {DEPTH} in batches"] = party.batched(what)
    return taken


async def _seconds(party: OurClient, what: int, page: memoryview) -> float:
    begun_s = time.perf_counter()
    await party.latencies(what, page)
    return time.perf_counter() - begun_s


async def compare(kind: str, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, redis(folder) as stores:
        unix = kind == "shm"
        mine = str(Path(folder) / "ours") if unix else "127.0.0.1:0"
        bare = str(Path(folder) / "raw") if unix else "tcp"
        server, address = spawn(kind, mine, str(SLAB_BYTES), "uvloop")
        peer, raw_address = spawn("raw", bare, str(SLAB_BYTES), "uvloop")
        try:
            channel = await fabric_of(kind).connect(address, b"", deadline_s=10)
            ours = OurClient(channel, await channel.open(await channel.receive()))
            parties: dict[str, Party] = {"ours": ours, "raw": RawClient(raw_address)}
            parties |= {name: it for name, it in stores.items() if name == "Redis" or not unix}
            favour()
            samples: dict[str, list[Sample]] = {name: [] for name in parties}
            for turn in range(rounds + 1):
                for name, party in parties.items():
                    got = await sample(party)
                    if turn:  # The first one warms up.
                        samples[name].append(got)
            await channel.close()
            parties["raw"].sock.close()  # type: ignore[union-attr]
        finally:
            for process in (server, peer):
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
    return [row for name in samples["ours"][0] for row in against(kind, name, samples)]


def against(kind: str, name: str, samples: dict[str, list[Sample]]) -> list[Row]:
    """Times at most 1.5 of a raw socket's and below Redis's; rates the other way round."""
    latency = "depth" not in name
    mine = [taken[name] for taken in samples["ours"]]
    rows: list[Row] = []
    for peer in ("raw", "Redis", "Redis, TCP") if kind == "tcp" else ("raw", "Redis"):
        if peer not in samples:
            rows.append(Skipped(f"{kind} {name} against {peer}", "redis-server is not installed"))
            continue
        goal = RAW_GOAL if peer == "raw" else 1.0
        theirs = statistics.median(taken[name] for taken in samples[peer])
        rows.append(
            Figure(
                f"{kind} {name}",
                statistics.median(mine),
                theirs,
                "us" if latency else "op/s",
                peer,
                goal if latency else 1.0 / goal,
                latency,
                spread=spread(mine),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for kind in ("shm", "tcp"):
        got = uvloop.run(compare(kind, options.rounds))
        show(f"{kind}: 4 KiB against a raw socket and Redis", got)
        rows += got
    if options.json is not None:
        write_json(options.json, "python benchmarks/one_sided.py", rows)


if __name__ == "__main__":
    main()
