"""The compiled loop of an NBD connection with a lender that a test plays: what is asked on the
lane, what reaches the client, and what a lender that lies, stalls or leaves can bring about."""

import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.waiting import eventually

from slackwater.common.transport import wire
from slackwater.loadgen.memory.checker import content
from slackwater.memory.nbd import lanes, serve
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import state as s
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states
from slackwater.memory.pages.table import counters, make_table, page_range
from slackwater.memory.service.warm import warm
from slackwater.memory.store import PAGE_BYTES

warm()  # Now: while it is compiled, deadlines of a test pass.

SPAN_PAGES = 512
CHANNEL_ID, HANDLE = 7, 99
Answer = Callable[[wire.Header, bytes], bytes]


class Played:
    """A device of two spans; the first lies at a lender that answers by `answer`."""

    def __init__(self, chunked: bool) -> None:
        self.table = make_table(2 * SPAN_PAGES, SPAN_PAGES, slots=64)
        k.map_span(self.table, 0, 0, 0, 0)
        k.set_lane_target(self.table, 0, CHANNEL_ID, HANDLE)
        self.table.mark[:SPAN_PAGES] = states.PRESENT
        self.client, ours = socket.socketpair()
        self.lender, lane = socket.socketpair()
        self._kept = (ours, lane)
        for sock in (self.client, self.lender):
            sock.settimeout(10)
        self.state = s.make_connection(
            ours.fileno(), 2 * SPAN_PAGES * PAGE_BYTES, 4 * 1024 * 1024, chunked=chunked
        )
        self.chunked = chunked
        self.buffer = s.untouched(s.LANE_BYTES)
        lanes.install(
            self.table, self.state.lanes, 0, CHANNEL_ID, lane.fileno(), self.buffer.ctypes.data
        )
        self.items: list[list[int]] = []
        self.ended = -1
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while True:
            status = serve.serve(self.table, self.state)
            self.items += self.state.items[: self.state.words[s.ITEMS]].tolist()
            self.state.lanes.shared[s.SWEEP] = self.state.lanes.shared[s.TELL] = 0
            if status != serve.HAS_ITEMS:
                break
        again = True
        while again:
            again = lanes.drain(self.table, self.state)
            found = self.state.items[: self.state.words[s.ITEMS]].tolist()
            self.items += [one for one in found if one[s.ITEM_KIND] == s.LOST]
        self.ended = status

    def ask(self, cookie: int, page: int, count: int = 1) -> bytes:
        return nbd.REQUEST.pack(
            nbd.REQUEST_MAGIC, 0, nbd.READ, cookie, page * PAGE_BYTES, count * PAGE_BYTES
        )

    def write(self, cookie: int, page: int, data: bytes) -> bytes:
        head = nbd.REQUEST.pack(
            nbd.REQUEST_MAGIC, 0, nbd.WRITE, cookie, page * PAGE_BYTES, len(data)
        )
        return head + data

    def asked(self) -> tuple[wire.Header, bytes]:
        """Return the next request to the lender."""
        header = wire.Header._make(wire.HEADER.unpack(exactly(self.lender, wire.HEADER_BYTES)))
        return header, exactly(self.lender, header.length)

    def answered(self) -> tuple[int, bytes]:
        """(cookie, the data) of the next answer that the client gets."""
        if not self.chunked:
            magic, error, cookie = struct.unpack(">IIQ", exactly(self.client, 16))
            assert (magic, error) == (nbd.SIMPLE_MAGIC, 0)
            return cookie, b""
        magic, _, kind, cookie, length = struct.unpack(">IHHQI", exactly(self.client, 20))
        assert (magic, kind) == (nbd.CHUNK_MAGIC, nbd.CHUNK_DATA)
        return cookie, exactly(self.client, length)[8:]

    def close(self) -> None:
        self.client.close()
        self.lender.close()
        self.thread.join(10)
        assert not self.thread.is_alive()
        for sock in self._kept:
            sock.close()


@contextmanager
def played(*, chunked: bool = True) -> Iterator[Played]:
    made = Played(chunked)
    try:
        yield made
    finally:
        made.close()


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, "the end came too early"
        data += part
    return data


def data_of(header: wire.Header, body: bytes) -> bytes:
    """The right answer to a read: each page its own content."""
    [length] = wire.WORD.unpack(body)
    first = header.offset // PAGE_BYTES
    pages = b"".join(content(first + i, 1) for i in range(length // PAGE_BYTES))
    return wire.pack(wire.DATA, number=header.number, body=pages)


def test_many_reads_leave_together_and_come_back_in_any_pieces() -> None:
    """32 under way, small and large: the lender's bytes come in pieces of any size."""
    rng = random.Random(5)
    with played() as p:
        wanted = {
            cookie: (rng.randrange(0, 200), rng.choice((1, 1, 2, 8, 64))) for cookie in range(32)
        }
        p.client.sendall(b"".join(p.ask(c, page, count) for c, (page, count) in wanted.items()))
        stream = b"".join(data_of(*p.asked()) for _ in wanted)

        def feed() -> None:
            at = 0
            while at < len(stream):
                size = rng.choice((1, 7, 31, 32, 33, 5000, 100_000))
                p.lender.sendall(stream[at : at + size])
                at += size

        feeding = threading.Thread(target=feed)
        feeding.start()
        for _ in range(len(wanted)):
            cookie, data = p.answered()
            page, count = wanted.pop(cookie)
            assert data == b"".join(content(page + i, 1) for i in range(count))
        feeding.join()
        assert not p.items
        assert counters(p.table)["read_lane_pages"] == p.table.words[k.READ] > 32


def test_requests_wait_for_company_while_answers_are_due() -> None:
    """Both ends pay by the system call. With few under way nobody waits."""
    with played() as p:
        p.client.sendall(p.ask(1, 1))
        asked = [p.asked()]
        p.client.sendall(b"".join(p.ask(cookie, cookie) for cookie in range(2, 10)))
        asked += [p.asked() for _ in range(8)]
        p.client.sendall(p.ask(10, 10) + p.ask(11, 11))
        eventually(lambda: p.state.lanes.words[0, s.QUEUED] == 2)
        assert_silent(p.lender)
        p.lender.settimeout(10)
        for one in asked[:6]:
            p.lender.sendall(data_of(*one))
        asked = [*asked[6:], p.asked(), p.asked()]
        for one in asked:
            p.lender.sendall(data_of(*one))
        for cookie in range(1, 12):
            assert p.answered() == (cookie, content(cookie, 1))


@pytest.mark.parametrize("chunked", [True, False])
def test_a_write_is_acknowledged_when_the_lender_has_it(chunked: bool) -> None:
    """It is FLYING until then; a second write of the page goes to the disk alone."""
    with played(chunked=chunked) as p:
        p.client.sendall(p.write(5, 3, content(3, 2) + content(4, 2)))
        header, body = p.asked()
        assert (header.kind, header.handle, header.offset) == (wire.WRITE, HANDLE, 3 * PAGE_BYTES)
        assert body == content(3, 2) + content(4, 2)
        assert p.table.mark[3:5].tolist() == [states.FLYING] * 2
        p.client.sendall(p.write(6, 3, content(3, 3)))
        eventually(lambda: bool(p.items))
        assert p.items[0][s.ITEM_KIND] == s.LANDING
        p.lender.sendall(wire.pack(wire.ACK, number=header.number))
        assert exactly(p.client, 16) == struct.pack(">IIQ", nbd.SIMPLE_MAGIC, 0, 5)
        assert p.table.mark[3:5].tolist() == [states.ABSENT, states.PRESENT]
        assert p.table.words[k.WRITE_LANE] == 2


def test_a_page_that_is_changed_under_a_read_is_read_again() -> None:
    """The lender's bytes may be a mixture of old and new: they are thrown away."""
    for length in (1, 64):
        with played() as p:
            p.client.sendall(p.ask(1, 8, length))
            header, body = p.asked()
            kinds, new = np.zeros(1, np.int64), memoryview(content(8, 2))
            k.write_pages(p.table, page_range(8, 1), k.address(new), kinds, 0, -1)
            p.lender.sendall(data_of(header, body))
            eventually(lambda: bool(p.items))
            assert p.items[0][: s.ITEM_FLAGS] == [nbd.READ, 1, 8 * PAGE_BYTES, length * PAGE_BYTES]
            assert not p.table.words[k.READ_LANE]


LIES: dict[str, Answer] = {
    "another-number": lambda h, _: wire.pack(
        wire.DATA, number=h.number + 1, body=bytes(PAGE_BYTES)
    ),
    "number-0": lambda _h, _b: wire.pack(wire.DATA, number=0, body=bytes(PAGE_BYTES)),
    "shorter": lambda h, _: wire.pack(wire.DATA, number=h.number, body=bytes(8)),
    "longer": lambda h, _: wire.pack(wire.DATA, number=h.number, body=bytes(2 * PAGE_BYTES)),
    "endless": lambda h, _: wire.HEADER.pack(wire.DATA, 0, h.number, 0, 2**63),
    "negative": lambda h, _: wire.HEADER.pack(wire.DATA, 0, h.number, 0, 2**64 - 1),
    "an-ack": lambda h, _: wire.pack(wire.ACK, number=h.number),
    "a-frame": lambda h, _: wire.pack(wire.FRAME, number=h.number, body=bytes(PAGE_BYTES)),
    "a-long-reason": lambda h, _: wire.pack(wire.REFUSED, number=h.number, body=bytes(1025)),
    "noise": lambda _h, _b: random.Random(1).randbytes(5000),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lender_that_lies_is_believed_nothing(lie: str) -> None:
    """Requests under way go to the program, a read as a read, a write as one that may still land;
    the lane is given up for a violation."""
    with played() as p:
        p.client.sendall(p.ask(1, 8) + p.write(2, 9, content(9, 2)) + p.ask(3, 10))
        p.lender.sendall(LIES[lie](*p.asked()))
        eventually(lambda: len(p.items) == 3)
        kinds = {one[s.ITEM_COOKIE]: one[s.ITEM_KIND] for one in p.items}
        assert kinds == {1: nbd.READ, 2: s.LOST, 3: nbd.READ}
        lost = next(one for one in p.items if one[s.ITEM_KIND] == s.LOST)
        assert (lost[s.ITEM_AT], lost[s.ITEM_FLAGS]) == (CHANNEL_ID, 0)
        words = p.state.lanes.words[0]
        assert (words[s.STATE], words[s.VIOLATED]) == (s.GONE, 1)
        assert p.table.mark[9] == states.FLYING, "nobody sends it again before the channel is over"
        assert_silent(p.client)


@pytest.mark.parametrize("kind", ["read", "large", "write"])
@pytest.mark.parametrize("byte", range(wire.HEADER_BYTES))
def test_an_answer_with_any_byte_changed_is_right_or_nothing(kind: str, byte: int) -> None:
    with played() as p:
        count = 16 if kind == "large" else 1
        if kind == "write":
            p.client.sendall(p.write(1, 8, content(8, 2)))
            answer = wire.pack(wire.ACK, number=p.asked()[0].number)
        else:
            p.client.sendall(p.ask(1, 8, count))
            answer = data_of(*p.asked())
        changed = bytearray(answer)
        changed[byte] ^= 1 << byte % 8
        p.lender.sendall(changed)
        p.lender.shutdown(socket.SHUT_WR)
        eventually(lambda: p.items or select.select([p.client], [], [], 0)[0])
        if p.items:
            assert p.items[0][s.ITEM_KIND] == (s.LOST if kind == "write" else nbd.READ)
            assert_silent(p.client)
        elif kind == "write":
            assert exactly(p.client, 16) == struct.pack(">IIQ", nbd.SIMPLE_MAGIC, 0, 1)
        else:
            assert p.answered() == (1, b"".join(content(8 + i, 1) for i in range(count)))


def test_answers_that_nobody_asked_for_end_the_lane() -> None:
    with played() as p:
        p.client.sendall(p.ask(1, 8))
        answer = data_of(*p.asked())
        p.lender.sendall(answer + answer)
        assert p.answered()[1] == content(8, 1)
        p.client.sendall(p.ask(2, 9))
        eventually(lambda: bool(p.items))
        assert p.state.lanes.words[0, s.STATE] == s.GONE


def test_a_refusal_is_for_the_program_and_the_lane_goes_on() -> None:
    with played() as p:
        p.client.sendall(p.ask(1, 8, 64) + p.write(2, 9, content(9, 2)) + p.ask(3, 10))
        for number in (1, 2):
            assert p.asked()[0].number == number
            p.lender.sendall(wire.pack(wire.REFUSED, handle=1, number=number, body=b"revoked"))
        eventually(lambda: len(p.items) == 2)
        assert [one[s.ITEM_KIND] for one in p.items] == [nbd.READ, s.LOST]
        assert p.items[1][s.ITEM_FLAGS] == 1
        p.lender.sendall(data_of(*p.asked()))
        assert p.answered() == (3, content(10, 1))


@pytest.mark.parametrize("sent", [0, 1, 32, 1000, PAGE_BYTES + 31])
def test_a_lender_that_leaves_in_the_middle(sent: int) -> None:
    with played() as p:
        p.client.sendall(b"".join(p.ask(cookie, cookie) for cookie in range(1, 129)))
        answer = data_of(*p.asked())
        p.lender.sendall(answer[:sent])
        p.lender.close()
        eventually(lambda: len(p.items) == 128)
        assert sorted(one[s.ITEM_COOKIE] for one in p.items) == list(range(1, 129))
        assert_silent(p.client)


def test_a_lender_that_falls_silent_is_given_up_in_time() -> None:
    """Others are served meanwhile: a page in a held buffer is read at once."""
    with played() as p:
        p.client.sendall(p.ask(1, 8) + p.write(2, 600, content(600, 1)))
        p.asked()
        p.client.sendall(p.ask(3, 600))
        eventually(lambda: any(one[s.ITEM_KIND] == s.LANDING for one in p.items))
        assert p.answered() == (3, content(600, 1))
        eventually(lambda: any(one[s.ITEM_KIND] == nbd.READ for one in p.items))
        assert p.state.lanes.words[0, s.STATE] == s.GONE
        assert not p.state.lanes.words[0, s.VIOLATED]


def test_a_client_who_leaves_has_its_writes_seen_to() -> None:
    for answers in (True, False):
        with played() as p:
            p.client.sendall(p.ask(1, 8) + p.write(2, 9, content(9, 2)))
            read, body = p.asked()
            write, _ = p.asked()
            p.client.close()
            if answers:
                p.lender.sendall(data_of(read, body) + wire.pack(wire.ACK, number=write.number))
                eventually(lambda: p.table.mark[9] == states.PRESENT)
            else:
                p.lender.close()
                eventually(lambda: p.ended >= 0)
                assert [one[s.ITEM_KIND] for one in p.items] == [s.LOST]


def test_what_no_lane_leads_to_is_left_to_the_program() -> None:
    """Another span, across spans, pages that wait for the disk, a span that was left."""
    with played() as p:
        p.table.mark[20] = states.ABSENT
        last = SPAN_PAGES - 1
        p.client.sendall(p.ask(1, 700) + p.ask(2, last, 2) + p.ask(3, 19, 2))
        eventually(lambda: len(p.items) == 3)
        k.leave_span(p.table, 0, states.SUSPENDED)
        p.client.sendall(p.ask(4, 8))
        eventually(lambda: len(p.items) == 4)
        assert not p.state.lanes.shared[s.WANTED]
        k.map_span(p.table, 0, 0, 0, 0)
        k.set_lane_target(p.table, 0, CHANNEL_ID + 1, HANDLE)
        p.client.sendall(p.ask(5, 8))
        eventually(lambda: len(p.items) == 5)
        assert p.state.lanes.shared[s.WANTED] == CHANNEL_ID + 1
        assert p.state.lanes.words[0, s.TAIL] == 0


def test_a_large_write_leaves_as_it_comes() -> None:
    """Its pieces are with the lender before the client has sent the rest; it is answered once, when
    the last one is acknowledged. Small requests go behind it."""
    data = b"".join(content(16 + i, 2) for i in range(32))
    with played() as p:
        request = p.write(5, 16, data)
        p.client.sendall(request[:70_000])
        came, early = pieces(p, 17)
        assert came == data[: 17 * PAGE_BYTES]
        p.lender.sendall(early)
        p.client.sendall(request[70_000:] + p.write(6, 100, content(100, 2)))
        rest, acks = pieces(p, 15)
        assert came + rest == data
        p.lender.sendall(acks[: -wire.HEADER_BYTES])
        header, body = p.asked()
        assert (header.offset, body) == (100 * PAGE_BYTES, content(100, 2))
        assert_silent(p.client)
        p.client.settimeout(10)
        p.lender.sendall(acks[-wire.HEADER_BYTES :] + wire.pack(wire.ACK, number=header.number))
        for cookie in (5, 6):
            assert exactly(p.client, 16) == struct.pack(">IIQ", nbd.SIMPLE_MAGIC, 0, cookie)
        assert (p.table.mark[16:48] == states.PRESENT).all()
        assert p.table.words[k.WRITE_LANE] == 33
        assert not p.items


def test_a_piece_that_is_refused_is_on_disk_before_the_answer() -> None:
    with played() as p:
        request = p.write(5, 16, b"".join(content(16 + i, 2) for i in range(32)))
        p.client.sendall(request[:70_000])
        first, _ = p.asked()
        p.lender.sendall(wire.pack(wire.REFUSED, handle=1, number=first.number, body=b"full"))
        eventually(lambda: bool(p.items))
        p.client.sendall(request[70_000:])
        left = 32 - first.length // PAGE_BYTES
        p.lender.sendall(pieces(p, left)[1])
        eventually(lambda: len(p.items) == 2)
        part, answer = p.items
        assert (part[s.ITEM_KIND], part[s.ITEM_FLAGS]) == (s.LOST_PART, 1)
        assert (answer[s.ITEM_KIND], answer[s.ITEM_COOKIE]) == (s.LANDING, 5)
        assert answer[s.ITEM_DISK_BARRIER] == part[s.ITEM_FIRST] + first.length // PAGE_BYTES - 1
        assert_silent(p.client)


@pytest.mark.parametrize("sent", [0, 70_000])
def test_a_lender_that_leaves_under_a_large_write(sent: int) -> None:
    """The client is answered once: by what waits for the disk."""
    with played() as p:
        request = p.write(5, 16, b"".join(content(16 + i, 2) for i in range(32)))
        p.client.sendall(request[:40_000])
        p.asked()
        p.client.sendall(request[40_000 : 40_000 + sent])
        p.lender.close()
        eventually(lambda: p.state.lanes.words[0, s.STATE] == s.GONE)
        p.client.sendall(request[40_000 + sent :])
        eventually(lambda: any(one[s.ITEM_KIND] in (s.LANDING, s.LOST) for one in p.items))
        *parts, answer = p.items
        assert parts
        assert {one[s.ITEM_KIND] for one in parts} == {s.LOST_PART}
        assert answer[s.ITEM_KIND] == s.LANDING
        last = max(one[s.ITEM_FIRST] + one[s.ITEM_LENGTH] // PAGE_BYTES - 1 for one in parts)
        assert answer[s.ITEM_DISK_BARRIER] >= last
        assert p.table.words[k.HEAD] == 32
        assert_silent(p.client)


def test_a_large_write_over_one_that_is_on_its_way_goes_to_the_disk() -> None:
    """Two writes of one page on a lane and a channel could arrive in either order."""
    with played() as p:
        p.client.sendall(p.write(5, 20, content(20, 2)))
        small, _ = p.asked()
        request = p.write(6, 16, b"".join(content(16 + i, 3) for i in range(32)))
        p.client.sendall(request[:40_000])
        eventually(lambda: p.table.words[k.HEAD] == 10)
        p.client.sendall(request[40_000:])
        _, acks = pieces(p, 23)
        eventually(lambda: bool(p.items))
        [answer] = p.items
        assert (answer[s.ITEM_KIND], answer[s.ITEM_COOKIE]) == (s.LANDING, 6)
        assert answer[s.ITEM_DISK_BARRIER] == 32, "all of it is on disk before the answer"
        assert p.table.mark[20] == states.STALE
        assert (np.delete(p.table.mark[16:25], 4) == states.ABSENT).all()
        p.lender.sendall(wire.pack(wire.ACK, number=small.number) + acks)
        assert exactly(p.client, 16) == struct.pack(">IIQ", nbd.SIMPLE_MAGIC, 0, 5)
        eventually(lambda: (p.table.mark[25:48] == states.PRESENT).all())
        assert p.table.mark[20] == states.ABSENT
        assert not (p.table.slot_flags & states.HELD).any()
        assert_silent(p.client)


def test_a_client_who_leaves_in_the_middle_of_a_large_write() -> None:
    with played() as p:
        p.client.sendall(p.write(5, 16, bytes(32 * PAGE_BYTES))[:70_000])
        _, acks = pieces(p, 17)
        p.client.close()
        p.lender.sendall(acks)
        eventually(lambda: p.ended >= 0)
        assert (p.table.mark[16:33] == states.PRESENT).all()
        assert not (p.table.slot_flags & states.HELD).any()


def pieces(p: Played, pages: int) -> tuple[bytes, bytes]:
    """The bytes of writes that the lender is sent, until so many pages are there; what it answers
    to them."""
    data = answers = b""
    while len(data) < pages * PAGE_BYTES:
        header, body = p.asked()
        assert header.kind == wire.WRITE
        data += body
        answers += wire.pack(wire.ACK, number=header.number)
    assert len(data) == pages * PAGE_BYTES
    return data, answers


def assert_silent(sock: socket.socket) -> None:
    sock.settimeout(0.02)
    with pytest.raises(TimeoutError):
        sock.recv(1)
