"""Read the TCP segments that this host sends, from a ring of packets that the kernel writes.

The socket is AF_PACKET with TPACKET_V3: blocks of memory that kernel and reader share, so that a
packet costs no system call. A compiled walk joins segments that follow one another at once into
bursts, and only these are kept: `BURSTS_MAX` of them, whatever the rate is. What the kernel had to
drop is counted. IPv4 alone; a segment that was sent again counts once.

The socket is opened with CAP_NET_RAW; everything else works without. A filter in the kernel chooses
by the port that a segment is sent from, and says how much of a packet is kept: nothing (a pause),
its headers, or all of it. Structures and numbers are those of linux/if_packet.h and linux/filter.h.
"""

# numba infers the compiled functions' types itself, and its decorators mislead the type checker.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import ctypes
import mmap
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from slackwater.common.base.errors import Unavailable
from slackwater.common.native.compiled import kernel

HEADERS_BYTES: Final = 96
"""Holds all headers of a segment."""
WHOLE_BYTES: Final = 1 << 18
BLOCK_BYTES: Final = 1 << 20
BLOCKS: Final = 64
RETIRE_MS: Final = 50
"""A block that is not full is handed over after so long."""
PORTS_MAX: Final = 128
"""Ports that the filter can name."""
BURSTS_MAX: Final = 1 << 17
FLOWS_MAX: Final = 256
APART_NS: Final = 100_000
"""A segment that comes so much later begins another burst."""
_SLOTS: Final = 1024
"""Places of the table of flows: a power of two, and more than flows."""
COLUMNS: Final = (
    "begin_ns", "end_ns", "flow", "seq", "nbytes", "ack", "ack_end", "segments",
)  # fmt: skip
"""A burst: when its first and last segment left, the flow's number, where in the stream it begins,
its bytes, what had been acknowledged at its first and its last segment."""
_PACKET: Final = 263  # SOL_PACKET
_RX_RING, _STATISTICS, _VERSION = 5, 6, 10
_ATTACH_FILTER: Final = 26
_ALL_PROTOCOLS: Final = 3  # ETH_P_ALL: what leaves, too.
_RETURN, _LOAD_BYTE, _LOAD_HALF, _LOAD_HALF_AFTER_HEADER = 0x06, 0x30, 0x28, 0x48
_HEADER_LENGTH, _JUMP, _IF_EQUAL, _IF_ANY = 0xB1, 0x05, 0x15, 0x45
_PACKET_TYPE, _PROTOCOL = 0xFFFFF004, 0xFFFFF000
_OUTGOING, _IPV4, _TCP = 4, 0x0800, 6
_TCP_BYTES: Final = 20
"""Bytes of a TCP header without options."""


class Endpoints(NamedTuple):
    """One direction of a connection; addresses as the kernel has them, in network order."""

    source: int
    target: int
    source_port: int
    target_port: int


class Segment(NamedTuple):
    """A segment with its bytes, which are valid until the next one is asked for."""

    ns: int
    endpoints: Endpoints
    seq: int
    payload: memoryview
    nbytes: int
    """More than `payload` holds where the packet was cut."""


def filter_program(snap_bytes: int, ports: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Write the filter's instructions: what leaves over TCP and IPv4 from one of `ports` (empty:
    from any), cut to `snap_bytes`. 0 bytes: nothing at all. Raises ValueError: too many ports."""
    if len(ports) > PORTS_MAX:
        raise ValueError(f"ports: {len(ports)}, at most {PORTS_MAX} in one filter; name fewer")
    if not snap_bytes:
        return [(_RETURN, 0, 0, 0)]
    steps = [
        (_LOAD_BYTE, "", "", _PACKET_TYPE), (_IF_EQUAL, "", "drop", _OUTGOING),
        (_LOAD_HALF, "", "", _PROTOCOL), (_IF_EQUAL, "", "drop", _IPV4),
        (_LOAD_BYTE, "", "", 9), (_IF_EQUAL, "", "drop", _TCP),
        (_LOAD_HALF, "", "", 6), (_IF_ANY, "drop", "", 0x1FFF),  # Later fragments have no ports.
    ]  # fmt: skip
    if ports:
        steps += [(_HEADER_LENGTH, "", "", 0), (_LOAD_HALF_AFTER_HEADER, "", "", 0)]
        steps += [(_IF_EQUAL, "keep", "", port) for port in ports]
    else:
        steps.append((_JUMP, "", "", 1))
    ends = {"drop": len(steps), "keep": len(steps) + 1}
    program = [
        (code, ends[yes] - at - 1 if yes else 0, ends[no] - at - 1 if no else 0, value)
        for at, (code, yes, no, value) in enumerate(steps)
    ]
    return [*program, (_RETURN, 0, 0, 0), (_RETURN, 0, 0, snap_bytes)]


@kernel(cache=True)
def _u16(data, at):
    return (np.int64(data[at]) << 8) | np.int64(data[at + 1])


@kernel(cache=True)
def _u32(data, at):
    return (_u16(data, at) << 16) | _u16(data, at + 2)


@kernel(cache=True)
def _flow_of(table, counts, addresses, ports):
    """Find the place of a flow in the table, or give it one; -1: the table is full."""
    at = (addresses ^ (addresses >> 29) ^ ports * 0x9E3779B1) & (_SLOTS - 1)
    while table[at, 0] >= 0:
        if table[at, 1] == addresses and table[at, 2] == ports:
            return at
        at = (at + 1) & (_SLOTS - 1)
    if counts[4] >= FLOWS_MAX:
        return -1
    table[at, 0] = counts[4]
    table[at, 1] = addresses
    table[at, 2] = ports
    table[at, 3] = -1
    counts[4] += 1
    return at


@kernel(cache=True)
def _walk(data, words, bursts, n, table, counts):
    """Join the block's segments to bursts, from row n on. Return how many rows there are.

    counts: packets, bytes, bytes that were sent again, segments without room, flows.
    table: number, addresses, ports, row of the last burst, next byte of the stream."""
    at = np.int64(words[4])
    for _ in range(words[3]):
        word = at >> 2
        ip = at + (np.int64(words[word + 6]) >> 16)
        header = np.int64(data[ip] & 15) * 4
        tcp = ip + header
        total = _u16(data, ip + 2)
        if total == 0:  # It is in packets beyond 64 KiB.
            total = np.int64(words[word + 4])
        length = total - header - np.int64(data[tcp + 12] >> 4) * 4
        counts[0] += 1
        # Headers that were cut are beyond what may be read.
        if length > 0 and np.int64(words[word + 3]) >= header + _TCP_BYTES:
            counts[1] += length
            addresses = (_u32(data, ip + 12) << 32) | _u32(data, ip + 16)
            slot = _flow_of(table, counts, addresses, _u32(data, tcp))
            if slot >= 0:
                ns = np.int64(words[word + 1]) * 1_000_000_000 + np.int64(words[word + 2])
                seq = _u32(data, tcp + 4)
                row = table[slot, 3]
                ahead = (seq - table[slot, 4]) & 0xFFFFFFFF
                if row >= 0 and ahead >= 0x80000000:
                    counts[2] += length
                elif row >= 0 and ahead == 0 and ns - bursts[row, 1] < APART_NS:
                    bursts[row, 1] = ns
                    bursts[row, 4] += length
                    bursts[row, 6] = _u32(data, tcp + 8)
                    bursts[row, 7] += 1
                    table[slot, 4] = (seq + length) & 0xFFFFFFFF
                elif n < len(bursts):
                    bursts[n, 0] = bursts[n, 1] = ns
                    bursts[n, 2] = table[slot, 0]
                    bursts[n, 3] = seq
                    bursts[n, 4] = length
                    bursts[n, 5] = bursts[n, 6] = _u32(data, tcp + 8)
                    bursts[n, 7] = 1
                    table[slot, 3] = n
                    table[slot, 4] = (seq + length) & 0xFFFFFFFF
                    n += 1
                else:
                    counts[3] += 1
            else:
                counts[3] += 1
        at += np.int64(words[word])
    return n


def warm() -> None:
    """Compile the walk, or load it."""
    block, bursts = np.zeros(64, np.uint32), np.zeros((1, len(COLUMNS)), np.int64)
    table, counts = np.zeros((_SLOTS, 5), np.int64), np.zeros(5, np.int64)
    _walk(block.view(np.uint8), block, bursts, 0, table, counts)


class PacketRing:
    """Opening it raises Unavailable, which names what lacks. `interface`: its index; 0: all.

    Nothing is kept before the first `choose`. `dropped` counts packets that found the ring full.
    """

    def __init__(self, interface: int = 0, blocks: int = BLOCKS) -> None:
        self._blocks, self._at, self.dropped = blocks, 0, 0
        self._bursts: Any = np.zeros((BURSTS_MAX, len(COLUMNS)), np.int64)
        self._table: Any = np.zeros((_SLOTS, 5), np.int64)
        self._counts: Any = np.zeros(5, np.int64)
        self._rows = 0
        self.clear()
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        except PermissionError as error:
            raise Unavailable(
                "packets cannot be watched: CAP_NET_RAW is missing; run the service as root or "
                "with AmbientCapabilities=CAP_NET_RAW"
            ) from error
        try:
            self.choose(0, ())
            frames = BLOCK_BYTES // 2048 * blocks
            request = struct.pack("7I", BLOCK_BYTES, blocks, 2048, frames, RETIRE_MS, 0, 0)
            self._socket.setsockopt(_PACKET, _VERSION, 2)
            self._socket.setsockopt(_PACKET, _RX_RING, request)
            self._memory = mmap.mmap(self._socket.fileno(), BLOCK_BYTES * blocks)
            self._bind(interface)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"packets cannot be watched: {error.strerror}") from error
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._words = np.frombuffer(self._memory, np.uint32)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        warm()  # Else it is compiled while packets wait.

    def choose(self, snap_bytes: int, ports: Sequence[int]) -> None:
        """Keep so much of each segment that is sent from these ports; 0 bytes: pause."""
        code = filter_program(snap_bytes, ports)
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *op) for op in code))
        described = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
        self._socket.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)

    def _bind(self, interface: int) -> None:
        """Listen; Python's own `bind` knows no index 0. Raises OSError."""
        family, protocol = socket.AF_PACKET, socket.htons(_ALL_PROTOCOLS)
        address = struct.pack("HHiHBB8x", family, protocol, interface, 0, 0, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.bind(self._socket.fileno(), address, len(address)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        del self._bytes, self._words
        self._memory.close()
        self._socket.close()

    def clear(self) -> None:
        """Forget bursts and flows."""
        self._table[:] = 0
        self._table[:, 0] = -1
        self._counts[:] = 0
        self._rows = 0

    def read(self, timeout_s: float) -> int:
        """Take in the blocks that are ready, waiting so long for the first. Return their number."""
        taken = 0
        while taken < self._blocks and self._ready(0.0 if taken else timeout_s):
            begin = self._at * BLOCK_BYTES
            data = self._bytes[begin : begin + BLOCK_BYTES]
            words = self._words[begin // 4 : (begin + BLOCK_BYTES) // 4]
            self._rows = _walk(data, words, self._bursts, self._rows, self._table, self._counts)
            self._give_back()
            taken += 1
        return taken

    def segments(self, timeout_s: float) -> Iterator[Segment]:
        """Yield the segments of one block that is ready, each with its bytes; nothing: there is
        none yet. They do not become bursts."""
        if not self._ready(timeout_s):
            return
        begin = self._at * BLOCK_BYTES
        block = memoryview(self._memory)[begin : begin + BLOCK_BYTES]
        count, at = struct.unpack_from("II", block, 12)
        for _ in range(count):
            after, sec, nsec, kept, length, _ = struct.unpack_from("6I", block, at)
            network = struct.unpack_from("H", block, at + 26)[0]
            ip = at + network
            header = (block[ip] & 15) * 4
            tcp = ip + header
            source, target, source_port, target_port, seq = struct.unpack_from(
                "!IIHHI", block[ip + 12 : ip + 20].tobytes() + block[tcp : tcp + 8].tobytes()
            )
            start = header + (block[tcp + 12] >> 4) * 4
            total = struct.unpack_from("!H", block, ip + 2)[0] or length
            if total > start and kept >= start:
                yield Segment(
                    sec * 1_000_000_000 + nsec,
                    Endpoints(source, target, source_port, target_port),
                    seq,
                    block[ip + start : ip + min(total, kept)],
                    total - start,
                )
            at += after
        self._give_back()

    def bursts(self) -> Any:
        """Return the bursts since `clear`, one a row; its columns are COLUMNS."""
        return self._bursts[: self._rows]

    def flows(self) -> dict[int, Endpoints]:
        """Map the number of each flow to its ends."""
        found = {}
        for number, addresses, ports, *_ in self._table[self._table[:, 0] >= 0].tolist():
            source, target = (addresses >> 32) & 0xFFFFFFFF, addresses & 0xFFFFFFFF
            found[number] = Endpoints(source, target, ports >> 16, ports & 0xFFFF)
        return found

    @property
    def full(self) -> bool:
        """Say whether bursts found no room."""
        return bool(self._counts[3])

    @property
    def seen(self) -> tuple[int, int]:
        """Packets and bytes of payload since `clear`."""
        return int(self._counts[0]), int(self._counts[1])

    def count_dropped(self) -> int:
        """Add what the kernel dropped since the last call, and return all of it."""
        statistics = self._socket.getsockopt(_PACKET, _STATISTICS, 12)
        self.dropped += struct.unpack("III", statistics)[1]
        return self.dropped

    def _ready(self, timeout_s: float) -> bool:
        status = self._at * (BLOCK_BYTES // 4) + 2
        if self._words[status] & 1:
            return True
        if timeout_s > 0.0:
            self._poll.poll(1000 * timeout_s)
        return bool(self._words[status] & 1)

    def _give_back(self) -> None:
        self._words[self._at * (BLOCK_BYTES // 4) + 2] = 0
        self._at = (self._at + 1) % self._blocks


def run_as_nobody() -> None:
    """Give up every privilege, for good: what is open stays open."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
