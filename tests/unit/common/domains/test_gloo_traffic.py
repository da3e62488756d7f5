"""gloo's headers are read out of segments that are cut anywhere; sequences of sizes come again."""

from itertools import accumulate, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.domains.traffic.gloo import HEADER, GlooMessage, GlooStream, all_reduced
from slackwater.common.domains.traffic.repeated import repeated


def stream(messages: list[tuple[int, int, int]]) -> bytes:
    """(opcode, slot, bytes of payload) as gloo writes them."""
    written = b""
    for opcode, slot, length in messages:
        payload = bytes(length) if opcode <= 1 else b""
        written += HEADER.pack(48 + len(payload), opcode, slot, 0, length, 0) + payload
    return written


MESSAGES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1), st.integers(0, 3_000)),
    min_size=1, max_size=30,
)  # fmt: skip


@given(messages=MESSAGES, first=st.integers(0, 2**32 - 1), seed=st.integers(0, 2**32))
def test_messages_are_read_from_segments_cut_anywhere(
    messages: list[tuple[int, int, int]], first: int, seed: int
) -> None:
    written, random = stream(messages), Random(seed)
    cuts = [random.randrange(1, 200) if random.random() < 0.5 else 1448 for _ in written]
    reader = GlooStream()
    # The place is found where one segment has a header in it as a whole.
    ends = [0, *(at for at in accumulate(cuts, initial=48) if at < len(written)), len(written)]
    for begin, end in pairwise(ends):
        reader.feed(begin, (first + begin) % 2**32, memoryview(written)[begin:end])
    sent = [(slot, length) for opcode, slot, length in messages if opcode <= 1]
    assert [(m.slot, m.nbytes) for m in reader.messages] == sent
    assert reader.lost == 0


def test_a_lost_segment_costs_its_messages_alone() -> None:
    one = stream([(0, 7, 1_000)])
    reader = GlooStream()
    for number in (0, 2, 3):
        reader.feed(0, number * len(one) + (9 if number else 0), memoryview(one))
    assert reader.lost == 1
    assert [m.nbytes for m in reader.messages] == [1_000, 1_000]


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_ring_of_any_size_says_its_buckets(workers: int) -> None:
    buckets = [4_800_000, 25_000_128]
    pieces = [GlooMessage(0, 9 << 56, 64)]  # Another collective.
    for number, nbytes in enumerate([*buckets, 4_800_000, 25_000_128]):
        slot = 4 << 56 | number << 24
        steps = range(2 * (workers - 1))
        pieces += [GlooMessage(number, slot | step, nbytes // workers) for step in steps]
    # Two are reduced at once, and begin in any order; the last ones are not whole.
    found = all_reduced(reversed(pieces[:-1]), workers)
    assert found == pytest.approx(buckets, abs=4 * workers)
    assert workers > 2 or found == buckets


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    before=st.lists(st.integers(10, 19), max_size=5),
    times=st.integers(5, 9),
)
def test_the_shortest_repetition_is_found(sizes: list[int], before: list[int], times: int) -> None:
    whole = before + sizes * times
    found = repeated(whole)
    if len(sizes) * times < len(before):
        return
    assert found is not None
    assert whole[-len(found.sizes) :] == list(found.sizes)
    assert len(found.sizes) * found.times == pytest.approx(len(sizes) * times)
    assert len(sizes) % len(found.sizes) == 0


def test_sizes_that_do_not_come_again_say_nothing() -> None:
    assert repeated([]) is None
    assert repeated(list(range(40))) is None
    assert repeated([1, 2, 3, 1, 2, 3]) is None
