"""Clients of a device that lie: lengths that do not fit, requests of any kind with any flags, half
of them, answers that nobody reads. Another client's pages are right meanwhile, and nothing stays.
"""

import asyncio
import contextlib
import multiprocessing
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from slackwater.common.base import limits
from slackwater.loadgen.memory.checker import PAGE_BYTES, Checker
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.memory.nbd import protocol as nbd

MIB = 1024 * 1024
SIZE = 4 * MIB
OWN = range(0, 64)
"""Pages of the honest client: the others may be written by anybody who may open the socket."""
AT_ONCE = 4
BURST = 64
KINDS = (*range(10), 0xFFFF)
OFFSETS = (0, 1, 4095, SIZE - 1, SIZE, SIZE + 1, 2**31, 2**32, 2**63 - 4096, 2**63, 2**64 - 1)
LENGTHS = (0, 1, 511, 4096, 65536, SIZE, 32 * MIB, 32 * MIB + 1, 2**31, 2**32 - 1)
GROWS_BYTES = 64 * MIB
POOLED = 16
"""Threads of pools, which begin with use and stay."""


def request(rng: random.Random) -> bytes:
    """One request, most of it right, none for a page of the honest client that would change it."""
    kind, flags = rng.choice(KINDS), rng.choice((0, 0, 0, 1, 2, 4, 8, 0xFFFF))
    page = rng.randrange(OWN.stop, SIZE // PAGE_BYTES - 16)
    offset, length = page * PAGE_BYTES, rng.randint(1, 16) * PAGE_BYTES
    magic = nbd.REQUEST_MAGIC if rng.random() < 0.98 else rng.getrandbits(32)
    if rng.random() < 0.3:
        offset, length = rng.choice(OFFSETS[3:]), rng.choice(LENGTHS)
    elif rng.random() < 0.2:
        offset, length = offset + rng.randrange(PAGE_BYTES), rng.randrange(1, PAGE_BYTES)
    payload = b""
    if kind == nbd.WRITE:
        sent = min(length, 256 * 1024)
        payload = bytes(sent if rng.random() < 0.9 else rng.randrange(sent + 1))
        if sent != length and rng.random() < 0.9:  # Not many, as each ends its connection.
            length = sent
    return nbd.REQUEST.pack(magic, flags, kind, rng.getrandbits(64), offset, length) + payload


def greeting(rng: random.Random) -> bytes:
    """Flags and options, of which each length may lie; OPT_GO comes last, mostly."""
    said = nbd.CLIENT_FLAGS.pack(3 if rng.random() < 0.9 else rng.getrandbits(32))
    for _ in range(rng.randrange(4)):
        option = rng.choice((*range(11), 2**31, 2**32 - 1))
        body = rng.randbytes(rng.choice((0, 4, 6, 40, 9000)))
        length = len(body) if rng.random() < 0.8 else rng.choice((0, 1, 8193, 2**31, 2**32 - 1))
        said += nbd.OPTION.pack(nbd.OPTION_MAGIC, option, length) + body
    if rng.random() < 0.2:
        return said[: rng.randrange(len(said) + 1)]
    return said


def opened() -> bytes:
    body = bytes(6)
    go = nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.OPT_GO, len(body)) + body
    return nbd.CLIENT_FLAGS.pack(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES) + go


def attack(path: Path, rng: random.Random) -> int:
    """Be one hostile connection; return how many requests it sent."""
    burst = [request(rng) for _ in range(BURST)]
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.settimeout(2.0)
        sock.connect(str(path))
        if rng.random() < 0.2:
            sock.sendall(greeting(rng))
        else:
            sock.sendall(opened())
        said = b"".join(burst)
        sock.sendall(said if rng.random() < 0.8 else said[: rng.randrange(len(said))])
        reads = rng.random()
        if reads < 0.5:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(MIB):
                continue
        elif reads < 0.7:
            sock.recv(rng.randrange(1, 4096))
    return len(burst)


def attacks(path: Path, seed: int, share: int) -> int:
    """Be hostile connections, one after another, until so many requests were sent."""
    rng, sent = random.Random(seed), 0
    while sent < share:
        sent += attack(path, rng)
    return sent


@contextlib.contextmanager
def nothing_stays() -> Iterator[psutil.Process]:
    """At the end there are as many descriptors and threads as before, but for those of pools, and
    memory has grown by less than GROWS_BYTES."""
    process = psutil.Process()
    files, threads = process.num_fds(), threading.active_count()
    resident = process.memory_info().rss
    yield process
    assert process.num_fds() <= files + 1
    assert threading.active_count() <= threads + POOLED
    assert process.memory_info().rss <= resident + GROWS_BYTES


@pytest.mark.parametrize(
    "count",
    [5_000, pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
async def test_hostile_clients_change_nothing_of_another_and_leave_nothing(
    cluster: Callable[..., Any], count: int
) -> None:
    """Some seconds: each burst goes through a connection and a thread of its own."""
    async with cluster("shm") as c:
        await c.lend(2)
        assembly = await c.export(SIZE)
        path = assembly.options.socket
        client, checker = await NbdClient.connect(path), Checker()
        done, looks = asyncio.Event(), 0
        for _ in range(limits.DISPATCH_PAGES // len(OWN)):  # Each slot of the ring is touched once.
            await client.write(0, bytes(len(OWN) * PAGE_BYTES))

        async def use() -> None:
            nonlocal looks
            rng = random.Random(5)
            while not done.is_set() or looks < 20:
                page = rng.choice(OWN)
                generation, data = checker.begin(page)
                await client.write(page * PAGE_BYTES, data)
                checker.acknowledged(page, generation)
                for each in checker.written():
                    checker.check(each, await client.read(each * PAGE_BYTES, PAGE_BYTES))
                looks += 1

        using = asyncio.ensure_future(use())
        share = count // AT_ONCE

        async def attacked(seeds: range, share: int) -> int:
            """Be attacked from another process, by so many at a time, until they are gone."""
            at = asyncio.get_running_loop().run_in_executor
            sent = await asyncio.gather(*(at(pool, attacks, path, n, share) for n in seeds))
            await c.until(lambda: assembly.front.clients == 1)
            return sum(sent)

        with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as pool:
            await attacked(range(-AT_ONCE, 0), 4 * BURST)  # Caches fill at first.
            with nothing_stays():
                sent = await attacked(range(AT_ONCE), share)
        done.set()
        await using
        assert sent >= count * 0.99
        assert looks >= 20
        assert assembly.background.failure is None
        await client.close()


@pytest.mark.parametrize("kind", [nbd.READ, nbd.WRITE, nbd.TRIM])
async def test_a_range_whose_end_is_beyond_64_bits_is_refused(
    cluster: Callable[..., Any], raw: Callable[[Path], socket.socket], kind: int
) -> None:
    """Red before: the end was a negative number, which is below any size, and what lies at 2**51
    pages was read: the device's process ended."""
    async with cluster("shm") as c:
        await c.lend(1)
        path = (await c.export(SIZE)).options.socket

        def ask() -> tuple[int, int]:
            with raw(path) as sock:
                sock.sendall(opened())
                offset, length = 2**63 - PAGE_BYTES, 16 * PAGE_BYTES
                payload = bytes(length if kind == nbd.WRITE else 0)
                head = nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, kind, 99, offset, length)
                sock.sendall(head + payload)
                sock.shutdown(socket.SHUT_WR)
                said = b""
                while more := sock.recv(MIB):
                    said += more
            _, error, cookie = nbd.SIMPLE.unpack(said[-nbd.SIMPLE.size :])
            return error, cookie

        wanted = nbd.ENOSPC if kind == nbd.WRITE else nbd.EINVAL
        assert await asyncio.to_thread(ask) == (wanted, 99)
