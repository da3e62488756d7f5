"""Encrypted connections between hosts against clear ones, and against a MAC for each frame.

First the floors, on one core: TLS 1.3 in memory, each direction; HMAC-SHA-256 and BLAKE2b of frames
of 1 MiB. Then writes of 100 MB over tls and over tcp, the peer in its own process, interleaved.

    python benchmarks/tls.py [--rounds 5] [--megabytes 100]
"""

import argparse
import asyncio
import hashlib
import hmac
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from figures import Figure, show

from slackwater.common.bus.access import Tls
from slackwater.common.transport.base import Channel
from slackwater.common.transport.region import Region
from slackwater.common.transport.tcp import TcpFabric

GIB = 1024**3
MIB = 1024**2
FLOOR_S = 0.5
ROUNDS = 400
KEY = b"k" * 32
OPENSSL = (
    "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
    "-nodes", "-subj", "/CN=benchmark", "-addext", "subjectAltName=IP:127.0.0.1",
)  # fmt: skip


def fabric_of(kind: str, folder: Path) -> TcpFabric:
    if kind == "tcp":
        return TcpFabric()
    return TcpFabric(tls=tls_of(folder).ends())


def tls_of(folder: Path) -> Tls:
    return Tls(ca=f"{folder}/pem", certificate=f"{folder}/pem", key=f"{folder}/key")


# The floors ---------------------------------------------------------------------------------------


def rate(work: Callable[[], object], nbytes: int) -> float:
    """Return bytes a second of repeated `work`, each of so many."""
    count, began_s = 0, time.process_time()
    while (took_s := time.process_time() - began_s) < FLOOR_S:
        work()
        count += 1
    return count * nbytes / took_s


class InMemory:
    """Both ends of a session, and nothing between."""

    def __init__(self, folder: Path) -> None:
        ends = tls_of(folder).ends()
        assert ends.accepts is not None
        assert ends.connects is not None
        self.there, self.back = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.near = ends.connects.wrap_bio(self.back, self.there, server_hostname="127.0.0.1")
        self.far = ends.accepts.wrap_bio(self.there, self.back, server_side=True)
        for end in (self.near, self.far, self.near, self.far):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
        self.data, self.into = memoryview(bytes(MIB)), bytearray(MIB)

    def encrypt(self) -> bytes:
        sent = 0
        while sent < MIB:
            sent += self.near.write(self.data[sent:])
        return self.there.read()

    def round(self) -> tuple[float, float]:
        """Return the seconds to encrypt a MiB, and to decrypt it."""
        began_s = time.process_time()
        sealed = self.encrypt()
        encrypted_s = time.process_time()
        self.there.write(sealed)
        got, into = 0, memoryview(self.into)
        while got < MIB:
            read: Any = self.far.read(MIB - got, into[got:])
            got += int(read)
        return encrypted_s - began_s, time.process_time() - encrypted_s

    def rates(self) -> tuple[float, float]:
        encrypted_s, decrypted_s = zip(*(self.round() for _ in range(ROUNDS)), strict=True)
        return ROUNDS * MIB / sum(encrypted_s), ROUNDS * MIB / sum(decrypted_s)


# Over a network -----------------------------------------------------------------------------------


async def serve(kind: str, folder: Path, nbytes: int) -> None:
    region = Region.create(nbytes, "target")

    async def on_channel(channel: Channel) -> None:
        channel.send(channel.grant(region))
        while True:
            channel.send(await channel.receive())

    async def refuse(given: Region, _note: bytes) -> None:
        raise AssertionError("none is handed over")

    fabric = fabric_of(kind, folder)
    listener = await fabric.listen("127.0.0.1:0", lambda _hello: None, on_channel, refuse)
    print(listener.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await listener.close()
    region.close()


async def compare(folder: Path, rounds: int, nbytes: int) -> dict[str, list[float]]:
    """Return bytes a second of whole writes, by kind."""
    taken: dict[str, list[float]] = {"tls": [], "tcp": []}
    data = memoryview(bytes(nbytes))
    peers, remotes, channels = [], {}, {}
    for kind in taken:
        command = [sys.executable, __file__, "--serve", kind, str(folder), str(nbytes)]
        peer = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        peers.append(peer)
        assert peer.stdout is not None
        address = (await peer.stdout.readline()).decode().strip()
        channel = await fabric_of(kind, folder).connect(address, b"", deadline_s=30)
        channels[kind] = channel
        remotes[kind] = await channel.open(await channel.receive())
    for number in range(rounds + 1):
        for kind, remote in remotes.items():
            began_s = time.perf_counter()
            await channels[kind].write(data, remote, 0)
            channels[kind].send(b"done")
            await channels[kind].receive()
            if number:  # The first one warms up.
                taken[kind].append(nbytes / (time.perf_counter() - began_s))
    for channel in channels.values():
        await channel.close()
    for peer in peers:
        assert peer.stdin is not None
        peer.stdin.close()
        await peer.wait()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        kind, folder, nbytes = options.serve
        uvloop.run(serve(kind, Path(folder), int(nbytes)))
        return
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        subprocess.run([*OPENSSL, "-keyout", folder / "key", "-out", folder / "pem"], check=True)
        frame = bytes(MIB)
        encrypted, decrypted = InMemory(folder).rates()
        mac = rate(lambda: hmac.digest(KEY, frame, "sha256"), MIB)
        blake = rate(lambda: hashlib.blake2b(frame, key=KEY, digest_size=16), MIB)
        taken = uvloop.run(compare(folder, options.rounds, options.megabytes * 1_000_000))
    tls, tcp = (statistics.median(taken[kind]) / GIB for kind in ("tls", "tcp"))
    ratios = tuple(a / b for a, b in zip(taken["tls"], taken["tcp"], strict=True))
    floor = min(encrypted, decrypted) / GIB
    unit, sha = "GiB/s", "HMAC-SHA-256"
    figures = [
        Figure("encrypt, one core", encrypted / GIB, mac / GIB, unit, sha, 1.0),
        Figure("decrypt, one core", decrypted / GIB, mac / GIB, unit, sha, 1.0),
        Figure("encrypt, one core", encrypted / GIB, blake / GIB, unit, "BLAKE2b", 1.0),
        Figure(
            f"writes of {options.megabytes} MB", tls, tcp, unit, "tcp", floor=floor, ratios=ratios
        ),
    ]
    show("TLS between hosts", figures)


if __name__ == "__main__":
    main()
