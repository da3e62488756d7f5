"""The data plane against bare blocking sockets that move the same bytes, between two processes.

4 KiB one-sided writes and reads at depth 1 and 32, the doorbell (a 16-byte frame there and back)
and writes of 100 MB, over shm and tcp; the peer is a hand-written blocking server on a Unix socket
for shm and on loopback TCP for tcp. Rounds are interleaved, figures are medians over rounds.

    python benchmarks/transport.py [--rounds 5] [--loop uvloop|asyncio] [--megabytes 100]
"""

import argparse
import asyncio
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop
from figures import Figure, show

from slackwater.common.transport.base import Channel, Fabric, RemoteRegion, Scattering
from slackwater.common.transport.region import Region
from slackwater.common.transport.shm import ShmFabric
from slackwater.common.transport.tcp import TcpFabric

PAGE = 4096
DEPTH = 32
BATCH = DEPTH // 2
CALLS = 2000
GET, PUT, ECHO = 0, 1, 2
REQUEST = struct.Struct("<IIQ")  # what, length, offset
Sample = dict[str, float]


# The peers: what is simplest and fast, with blocking sockets --------------------------------------


def receive_exactly(sock: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        count = sock.recv_into(into[got : got + (1 << 20)])
        if not count:
            raise EOFError
        got += count


def batch_offsets(first: int) -> list[int]:
    return [(first + number) % 1000 * PAGE for number in range(BATCH)]


def raw_server(address: str, nbytes: int) -> None:
    """GET answers bytes, PUT takes them and answers one byte, ECHO answers itself."""
    unix = address.startswith("/")
    if unix:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    place = address if unix else f"127.0.0.1:{listener.getsockname()[1]}"
    print(place, flush=True)
    sock, _ = listener.accept()
    if not unix:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    slab = memoryview(bytearray(nbytes))
    slab[:] = b"\x01" * nbytes
    head = memoryview(bytearray(REQUEST.size))
    try:
        while True:
            receive_exactly(sock, head)
            what, length, offset = REQUEST.unpack(head)
            if what == GET:
                sock.sendall(slab[offset : offset + length])
            elif what == PUT:
                receive_exactly(sock, slab[offset : offset + length])
                sock.sendall(b"k")
            else:
                sock.sendall(head)
    except (EOFError, ConnectionResetError):
        return


class RawClient:
    def __init__(self, address: str) -> None:
        if address.startswith("/"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(address)
        else:
            host, port = address.split(":")
            self.sock = socket.create_connection((host, int(port)))
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, what: int, offset: int, page: memoryview) -> None:
        head = REQUEST.pack(what, len(page), offset)
        if what == PUT:
            self.sock.sendmsg([head, page])
        else:
            self.sock.sendall(head)

    def take(self, what: int, page: memoryview) -> None:
        if what == GET:
            receive_exactly(self.sock, page)
        else:
            receive_exactly(self.sock, page[: 1 if what == PUT else REQUEST.size])

    def latencies(self, what: int, page: memoryview) -> list[float]:
        taken = []
        for call in range(CALLS):
            begin = time.perf_counter()
            self.ask(what, call % 1000 * PAGE, page)
            self.take(what, page)
            taken.append(time.perf_counter() - begin)
        return taken

    def pipelined(self, what: int, page: memoryview) -> float:
        """Operations per second with DEPTH requests under way."""
        begin = time.perf_counter()
        for call in range(CALLS + DEPTH):
            if call < CALLS:
                self.ask(what, call % 1000 * PAGE, page)
            if call >= DEPTH:
                self.take(what, page)
        return CALLS / (time.perf_counter() - begin)

    def batched(self, what: int) -> float:
        """Measure like `pipelined`, for a program that asks for half of the pages in one call: two
        such calls are under way."""
        pages = memoryview(bytearray(BATCH * PAGE))
        begin = time.perf_counter()
        for first in range(0, CALLS + BATCH, BATCH):
            if first < CALLS:
                self._ask_batch(what, batch_offsets(first), pages)
            if first:
                receive_exactly(self.sock, pages if what == GET else pages[:BATCH])
        return CALLS / (time.perf_counter() - begin)

    def _ask_batch(self, what: int, offsets: list[int], pages: memoryview) -> None:
        parts: list[bytes | memoryview] = []
        for number, offset in enumerate(offsets):
            parts.append(REQUEST.pack(what, PAGE, offset))
            if what == PUT:
                parts.append(pages[number * PAGE : (number + 1) * PAGE])
        sent = self.sock.sendmsg(parts)
        whole = sum(map(len, parts))
        if sent < whole:
            self.sock.sendall(b"".join(parts)[sent:])

    def bulk(self, data: memoryview) -> float:
        begin = time.perf_counter()
        self.sock.sendall(REQUEST.pack(PUT, len(data), 0))
        self.sock.sendall(data)
        receive_exactly(self.sock, memoryview(bytearray(1)))
        return len(data) / (time.perf_counter() - begin) / 1e9


# Ours ---------------------------------------------------------------------------------------------


def fabric_of(kind: str) -> Fabric:
    return ShmFabric() if kind == "shm" else TcpFabric()


async def our_server(kind: str, address: str, nbytes: int) -> None:
    """Grants one region; answers every frame with itself."""
    region = Region.create(nbytes, "bench", prefault=True)

    async def on_channel(channel: Channel) -> None:
        channel.send(channel.grant(region))
        while True:
            channel.send(await channel.receive())

    async def on_handover(given: Region, _note: bytes) -> None:
        given.close()

    listener = await fabric_of(kind).listen(address, lambda _hello: None, on_channel, on_handover)
    print(listener.address, flush=True)
    await asyncio.sleep(3600)


class OurClient:
    def __init__(self, channel: Channel, remote: RemoteRegion) -> None:
        self.channel, self.remote = channel, remote

    def call(self, what: int, page: memoryview) -> Callable[[int], Awaitable[object]]:
        channel, remote = self.channel, self.remote

        async def ring(_offset: int) -> None:
            channel.send(b"0123456789abcdef")
            await channel.receive()

        if what == GET:
            return lambda offset: channel.read(remote, offset, page)
        if what == PUT:
            return lambda offset: channel.write(page, remote, offset)
        return ring

    async def latencies(self, what: int, page: memoryview) -> list[float]:
        taken, one = [], self.call(what, page)
        for number in range(CALLS):
            begin = time.perf_counter()
            await one(number % 1000 * PAGE)
            taken.append(time.perf_counter() - begin)
        return taken

    async def pipelined(self, what: int) -> float:
        numbers = iter(range(CALLS))

        async def worker() -> None:
            one = self.call(what, memoryview(bytearray(PAGE)))
            for number in numbers:
                await one(number % 1000 * PAGE)

        begin = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(DEPTH)))
        return CALLS / (time.perf_counter() - begin)

    async def batched(self, what: int) -> float:
        """Measure batches as the raw client does; for a channel that is Scattering."""
        channel = self.channel
        assert isinstance(channel, Scattering)
        firsts = iter(range(0, CALLS, BATCH))

        async def worker() -> None:
            pages = memoryview(bytearray(BATCH * PAGE))
            for first in firsts:
                if what == GET:
                    await channel.read_scattered(self.remote, batch_offsets(first), PAGE, pages)
                else:
                    await channel.write_scattered(pages, self.remote, batch_offsets(first), PAGE)

        begin = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(DEPTH // BATCH)))
        return CALLS / (time.perf_counter() - begin)

    async def bulk(self, data: memoryview) -> float:
        begin = time.perf_counter()
        await self.channel.write(data, self.remote, 0)
        self.channel.send(b"done")
        await self.channel.receive()
        return len(data) / (time.perf_counter() - begin) / 1e9


# Both, in turn ------------------------------------------------------------------------------------

NAMES = {GET: "read 4 KiB", PUT: "write 4 KiB", ECHO: "doorbell there and back"}


def quantiles(name: str, taken: list[float]) -> Sample:
    taken.sort()
    return {
        f"{name} p50": taken[len(taken) // 2] * 1e6,
        f"{name} p99": taken[len(taken) * 99 // 100] * 1e6,
    }


async def one_round(ours: OurClient, raw: RawClient, data: memoryview) -> tuple[Sample, Sample]:
    page = memoryview(bytearray(PAGE))
    mine: Sample = {}
    peers: Sample = {}
    for what, name in NAMES.items():
        mine |= quantiles(name, await ours.latencies(what, page))
        peers |= quantiles(name, raw.latencies(what, page))
    for what in (GET, PUT):
        mine[f"{NAMES[what]} depth {DEPTH}"] = await ours.pipelined(what)
        peers[f"{NAMES[what]} depth {DEPTH}"] = raw.pipelined(what, page)
    size = f"write {len(data) / 1e6:.0f} MB"
    mine[size] = await ours.bulk(data)
    peers[size] = raw.bulk(data)
    return mine, peers


def spawn(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


async def compare(kind: str, rounds: int, nbytes: int, loop: str) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        unix = kind == "shm"
        mine = str(Path(folder) / "ours") if unix else "127.0.0.1:0"
        bare = str(Path(folder) / "raw") if unix else "tcp"
        server, address = spawn(kind, mine, str(nbytes), loop)
        peer, raw_address = spawn("raw", bare, str(nbytes), loop)
        try:
            channel = await fabric_of(kind).connect(address, b"", deadline_s=10)
            ours = OurClient(channel, await channel.open(await channel.receive()))
            raw = RawClient(raw_address)
            data = memoryview(bytearray(b"\x02" * nbytes))
            await one_round(ours, raw, data)  # Warm up: first touch, caches, slow start.
            samples = [await one_round(ours, raw, data) for _ in range(rounds)]
            await channel.close()
            raw.sock.close()
        finally:
            for process in (server, peer):
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
    figures = []
    for name in samples[0][0]:
        latency = name.endswith(("p50", "p99"))
        figures.append(
            Figure(
                f"{kind} {name}",
                statistics.median(sample[0][name] for sample in samples),
                statistics.median(sample[1][name] for sample in samples),
                "us" if latency else "GB/s" if "MB" in name else "op/s",
                "Unix socket" if unix else "TCP socket",
                lower_is_better=latency,
            )
        )
    return figures


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        kind, address, nbytes, loop = sys.argv[2:6]
        if kind == "raw":
            raw_server(address, int(nbytes))
        else:
            run = uvloop.run if loop == "uvloop" else asyncio.run
            run(our_server(kind, address, int(nbytes)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--megabytes", type=int, default=100)
    options = parser.parse_args()
    run = uvloop.run if options.loop == "uvloop" else asyncio.run
    for kind in ("shm", "tcp"):
        figures = run(compare(kind, options.rounds, options.megabytes * 1_000_000, options.loop))
        show(f"{kind} on {options.loop} against blocking sockets", figures)


if __name__ == "__main__":
    main()
