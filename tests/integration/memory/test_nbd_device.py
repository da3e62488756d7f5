"""A device over real lenders, through its NBD server, as clients see it."""

import asyncio
import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected, Unavailable
from slackwater.loadgen.memory.checker import PAGE_BYTES, Checker
from slackwater.loadgen.memory.nbd_client import NbdClient
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import writeback
from slackwater.memory.pages.table import counters, page_range
from slackwater.schemas.memory import LenderId
from slackwater.services.slabd.effects import ReleaseSlab

MIB = 1024 * 1024
KINDS = pytest.mark.parametrize("kind", ["shm", "tcp"])
Make = Callable[..., Any]


async def fill(client: NbdClient, checker: Checker, pages: range) -> None:
    """Write each page once, eight at a time."""
    for first in range(pages.start, pages.stop, 8):
        await write(client, checker, range(first, min(first + 8, pages.stop)))


async def write(client: NbdClient, checker: Checker, pages: range) -> None:
    begun = [(page, *checker.begin(page)) for page in pages]
    await client.write(pages.start * PAGE_BYTES, b"".join(data for _, _, data in begun))
    for page, generation, _ in begun:
        checker.acknowledged(page, generation)


async def check(client: NbdClient, checker: Checker, pages: range) -> None:
    data = await client.read(pages.start * PAGE_BYTES, len(pages) * PAGE_BYTES)
    for i, page in enumerate(pages):
        checker.check(page, data[i * PAGE_BYTES : (i + 1) * PAGE_BYTES])


@KINDS
async def test_pages_come_back_from_remote_memory(cluster: Make, kind: str) -> None:
    """Written to disk while unmapped, then to remote memory; read from there."""
    async with cluster(kind) as c:
        await c.lend(2)
        assembly = await c.export(4 * MIB)
        client, checker = await NbdClient.connect(assembly.options.socket), Checker()
        assert client.size == 4 * MIB
        await fill(client, checker, range(0, 1024))
        await c.mapped(4)
        await fill(client, checker, range(0, 1024))
        for first in range(0, 1024, 32):
            await check(client, checker, range(first, first + 32))
        seen = assembly.status.heartbeat(0.0)
        assert seen.read_remote_pages >= 900
        assert seen.lenders == 2
        await client.close()


@KINDS
async def test_requests_cross_the_borders_of_spans_mapped_and_not(cluster: Make, kind: str) -> None:
    """Three slabs for four spans: one request has pages from a slab and from disk."""
    async with cluster(kind) as c:
        await c.lend(1, slabs=3)
        assembly = await c.export(4 * MIB)
        client, checker = await NbdClient.connect(assembly.options.socket), Checker()
        await fill(client, checker, range(0, 1024))
        await c.mapped(3)
        for border in (256, 512, 768):
            await write(client, checker, range(border - 16, border + 16))
            await check(client, checker, range(border - 16, border + 16))
        await check(client, checker, range(100, 1000))
        await client.close()


@KINDS
async def test_eviction_under_load_costs_no_page(cluster: Make, kind: str) -> None:
    """The lender's machine needs its memory back, again and again, while pages are written."""
    async with cluster(kind) as c:
        await c.lend(2)
        assembly = await c.export(2 * MIB)
        client, checker = await NbdClient.connect(assembly.options.socket), Checker()
        rng = random.Random(4)
        stop = asyncio.Event()

        async def use() -> None:
            while not stop.is_set():
                count = rng.choice((8, 8, 8, 64))
                page = rng.randrange(0, 512 - count)
                await write(client, checker, range(page, page + count))
                await check(client, checker, range(page, page + count))

        using = asyncio.ensure_future(use())
        for _ in range(4):
            await c.mapped(2)
            for machine in c.machines:
                machine.others_bytes = machine.total_bytes
            await c.until(lambda: assembly.device.mapped_spans == 0 or using.done())
            for machine in c.machines:
                machine.others_bytes = 0
        stop.set()
        await using
        for page in checker.written():
            await check(client, checker, range(page, page + 1))
        assert c.facts.count("unmapped") >= 8
        await client.close()


async def test_an_eviction_is_answered_within_milliseconds(cluster: Make) -> None:
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(1 * MIB)
        client = await NbdClient.connect(assembly.options.socket)
        await client.write(0, bytes(4096))
        await c.mapped(1)
        [slab] = c.lenders[0].core.having("lent")
        c.machines[0].others_bytes = c.machines[0].total_bytes
        await c.until(lambda: slab.id not in c.lenders[0].core.slabs)
        assert assembly.device.mapped_spans == 0
        assert await client.read(0, 4096) == bytes(4096)
        await client.close()


async def test_a_stopped_device_cannot_read_what_was_taken_from_it(cluster: Make) -> None:
    """The lender revokes by force (fence, then the data): a read that comes later finds the fence
    and goes to disk instead of reading zeros."""
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(1 * MIB)
        client, checker = await NbdClient.connect(assembly.options.socket), Checker()
        await write(client, checker, range(0, 8))
        await c.mapped(1)
        await write(client, checker, range(0, 8))
        await client.flush()
        lender = c.lenders[0]
        [slab] = lender.core.having("lent")
        assembly.lenders.feed = lambda event: None  # Deaf from now on.
        await lender.slabs.release(ReleaseSlab(slab.id, slab.session, slab.generation, forced=True))
        await check(client, checker, range(0, 8))
        assert counters(assembly.device.table)["fenced"] > 0
        await client.close()


async def test_a_lender_that_cannot_be_reached_is_logged_when_that_changes(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster("shm") as c:
        await c.lend(1)
        lender, tried = c.lenders[0], 0
        real = lender.heartbeat
        nowhere = (("shm", str(c.folder / "nobody")),)
        monkeypatch.setattr(
            lender, "heartbeat",
            lambda now_s: msgspec.structs.replace(real(now_s), addresses=nowhere),
        )  # fmt: skip
        with structlog.testing.capture_logs() as logs:
            assembly = await c.export(1 * MIB)
            live = assembly.lenders._live

            async def count(lender: LenderId, addresses: Any) -> None:
                nonlocal tried
                tried += 1
                await live(lender, addresses)

            assembly.lenders._live = count
            async with asyncio.timeout(20):
                while tried < 4:
                    await assembly.device.write_pages(page_range(0, 1), memoryview(bytes(4096)))
                    await asyncio.sleep(0.02)
            monkeypatch.setattr(lender, "heartbeat", real)
            assembly.core._paused.clear()  # It waits longer from time to time.
            await assembly.device.write_pages(page_range(0, 1), memoryview(bytes(4096)))
            await c.mapped(1)
        told = [log["event"] for log in logs if log["event"].startswith("lender.")]
        assert told == ["lender.unreachable", "lender.reached-again"]


async def test_a_cluster_without_room_serves_from_disk(cluster: Make) -> None:
    async with cluster("shm") as c:
        await c.lend(1, slabs=1)
        assembly = await c.export(4 * MIB)
        client, checker = await NbdClient.connect(assembly.options.socket), Checker()
        await fill(client, checker, range(0, 1024))
        await c.until(lambda: "refused" in c.facts)
        await check(client, checker, range(0, 1024))
        assert assembly.device.mapped_spans == 1
        await client.close()


async def test_a_full_disk_is_an_error_and_no_lost_page(cluster: Make) -> None:
    """The backup is on a file system without room: writes say ENOSPC, what was written stays."""
    async with cluster("shm") as c:
        assembly = await c.export(8 * MIB)
        client, checker = await NbdClient.connect(assembly.options.socket), Checker()
        await write(client, checker, range(0, 8))
        await client.flush()
        full = os.open("/dev/full", os.O_WRONLY)
        backup = assembly.device.backup
        kept = os.dup(backup._fd)
        os.dup2(full, backup._fd)
        with pytest.raises(OSError, match="ENOSPC"):
            await client.write(PAGE_BYTES * 100, bytes(PAGE_BYTES))
        with pytest.raises(OSError, match="ENOSPC"):
            await client.write(0, bytes(PAGE_BYTES))
        with pytest.raises(OSError, match="ENOSPC"):
            await client.flush()
        assert assembly.status.heartbeat(0.0).state == "degraded"
        os.dup2(kept, backup._fd)
        await c.until(lambda: backup.failed == 0)
        await client.flush()
        await check(client, checker, range(1, 8))
        await client.close()
        os.close(kept)
        os.close(full)


@KINDS
async def test_odd_offsets_and_lengths(cluster: Make, kind: str) -> None:
    """Any bytes, as a client may that never asked for block sizes; against a plain bytearray."""
    async with cluster(kind) as c:
        await c.lend(1)
        assembly = await c.export(2 * MIB)
        client = await NbdClient.connect(assembly.options.socket, structured=False)
        rng = random.Random(6)
        truth = bytearray(2 * MIB)
        await client.write(0, bytes(8192))
        for number in range(120):
            offset = rng.randrange(0, 2 * MIB - 20_000)
            length = rng.choice((1, 511, 512, 4096, 5000, 12_345))
            what = rng.random()
            if what < 0.5:
                data = rng.randbytes(length)
                await client.write(offset, data, fua=number % 10 == 0)
                truth[offset : offset + length] = data
            elif what < 0.6:
                await client.zero(offset, length)
                truth[offset : offset + length] = bytes(length)
            else:
                assert await client.read(offset, length) == truth[offset : offset + length]
        await c.mapped(2)
        for offset in range(0, 2 * MIB, 65_536):
            assert await client.read(offset, 65_536) == truth[offset : offset + 65_536]
        await client.close()


async def test_small_writes_into_one_page_at_once_keep_each_other(cluster: Make) -> None:
    async with cluster("shm") as c:
        assembly = await c.export(1 * MIB)
        clients = [await NbdClient.connect(assembly.options.socket) for _ in range(4)]
        await asyncio.gather(
            *(clients[part % 4].write(part * 256, bytes([part + 1]) * 256) for part in range(16))
        )
        data = await clients[0].read(0, 4096)
        assert data == b"".join(bytes([part + 1]) * 256 for part in range(16))
        for client in clients:
            await client.close()


async def test_trim_frees_the_disk_and_reads_as_zeros(cluster: Make) -> None:
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(4 * MIB)
        client = await NbdClient.connect(assembly.options.socket)
        await client.write(0, b"x" * MIB)
        await client.flush()
        before = os.stat(assembly.options.backup).st_blocks
        await client.trim(0, MIB)
        assert await client.read(0, MIB) == bytes(MIB)
        assert os.stat(assembly.options.backup).st_blocks < before
        await client.close()


async def test_a_flush_on_one_connection_covers_the_others(cluster: Make) -> None:
    """CAN_MULTI_CONN promises this: after the flush the file has what the other connection
    wrote."""
    async with cluster("shm") as c:
        assembly = await c.export(1 * MIB)
        one = await NbdClient.connect(assembly.options.socket)
        other = await NbdClient.connect(assembly.options.socket)
        assert one.flags & nbd.CAN_MULTI_CONN
        await one.write(8192, b"a" * 4096)
        await other.flush()
        with assembly.options.backup.open("rb") as file:
            file.seek(8192)
            assert file.read(4096) == b"a" * 4096
        await one.close()
        await other.close()


# Clients that do not behave -----------------------------------------------------------------------


def shake(sock: Any) -> None:
    sock.recv(nbd.GREETING.size)
    sock.sendall(nbd.CLIENT_FLAGS.pack(3))
    body = bytes(6)
    sock.sendall(nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.OPT_GO, len(body)) + body)
    got = b""
    while not got.endswith(nbd.option_reply(nbd.OPT_GO, nbd.REP_ACK)):
        got += sock.recv(4096)


def request(kind: int, offset: int, length: int, cookie: int = 1) -> bytes:
    return nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, kind, cookie, offset, length)


def answer(sock: Any) -> tuple[int, int]:
    """(error, cookie) of a simple reply without data."""
    _, error, cookie = nbd.SIMPLE.unpack(sock.recv(nbd.SIMPLE.size))
    return error, cookie


def ended(sock: Any) -> None:
    """The server hung up, whatever it said before."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            continue


async def test_hostile_clients_get_errors_and_stop_nobody(cluster: Make, raw: Make) -> None:
    async with cluster("shm") as c:
        assembly = await c.export(1 * MIB)
        path = assembly.options.socket
        good = await NbdClient.connect(path)
        await good.write(0, b"g" * 4096)

        def bad() -> None:
            for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64), os.urandom(4096)):
                with raw(path) as sock:
                    sock.recv(18)
                    sock.sendall(garbage)
                    ended(sock)
            with raw(path) as sock:  # An option of 4 GiB.
                sock.recv(18)
                sock.sendall(nbd.CLIENT_FLAGS.pack(3))
                sock.sendall(nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.OPT_GO, 2**32 - 1))
                ended(sock)
            with raw(path) as sock:
                shake(sock)
                sock.sendall(request(nbd.READ, 0, 2**31))
                assert answer(sock) == (nbd.EOVERFLOW, 1)
                sock.sendall(request(nbd.READ, 2**62, 4096, 2))
                assert answer(sock) == (nbd.EINVAL, 2)
                sock.sendall(request(nbd.READ, 2**64 - 4096, 4096, 3))
                assert answer(sock) == (nbd.EINVAL, 3)
                sock.sendall(request(nbd.WRITE, MIB - 4096, 8192, 4) + bytes(8192))
                assert answer(sock) == (nbd.ENOSPC, 4)
                sock.sendall(request(nbd.READ, 0, 0, 5))
                assert answer(sock) == (nbd.EINVAL, 5)
                sock.sendall(request(99, 0, 4096, 6))
                assert answer(sock) == (nbd.EINVAL, 6)
                head = nbd.REQUEST_MAGIC, 1 << 9, nbd.WRITE, 8, 0, 512  # An unknown flag.
                sock.sendall(nbd.REQUEST.pack(*head) + bytes(512))
                assert answer(sock) == (nbd.EINVAL, 8)
                sock.sendall(request(nbd.TRIM, 4096, 2**32 - 4096, 7))
                assert answer(sock) == (nbd.EINVAL, 7)
                sock.sendall(request(nbd.WRITE, 0, 2**32 - 1))  # No payload of that size is taken.
                ended(sock)
            with raw(path) as sock:
                shake(sock)
                sock.sendall(b"\0" * 28)
                ended(sock)

        await asyncio.to_thread(bad)
        assert await good.read(0, 4096) == b"g" * 4096
        await good.close()


async def test_a_client_that_never_reads_stops_only_itself(cluster: Make, raw: Make) -> None:
    async with cluster("shm") as c:
        assembly = await c.export(8 * MIB)
        lazy = raw(assembly.options.socket)
        await asyncio.to_thread(shake, lazy)
        await asyncio.to_thread(
            lazy.sendall, b"".join(request(nbd.READ, 0, 8 * MIB, n) for n in range(200))
        )
        [connection] = assembly.front._connections
        await asyncio.sleep(0.5)
        assert connection._open_bytes <= limits.NBD_ITEM_BYTES_MAX, "it is not read any further"
        good = await NbdClient.connect(assembly.options.socket)
        await good.write(0, b"g" * 4096)
        assert await good.read(0, 4096) == b"g" * 4096
        await good.close()
        lazy.close()


async def test_clients_beyond_the_bound_are_turned_away_and_told(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NBD_CONNECTIONS_MAX", 8)
    async with cluster("shm") as c:
        assembly = await c.export(1 * MIB)
        clients = [await NbdClient.connect(assembly.options.socket) for _ in range(8)]
        with pytest.raises(Unavailable, match="8 clients are served, and no more"):
            await NbdClient.connect(assembly.options.socket)
        for client in clients:
            await client.close()
        await c.until(lambda: assembly.front.clients == 0)
        again = await NbdClient.connect(assembly.options.socket)
        await again.close()


async def test_clients_that_never_shake_hands_keep_nobody_out(
    cluster: Make, raw: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not counted as served, and the oldest of too many is cut off."""
    monkeypatch.setattr(limits, "NBD_CONNECTIONS_MAX", 1)
    monkeypatch.setattr(limits, "NBD_HANDSHAKES_MAX", 4)
    async with cluster("shm") as c:
        assembly = await c.export(1 * MIB)
        with contextlib.ExitStack() as stack:
            idle = [
                stack.enter_context(await asyncio.to_thread(raw, assembly.options.socket))
                for _ in range(8)
            ]
            client = await NbdClient.connect(assembly.options.socket)
            await client.write(0, b"g" * 4096)
            await asyncio.to_thread(ended, idle[0])
            await client.close()


async def test_no_thread_of_a_connection_outlives_its_device(cluster: Make) -> None:
    async with cluster("shm") as c:
        assembly = await c.export(1 * MIB)
        clients = [await NbdClient.connect(assembly.options.socket) for _ in range(3)]
        for client in clients:
            await client.write(512, b"g" * 512)
        of_clients = [t for t in threading.enumerate() if t.name.startswith("nbd")]
        assert len(of_clients) == 6
        for client in clients:
            await client.close()
        await assembly.close()
        c.assembly = None
        assert not any(thread.is_alive() for thread in of_clients)


async def test_a_backup_of_another_size_or_in_use_is_refused(cluster: Make, tmp_path: Path) -> None:
    async with cluster("shm") as c:
        await c.export(1 * MIB)
        with pytest.raises(ConfigRejected, match="in use"):
            await c.export(1 * MIB)
        (tmp_path / "backup").rename(tmp_path / "old")
        (tmp_path / "backup").write_bytes(b"something else")
        with pytest.raises(ConfigRejected, match="14 bytes"):
            await c.export(1 * MIB)


async def test_a_swap_device_takes_its_room_at_once(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swap that finds its disk full later is lost memory; so it is refused before it begins."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with cluster("shm") as c:
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(ConfigRejected, match="No space"):
                await c.export(1 * MIB, swap=True)
        assembly = await c.export(1 * MIB, swap=True)
        assert os.stat(assembly.options.backup).st_blocks * 512 >= MIB


async def test_what_a_full_ring_holds_back_comes_through(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still until writes wait for a dispatch entry; nothing is lost."""
    moves = threading.Event()
    write_back = writeback.write_back

    def when_it_moves(table: k.Table, fd: int) -> int:
        moves.wait()
        return int(write_back(table, fd))

    monkeypatch.setattr(writeback, "write_back", when_it_moves)
    async with cluster("shm") as c:
        try:
            assembly = await c.export(4 * MIB)
            assembly.device.table.words[k.SLOTS] = 256
            client, checker = await NbdClient.connect(assembly.options.socket), Checker()
            ranges = [range(first, first + 16) for first in range(0, 1024, 16)]
            writing = asyncio.gather(*(write(client, checker, one) for one in ranges))
            await c.until(lambda: counters(assembly.device.table)["dispatch_full"] > 0)
            assert not writing.done()
        finally:
            moves.set()
        await writing
        await check(client, checker, range(0, 1024))
        await client.close()


# Large writes, whose payload is taken in as it comes ----------------------------------------------


def dribble(sock: Any, data: bytes, rng: random.Random) -> None:
    """In pieces of any size."""
    start = 0
    while start < len(data):
        size = rng.choice((1, 27, 4095, 4096, 30_000, 250_000))
        sock.sendall(data[start : start + size])
        start += size


async def test_large_writes_in_pieces_across_spans_mapped_and_not(cluster: Make, raw: Make) -> None:
    """Three slabs for four spans; small requests in between; now and then with FUA."""
    async with cluster("shm") as c:
        await c.lend(1, slabs=3)
        assembly = await c.export(4 * MIB)
        client = await NbdClient.connect(assembly.options.socket)
        await client.write(0, bytes(4 * MIB))
        await c.mapped(3)
        rng, truth = random.Random(7), bytearray(4 * MIB)

        def use(sock: Any) -> None:
            shake(sock)
            for cookie in range(24):
                pages = rng.choice((1, 16, 17, 64, 300, 700))
                first = rng.randrange(0, 1025 - pages)
                data = rng.randbytes(pages * PAGE_BYTES)
                truth[first * PAGE_BYTES : (first + pages) * PAGE_BYTES] = data
                flags = nbd.FUA if cookie % 5 == 0 else 0
                head = nbd.REQUEST.pack(
                    nbd.REQUEST_MAGIC, flags, nbd.WRITE, cookie, first * PAGE_BYTES, len(data)
                )
                dribble(sock, head + data, rng)
                assert answer(sock) == (0, cookie)

        with raw(assembly.options.socket) as sock:
            await asyncio.to_thread(use, sock)
        for offset in range(0, 4 * MIB, MIB):
            assert await client.read(offset, MIB) == truth[offset : offset + MIB]
        seen = counters(assembly.device.table)
        assert seen["written_mapped_pages"] > 0
        await client.close()


async def test_a_slab_that_is_taken_away_amid_a_large_write(cluster: Make, raw: Make) -> None:
    """Pages that came before the slab went, and pages that came after, count once they are on
    disk."""
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(1 * MIB)
        client = await NbdClient.connect(assembly.options.socket)
        await client.write(0, bytes(4096))
        await c.mapped(1)
        data = random.Random(8).randbytes(MIB)
        lender = c.lenders[0]
        [slab] = lender.core.having("lent")
        with raw(assembly.options.socket) as sock:
            await asyncio.to_thread(shake, sock)
            await asyncio.to_thread(sock.sendall, request(nbd.WRITE, 0, MIB) + data[: MIB // 2])
            table = assembly.device.table
            await c.until(lambda: counters(table)["written_mapped_pages"] >= 127)
            assembly.lenders.feed = lambda event: None  # Deaf from now on.
            await lender.slabs.release(
                ReleaseSlab(slab.id, slab.session, slab.generation, forced=True)
            )
            await asyncio.to_thread(sock.sendall, data[MIB // 2 :])
            assert await asyncio.to_thread(answer, sock) == (0, 1)
        assert counters(table)["fenced"] > 0
        assert assembly.options.backup.read_bytes()[MIB // 2 :] == data[MIB // 2 :]
        assert await client.read(0, MIB) == data
        await client.close()


async def test_a_client_that_leaves_amid_a_large_write_spoils_nothing(
    cluster: Make, raw: Make
) -> None:
    async with cluster("shm") as c:
        await c.lend(1)
        assembly = await c.export(1 * MIB)
        client, checker = await NbdClient.connect(assembly.options.socket), Checker()
        await write(client, checker, range(128, 256))
        await c.mapped(1)
        await write(client, checker, range(128, 256))
        with raw(assembly.options.socket) as sock:
            await asyncio.to_thread(shake, sock)
            await asyncio.to_thread(
                sock.sendall, request(nbd.WRITE, 0, MIB // 2) + b"x" * (MIB // 4 + 100)
            )
        await c.until(lambda: assembly.front.clients == 1)
        await check(client, checker, range(128, 256))
        left = await client.read(0, MIB // 2)
        assert set(left) <= {0, ord("x")}
        await client.close()


def test_errors_of_the_protocol_are_those_it_knows() -> None:
    assert nbd.wire_error(errno.ENOSPC) == 28
    assert nbd.wire_error(errno.EDQUOT) == nbd.EIO
