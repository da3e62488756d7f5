"""The parser of records: whatever the pieces, the same records, and nothing on a liar's word."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import AccessRefused, DecodeRejected, Rejected, Unavailable
from slackwater.common.transport import wire

LENGTH_MAX = 300


class Collector:
    """Keeps records."""

    def __init__(self) -> None:
        self.records: list[tuple[wire.Header, bytes]] = []

    def begin(self, header: wire.Header) -> None:
        wire.check_length(header, LENGTH_MAX)

    def end(self, header: wire.Header, body: bytes) -> None:
        self.records.append((header, body))


def feed(parser: wire.Parser, data: bytes, pieces: list[int]) -> None:
    """Give the parser `data` in pieces of these lengths, over and over, and the rest at once."""
    turn = 0
    while data:
        room = parser.room()
        assert len(room) > 0
        wanted = pieces[turn % len(pieces)] if pieces else len(data)
        count = min(len(room), wanted, len(data))
        room[:count] = data[:count]
        parser.took(count)
        data, turn = data[count:], turn + 1


RECORDS = st.lists(
    st.tuples(
        st.sampled_from([wire.FRAME, wire.OPEN, wire.ACK, wire.WRITE, wire.GOODBYE]),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=LENGTH_MAX),
    ),
    max_size=12,
)


def encode(records: list[tuple[int, int, int, int, bytes]]) -> bytes:
    return b"".join(
        wire.pack(kind, handle=handle, number=number, offset=offset, body=body)
        for kind, handle, number, offset, body in records
    )


@given(RECORDS, st.lists(st.integers(1, 700), min_size=1, max_size=8))
def test_any_pieces_give_the_same_records(
    records: list[tuple[int, int, int, int, bytes]], pieces: list[int]
) -> None:
    sink = Collector()
    parser = wire.Parser(sink)
    feed(parser, encode(records), pieces)
    wanted = [(wire.Header(k, h, n, o, len(body)), body) for k, h, n, o, body in records]
    assert sink.records == wanted
    assert parser.records == len(records)
    assert not parser.partial


@given(RECORDS.filter(bool))
@settings(max_examples=30)
def test_a_split_at_every_byte_gives_the_same_records(
    records: list[tuple[int, int, int, int, bytes]],
) -> None:
    data = encode(records)
    whole = Collector()
    feed(wire.Parser(whole), data, [])
    for split in range(len(data) + 1):
        sink = Collector()
        parser = wire.Parser(sink)
        feed(parser, data[:split], [])
        assert sink.records == whole.records[: len(sink.records)]
        feed(parser, data[split:], [])
        assert sink.records == whole.records, split


@given(st.binary(max_size=2000), st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_garbage_is_refused_or_waits_for_more(data: bytes, pieces: list[int]) -> None:
    """Never another exception, and never a body beyond the bound."""

    sink = Collector()
    with contextlib.suppress(DecodeRejected):
        feed(wire.Parser(sink), data, pieces)
    assert all(len(body) <= LENGTH_MAX for _, body in sink.records)


@given(RECORDS, st.integers(1, 12))
def test_pausing_holds_back_and_loses_nothing(
    records: list[tuple[int, int, int, int, bytes]], every: int
) -> None:
    class Pausing(Collector):
        def end(self, header: wire.Header, body: bytes) -> None:
            super().end(header, body)
            parser.paused = len(self.records) % every == 0

    sink = Pausing()
    parser = wire.Parser(sink)
    data = encode(records)
    while data:
        room = parser.room()
        count = min(len(room), len(data), 100)
        room[:count] = data[:count]
        data = data[count:]
        parser.took(count)
        while parser.paused:
            before = len(sink.records)
            parser.paused = False
            parser.run()
            assert len(sink.records) <= before + every
    assert len(sink.records) == len(records)


def test_a_length_beyond_the_bound_is_refused_at_its_header() -> None:
    parser = wire.Parser(Collector())
    with pytest.raises(DecodeRejected, match=f"at most {LENGTH_MAX}"):
        feed(parser, wire.HEADER.pack(wire.FRAME, 0, 0, 0, LENGTH_MAX + 1), [])


@pytest.mark.parametrize(
    "error", [AccessRefused("no"), Rejected("never"), Unavailable("later"), DecodeRejected("what")]
)
def test_a_refusal_is_raised_as_what_it_was_or_its_parent(error: Rejected | Unavailable) -> None:
    sink = Collector()
    feed(wire.Parser(sink), wire.pack_refusal(error, offset=7), [])
    [(header, body)] = sink.records
    again = wire.refusal(header, body)
    assert isinstance(error, type(again))
    assert str(again) == str(error)
    assert header.offset == 7


def test_a_long_reason_is_cut_and_a_broken_one_is_shown() -> None:
    record = wire.pack_refusal(Rejected("é" * 5000))
    header = wire.Header._make(wire.HEADER.unpack_from(record))
    assert header.length == wire.REASON_BYTES_MAX
    assert str(wire.refusal(header, b"\xff\xfe")) == "\ufffd\ufffd"
    assert "without a reason" in str(wire.refusal(header, b""))
