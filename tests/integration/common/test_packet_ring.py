"""The ring of packets: real segments over loopback, each byte counted once."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Unavailable
from slackwater.common.native.packet_ring import (
    HEADERS_BYTES,
    PORTS_MAX,
    WHOLE_BYTES,
    Endpoints,
    PacketRing,
    filter_program,
)

WAIT_S = 5.0


@pytest.fixture
def ring() -> Iterator[PacketRing]:
    try:
        opened = PacketRing(socket.if_nametoindex("lo"), blocks=8)
    except Unavailable as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


class Connection:
    """One TCP connection over loopback, whose other end reads all that comes."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.sender = socket.create_connection(listener.getsockname())
        self._receiver, _ = listener.accept()
        listener.close()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while self._receiver.recv(1 << 20):
            pass

    @property
    def port(self) -> int:
        port: int = self.sender.getsockname()[1]
        return port

    def close(self) -> None:
        self.sender.shutdown(socket.SHUT_WR)
        self._thread.join()
        self.sender.close()
        self._receiver.close()


def read_until(ring: PacketRing, enough: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not enough():
        assert time.monotonic() < until_s, f"only {ring.seen} came"
        ring.read(0.1)


def test_bytes_and_ends_of_a_flow_are_exact(ring: PacketRing) -> None:
    watched, other = Connection(), Connection()
    ring.choose(HEADERS_BYTES, [watched.port])
    for _ in range(5):
        watched.sender.sendall(bytes(300_000))
        other.sender.sendall(bytes(100_000))
        time.sleep(0.005)
    read_until(ring, lambda: bool(ring.bursts()[:, 4].sum() >= 1_500_000))
    ends = watched.sender.getsockname(), watched.sender.getpeername()
    watched.close()
    other.close()
    local = int.from_bytes(socket.inet_aton("127.0.0.1"))
    assert list(ring.flows().values()) == [Endpoints(local, local, ends[0][1], ends[1][1])]
    assert ring.bursts()[:, 4].sum() == 1_500_000
    assert ring.seen[1] >= 1_500_000  # Busy machines send segments again, which are seen twice.
    assert ring.count_dropped() == 0
    assert not ring.full


def test_nothing_is_kept_in_a_pause(ring: PacketRing) -> None:
    connection = Connection()
    ring.choose(HEADERS_BYTES, [connection.port])
    connection.sender.sendall(bytes(10_000))
    read_until(ring, lambda: ring.seen[1] == 10_000)
    ring.choose(0, ())
    connection.sender.sendall(bytes(10_000))
    while ring.read(0.1):
        pass
    assert ring.seen[1] == 10_000
    ring.choose(HEADERS_BYTES, [connection.port])
    connection.sender.sendall(bytes(777))
    read_until(ring, lambda: ring.seen[1] > 10_000)
    connection.close()
    assert ring.seen[1] == 10_777


def test_whole_segments_show_what_was_sent(ring: PacketRing) -> None:
    sent = bytes(range(256)) * 1500
    connection = Connection()
    ring.choose(WHOLE_BYTES, [connection.port])
    connection.sender.sendall(sent)
    came, there = bytearray(len(sent)), bytearray(len(sent))
    first, until_s = -1, time.monotonic() + WAIT_S
    while not all(there):
        assert time.monotonic() < until_s
        for segment in ring.segments(0.1):
            first = segment.seq if first < 0 else first
            at = (segment.seq - first) % 2**32  # A busy machine sends some of them again.
            came[at : at + segment.nbytes] = segment.payload
            there[at : at + segment.nbytes] = bytes([1]) * segment.nbytes
            assert segment.nbytes == len(segment.payload)
    connection.close()
    same = came == sent  # A difference of so many bytes takes pytest minutes to show.
    assert same


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_a_missing_privilege_is_named() -> None:
    program = (
        "from slackwater.common.native.packet_ring import PacketRing, run_as_nobody\n"
        "from slackwater.common.base.errors import Unavailable\n"
        "run_as_nobody()\n"
        "try: PacketRing()\n"
        "except Unavailable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "CAP_NET_RAW is missing" in done.stdout, done.stderr


def accepts(program: Sequence[tuple[int, int, int, int]], packet: bytes, kind: int) -> int:
    """Run a filter as the kernel does: the bytes of the packet that it keeps."""
    accumulator = index = at = 0
    while True:
        code, yes, no, value = program[at]
        at += 1
        match code:
            case 0x06:
                return value
            case 0x30:
                accumulator = kind if value == 0xFFFFF004 else packet[value]
            case 0x28 if value == 0xFFFFF000:
                accumulator = 0x0800
            case 0x28:
                accumulator = int.from_bytes(packet[value : value + 2])
            case 0xB1:
                index = 4 * (packet[value] & 15)
            case 0x48:
                accumulator = int.from_bytes(packet[index + value : index + value + 2])
            case 0x15:
                at += yes if accumulator == value else no
            case 0x45:
                at += yes if accumulator & value else no
            case 0x05:
                at += value
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@given(
    ports=st.lists(st.integers(1, 65535), max_size=PORTS_MAX),
    source=st.integers(1, 65535),
    one_of_them=st.booleans(),
    options=st.integers(0, 10),
    protocol=st.sampled_from([6, 17]),
    kind=st.sampled_from([0, 4]),
    fragment=st.sampled_from([0, 0x4000, 0x2001]),
)
def test_the_filter_keeps_what_leaves_from_its_ports(
    ports: list[int],
    source: int,
    one_of_them: bool,
    options: int,
    protocol: int,
    kind: int,
    fragment: int,
) -> None:
    if one_of_them and ports:
        source = ports[source % len(ports)]
    header = bytearray(20 + 4 * options)
    header[0] = 0x40 | len(header) // 4
    header[6:8] = fragment.to_bytes(2)
    header[9] = protocol
    packet = bytes(header) + source.to_bytes(2) + bytes(18)
    wanted = (
        protocol == 6 and kind == 4 and not fragment & 0x1FFF and (not ports or source in ports)
    )
    assert accepts(filter_program(96, ports), packet, kind) == (96 if wanted else 0)


def test_a_filter_has_a_bounded_number_of_ports() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        filter_program(96, range(1, 200))
