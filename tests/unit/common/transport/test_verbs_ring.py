"""The control ring's arithmetic against a stream that is simply a list of bytes."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import DecodeRejected
from slackwater.common.transport.verbs.ring import (
    BYTES_MAX,
    MESSAGES_MAX,
    Incoming,
    Outgoing,
    credit_word,
    read_credit,
)

SIZE, MESSAGES = 64, 12


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=200))
def test_what_is_written_is_what_is_read_whatever_the_pieces(
    steps: list[tuple[int, int]],
) -> None:
    """A writer with `wish` more bytes each step, a reader that looks `slow` messages late."""
    out, into = Outgoing(SIZE, MESSAGES), Incoming(SIZE, MESSAGES)
    ring = bytearray(SIZE)
    wire: deque[int] = deque()
    pushed, received, waiting = bytearray(), bytearray(), bytearray()

    def write() -> None:
        while waiting and (room := out.room()):
            piece = waiting[:room]
            del waiting[:room]
            offset = out.put(len(piece))
            ring[offset : offset + len(piece)] = piece
            wire.append(len(piece))
            out.completed = out.written

    def read_one() -> None:
        nbytes = wire.popleft()
        offset = into.arrived(nbytes)
        received.extend(ring[offset : offset + nbytes])
        owed = into.owed()
        if owed is not None:
            credit = read_credit(owed)
            assert credit is not None
            out.credit(*credit)

    for wish, slow in steps:
        fresh = bytes((len(pushed) + n) % 251 for n in range(wish))
        pushed.extend(fresh)
        waiting.extend(fresh)
        write()
        while len(wire) > slow:
            read_one()
    write()
    while wire:
        read_one()
        write()
    assert received == pushed, "bytes changed, or a writer waits for credit that never comes"
    assert out.idle


@given(st.integers(0, BYTES_MAX), st.integers(0, MESSAGES_MAX))
def test_a_credit_word_is_read_as_it_was_said(nbytes: int, messages: int) -> None:
    assert read_credit(credit_word(nbytes, messages)) == (nbytes, messages)


@given(st.integers(0, 2**31 - 1))
def test_the_length_of_data_is_no_credit(nbytes: int) -> None:
    assert read_credit(nbytes) is None


def test_a_copy_is_not_overwritten_before_the_nic_has_sent_it() -> None:
    """The peer's credit overtakes the completion: the bytes here are still the NIC's."""
    out = Outgoing(SIZE, MESSAGES)
    out.put(SIZE)
    out.credit(SIZE, 1)
    assert out.room() == 0
    out.completed = SIZE
    assert out.room() == SIZE


def test_no_message_beyond_credit_in_bytes_or_messages() -> None:
    out = Outgoing(SIZE, MESSAGES)
    for _ in range(MESSAGES):
        out.put(1)
        out.completed = out.written
    assert out.room() == 0
    with pytest.raises(ValueError, match="0 fit"):
        out.put(1)
    out.credit(1, 1)
    assert out.room() == SIZE - MESSAGES


@pytest.mark.parametrize("sizes", [[0], [SIZE + 1], [SIZE - 1, 2], [SIZE, 1], [1] * (MESSAGES + 1)])
def test_a_writer_beyond_its_credit_is_refused(sizes: list[int]) -> None:
    """Nothing, more than there is, over the end, before credit came, too many: each is told."""
    into = Incoming(SIZE, MESSAGES)

    def come() -> None:
        for nbytes in sizes:
            into.arrived(nbytes)

    with pytest.raises(DecodeRejected):
        come()


def test_a_reader_that_gives_back_what_never_came_is_refused() -> None:
    out = Outgoing(SIZE, MESSAGES)
    out.put(10)
    with pytest.raises(DecodeRejected, match="credit"):
        out.credit(11, 1)
    again = Outgoing(SIZE, MESSAGES)
    again.put(10)
    with pytest.raises(DecodeRejected, match="credit"):
        again.credit(10, 2)
