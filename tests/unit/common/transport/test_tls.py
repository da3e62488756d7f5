"""Encrypted connections: bytes that pass, a network that listens or changes them, and ends."""

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import pytest
from tests.certificates import make_certificates, needs_openssl
from tests.unit.common.transport.conftest import Party, tls_ends
from tests.waiting import soon

from slackwater.common.base.errors import ConfigRejected, DeadlineExceeded, Unavailable
from slackwater.common.bus.access import Tls
from slackwater.common.transport import tls
from slackwater.common.transport.tcp import TcpFabric
from slackwater.common.transport.tls import CHUNK_BYTES, TlsEnds, accepting, connecting

pytestmark = needs_openssl
WORD: Final = b"a token that nobody else may read"


async def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
    return near, far


async def pair() -> tuple[socket.socket, socket.socket]:
    """The plain ends of an encrypted connection: of who connects, and who accepts."""
    ends = tls_ends()
    assert ends.accepts is not None
    assert ends.connects is not None
    near, far = await connected_pair()
    plain = accepting(ends.accepts, far)
    return await connecting(ends.connects, near, "127.0.0.1"), plain


async def read_all(sock: socket.socket) -> bytes:
    loop, parts = asyncio.get_running_loop(), []
    while part := await loop.sock_recv(sock, 1 << 20):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("seed", range(8))
async def test_bytes_arrive_both_ways_however_they_are_cut(seed: int) -> None:
    near, far = await pair()
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    sent = [rng.randbytes(rng.choice([0, 1, 5, 16_383, 16_385, 3 * CHUNK_BYTES])) for _ in "12345"]
    back = rng.randbytes(2 * CHUNK_BYTES + 7)

    async def send(sock: socket.socket, parts: list[bytes]) -> None:
        for part in parts:
            await loop.sock_sendall(sock, part)
            await asyncio.sleep(rng.choice([0.0, 0.002]))
        sock.shutdown(socket.SHUT_WR)

    *_, there, here = await asyncio.gather(
        send(near, sent), send(far, [back]), read_all(far), read_all(near)
    )
    assert there == b"".join(sent)
    assert here == back
    near.close()
    far.close()


async def test_one_direction_may_end_before_the_other() -> None:
    near, far = await pair()
    loop = asyncio.get_running_loop()
    near.shutdown(socket.SHUT_WR)
    assert await loop.sock_recv(far, 10) == b""
    await loop.sock_sendall(far, b"x" * 500_000)
    far.close()
    assert len(await read_all(near)) == 500_000
    near.close()


async def test_a_reader_that_waits_holds_up_its_sender_and_little_memory() -> None:
    near, far = await pair()
    taken = 0
    with contextlib.suppress(BlockingIOError):
        for _ in range(3000):
            taken += near.send(bytes(65_536))
            await asyncio.sleep(0.001)
    assert taken < 32 * 2**20, "the kernel's buffers of two sockets, and a chunk each way"
    near.close()
    assert len(await read_all(far)) == taken, "what was taken arrives, though the sender has left"
    far.close()


async def test_an_end_that_is_closed_ends_the_connection_though_the_peer_says_nothing() -> None:
    ends = tls_ends()
    assert ends.connects is not None
    assert ends.accepts is not None
    near, far = await connected_pair()
    plain = accepting(ends.accepts, far)
    numbers = near.fileno(), far.fileno()
    near_plain = await connecting(ends.connects, near, "127.0.0.1")
    near_plain.close()
    await soon(lambda: closed(numbers[0]))
    assert await asyncio.get_running_loop().sock_recv(plain, 10) == b""
    plain.close()
    await soon(lambda: closed(numbers[1]))


def closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


async def test_a_handshake_that_is_given_up_costs_no_other_connection() -> None:
    """A host whose answers do not arrive: each attempt ends after a while, and is made again. The
    one that connects closes its socket, and so it would that of the thread."""
    near, far = await pair()
    ends = tls_ends()
    assert ends.connects is not None
    loop = asyncio.get_running_loop()
    for number in range(20):
        half, silent = await connected_pair()
        descriptor = half.fileno()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001 * number):
                await connecting(ends.connects, half, "127.0.0.1")
        half.close()
        await soon(lambda number=descriptor: closed(number))
        silent.close()
    await loop.sock_sendall(near, b"as ever")
    assert await loop.sock_recv(far, 10) == b"as ever"
    near.close()
    far.close()


async def test_a_peer_that_agrees_on_nothing_keeps_no_descriptor() -> None:
    """Its greeting took too long, and the stream is closed."""
    ends = tls_ends()
    assert ends.accepts is not None
    silent, far = await connected_pair()
    descriptor = far.fileno()
    plain = accepting(ends.accepts, far)
    await asyncio.sleep(0.02)
    plain.close()
    await soon(lambda: closed(descriptor))
    assert silent.recv(10) == b""
    silent.close()


async def test_a_connection_that_fails_by_a_bug_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One thread carries many."""
    near, far = await pair()
    broken, its_peer = await pair()
    with near, far, broken, its_peer:
        await one_fails(near, far, broken, monkeypatch)
    assert "an encrypted connection failed" in caplog.text


async def one_fails(
    near: socket.socket, far: socket.socket, broken: socket.socket, patch: pytest.MonkeyPatch
) -> None:
    work = tls.Tunnel.work
    spoiled: set[tls.Tunnel] = set()

    def failing(tunnel: tls.Tunnel, scratch: memoryview) -> bool:
        if not spoiled:
            spoiled.add(tunnel)
        if tunnel in spoiled:
            raise ZeroDivisionError
        return work(tunnel, scratch)

    patch.setattr(tls.Tunnel, "work", failing)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(broken, b"x")
    with contextlib.suppress(ConnectionResetError):  # The tunnel may end with that byte unread.
        assert await loop.sock_recv(broken, 10) == b""
    await loop.sock_sendall(near, b"as ever")
    assert await loop.sock_recv(far, 10) == b"as ever"


# The network between ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def between(
    address: str, change: Callable[[bytes], bytes]
) -> AsyncIterator[tuple[str, bytearray]]:
    """A relay in front of `address`, which keeps what clients say, and may change it."""
    heard, passing = bytearray(), set[asyncio.Task[None]]()
    host, _, port = address.rpartition(":")

    async def copy(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(ConnectionError):  # An end that left is the end.
            while data := await source.read(65_536):
                sink.write(seen(data))
        sink.close()

    def listened(data: bytes) -> bytes:
        heard.extend(data)
        return change(data)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, away, listened), copy(there, writer, lambda data: data))
        for sink in (away, writer):
            with contextlib.suppress(ConnectionError):
                await sink.wait_closed()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing.add(asyncio.ensure_future(pass_on(reader, writer)))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heard
        async with asyncio.timeout(10.0):  # Both ends have closed by now.
            await asyncio.gather(*passing)
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_network_between_reads_no_token(encrypted: bool) -> None:
    fabric = TcpFabric(tls=tls_ends() if encrypted else None)
    party = await Party(fabric, "127.0.0.1:0").start()
    assert party.listener is not None
    async with between(party.listener.address, lambda data: data) as (address, heard):
        channel = await fabric.connect(address, WORD, deadline_s=5)
        accepted = await party.channels.get()
        assert accepted.hello == WORD
        assert (WORD in heard) is not encrypted
        await channel.close()
    await party.close()


async def test_a_byte_that_was_changed_on_the_way_ends_the_connection() -> None:
    ends = tls_ends()
    assert ends.accepts is not None
    assert ends.connects is not None
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"
        spoil = False

        def change(data: bytes) -> bytes:
            return data[:-1] + bytes([data[-1] ^ 1]) if spoil else data

        async with between(address, change) as (front, _):
            host, _, port = front.rpartition(":")
            client = socket.create_connection((host, int(port)))
            door.setblocking(False)
            server, _ = await asyncio.get_running_loop().sock_accept(door)
            plain = accepting(ends.accepts, server)
            mine = await connecting(ends.connects, client, "127.0.0.1")
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(mine, b"as it is")
            assert await loop.sock_recv(plain, 100) == b"as it is"
            spoil = True
            await loop.sock_sendall(mine, b"as it is not")
            assert await loop.sock_recv(plain, 100) == b""
            plain.close()
            mine.close()


# Strangers ----------------------------------------------------------------------------------------


async def test_a_certificate_of_another_host_or_authority_is_not_trusted(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, names="DNS:h9.example")
    other = Tls(ca=made.ca, certificate=made.certificate, key=made.key).ends()
    party = await Party(TcpFabric(tls=other), "127.0.0.1:0").start()
    assert party.listener is not None
    address = party.listener.address
    with pytest.raises(Unavailable, match=r"IP address mismatch.*is its authority in `ca`"):
        await TcpFabric(tls=other).connect(address, b"", deadline_s=5)
    with pytest.raises(Unavailable, match="no encrypted connection: unable to get local issuer"):
        await TcpFabric(tls=tls_ends()).connect(address, b"", deadline_s=5)
    assert party.channels.empty()
    await party.close()


async def test_clear_text_and_tls_do_not_meet() -> None:
    secure, clear = TcpFabric(tls=tls_ends()), TcpFabric()
    encrypted = await Party(secure, "127.0.0.1:0").start()
    plain = await Party(clear, "127.0.0.1:0").start()
    assert encrypted.listener is not None
    assert plain.listener is not None
    with pytest.raises(Unavailable, match="ended before its first record"):
        await clear.connect(encrypted.listener.address, b"", deadline_s=5)
    with pytest.raises((Unavailable, DeadlineExceeded), match=r"no encrypted connection|ended"):
        await secure.connect(plain.listener.address, b"", deadline_s=5)
    await encrypted.close()
    await plain.close()


async def test_a_side_without_its_files_says_which_it_lacks() -> None:
    with pytest.raises(ConfigRejected, match=r"certificate and key in \[tls\]"):
        await Party(TcpFabric(tls=TlsEnds()), "127.0.0.1:0").start()
    with pytest.raises(ConfigRejected, match="no authority to trust; give `ca`"):
        await TcpFabric(tls=TlsEnds()).connect("127.0.0.1:1", b"", deadline_s=5)


async def test_old_versions_of_tls_are_refused() -> None:
    ends = tls_ends()
    assert ends.accepts is not None
    assert ends.connects is not None
    near, far = await connected_pair()
    plain = accepting(ends.accepts, far)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        await connecting(old, near, "127.0.0.1")
    plain.close()
