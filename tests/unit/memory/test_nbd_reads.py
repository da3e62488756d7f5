"""Large reads of mapped memory through the compiled loop of an NBD connection: in chunks, each of
bytes that were right when it was copied."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from slackwater.loadgen.memory.checker import content
from slackwater.memory.nbd import page_read, serve
from slackwater.memory.nbd import protocol as nbd
from slackwater.memory.nbd import state as s
from slackwater.memory.pages import kernels as k
from slackwater.memory.pages import states
from slackwater.memory.pages.table import make_table
from slackwater.memory.service.warm import warm
from slackwater.memory.store import PAGE_BYTES

warm()

SPAN_PAGES = 128
PIECE_PAGES = page_read.PIECE_BYTES // PAGE_BYTES
Chunk = tuple[int, int, bytes]
"""(flags, offset, data)"""


class Mapped:
    """A device of two spans, the first mapped; `fence` takes its slab away."""

    def __init__(self, chunked: bool) -> None:
        self.table = make_table(2 * SPAN_PAGES, SPAN_PAGES, slots=2 * SPAN_PAGES)
        self.slab = np.frombuffer(
            bytearray(b"".join(content(page, 1) for page in range(SPAN_PAGES))), np.uint8
        )
        self.fence = np.zeros(1, np.int64)
        k.map_span(self.table, 0, k.address(self.slab), k.address(self.fence), 0)
        self.table.mark[:SPAN_PAGES] = states.PRESENT
        self.client, self.ours = socket.socketpair()
        self.client.settimeout(10)
        size = 2 * SPAN_PAGES * PAGE_BYTES
        self.state = s.make_connection(self.ours.fileno(), size, 4 * 1024 * 1024, chunked=chunked)
        self.items: list[list[int]] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while serve.serve(self.table, self.state) == serve.HAS_ITEMS:
            self.items += self.state.items[: self.state.words[s.ITEMS]].tolist()
            self.ours.sendall(b"item")

    def ask(self, page: int, count: int, flags: int = 0) -> None:
        head = nbd.REQUEST_MAGIC, flags, nbd.READ, 77, page * PAGE_BYTES, count * PAGE_BYTES
        self.client.sendall(nbd.REQUEST.pack(*head))

    def chunk(self) -> Chunk:
        magic, flags, kind, cookie, length = struct.unpack(">IHHQI", self.exactly(20))
        assert (magic, kind, cookie) == (nbd.CHUNK_MAGIC, nbd.CHUNK_DATA, 77)
        body = self.exactly(length)
        return flags, int.from_bytes(body[:8], "big"), body[8:]

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.client.recv(count - len(data))
            assert part, "the end came too early"
            data += part
        return data


@contextmanager
def mapped(*, chunked: bool = True) -> Iterator[Mapped]:
    made = Mapped(chunked)
    try:
        yield made
    finally:
        made.client.close()
        made.thread.join(10)
        assert not made.thread.is_alive()
        made.ours.close()


def pages(first: int, count: int) -> bytes:
    return b"".join(content(page, 1) for page in range(first, first + count))


def test_a_large_read_comes_in_chunks_and_the_last_one_says_so() -> None:
    with mapped() as m:
        m.ask(3, 2 * PIECE_PAGES + 5)
        sizes = (PIECE_PAGES, PIECE_PAGES, 5)
        first = 3
        for i, count in enumerate(sizes):
            done = nbd.CHUNK_DONE if i == 2 else 0
            assert m.chunk() == (done, first * PAGE_BYTES, pages(first, count))
            first += count
        m.ask(0, PIECE_PAGES)
        assert m.chunk() == (nbd.CHUNK_DONE, 0, pages(0, PIECE_PAGES))
        assert m.table.words[k.READ] == 3 * PIECE_PAGES + 5


def test_who_asks_for_one_chunk_gets_one() -> None:
    """NBD_CMD_FLAG_DF, which the export offers; and simple replies know no chunks."""
    count = 3 * PIECE_PAGES
    with mapped() as m:
        m.ask(1, count, nbd.DONT_FRAGMENT)
        assert m.chunk() == (nbd.CHUNK_DONE, PAGE_BYTES, pages(1, count))
    with mapped(chunked=False) as m:
        m.ask(1, count)
        assert m.exactly(16) == struct.pack(">IIQ", nbd.SIMPLE_MAGIC, 0, 77)
        assert m.exactly(count * PAGE_BYTES) == pages(1, count)


def test_what_is_not_at_hand_of_a_large_read_is_left_to_the_program() -> None:
    """The rest under the same cookie, from where the chunks end."""
    with mapped() as m:
        first = SPAN_PAGES - PIECE_PAGES - 7
        m.ask(first, 2 * PIECE_PAGES)
        assert m.chunk() == (0, first * PAGE_BYTES, pages(first, PIECE_PAGES))
        assert m.exactly(4) == b"item"
        rest = (SPAN_PAGES - 7) * PAGE_BYTES
        assert m.items[0][: s.ITEM_FLAGS] == [nbd.READ, 77, rest, page_read.PIECE_BYTES]


@pytest.mark.parametrize("count", [1, 2 * PIECE_PAGES])
def test_a_slab_that_was_fenced_off_answers_nothing(count: int) -> None:
    with mapped() as m:
        m.fence[0] = 1
        m.ask(3, count)
        assert m.exactly(4) == b"item"
        assert m.items[0][: s.ITEM_FLAGS] == [nbd.READ, 77, 3 * PAGE_BYTES, count * PAGE_BYTES]
