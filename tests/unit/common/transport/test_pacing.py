"""The cap of what is copied between hosts, in virtual time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Unavailable
from slackwater.common.shell.simulated_loop import SimClock, SimLoop, run_simulated
from slackwater.common.transport.pacing import PIECE_BYTES, PIECES, Bandwidth, paced

RATE = 1_000_000


def clock() -> SimClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return SimClock(loop)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 5.0), st.integers(1, 5 * PIECE_BYTES)), min_size=1, max_size=6
    )
)
def test_in_no_span_more_than_the_rate_and_one_piece_leaves(
    copies: list[tuple[float, int]],
) -> None:
    """Several copies that begin at any time share one cap, and none of their bytes is lost."""

    async def main() -> None:
        now, sent = clock(), []
        begun_s = now.now_s()
        bandwidth = Bandwidth(RATE, now)

        async def copy(after_s: float, nbytes: int) -> None:
            await now.sleep_until(begun_s + after_s)

            async def write(offset: int, piece: memoryview) -> None:
                sent.append((now.now_s(), len(piece)))

            await paced(memoryview(bytes(nbytes)), bandwidth.take, write)

        await asyncio.gather(*(copy(*each) for each in copies))
        assert sum(nbytes for _, nbytes in sent) == sum(nbytes for _, nbytes in copies)
        for first, (start_s, _) in enumerate(sent):
            for last in range(first, len(sent)):
                span_s = sent[last][0] - start_s
                taken = sum(nbytes for _, nbytes in sent[first : last + 1])
                assert taken <= RATE * span_s + PIECE_BYTES + 1

    run_simulated(main())


def test_without_a_pace_it_is_one_write() -> None:
    async def main() -> None:
        sent: list[tuple[int, int]] = []

        async def write(offset: int, piece: memoryview) -> None:
            sent.append((offset, len(piece)))

        await paced(memoryview(bytes(3 * PIECE_BYTES)), None, write)
        assert sent == [(0, 3 * PIECE_BYTES)]

    run_simulated(main())


def test_pieces_make_the_whole_in_order() -> None:
    async def main() -> None:
        now, into = clock(), bytearray(2 * PIECE_BYTES + 7)
        whole = bytes(range(256)) * (len(into) // 256 + 1)

        async def write(offset: int, piece: memoryview) -> None:
            into[offset : offset + len(piece)] = piece

        begun_s = now.now_s()
        bandwidth = Bandwidth(RATE, now)
        await paced(memoryview(whole)[: len(into)], bandwidth.take, write)
        assert bytes(into) == whole[: len(into)]
        assert now.now_s() - begun_s >= 2 * PIECE_BYTES / RATE

    run_simulated(main())


def test_a_piece_that_fails_ends_the_copy_with_its_error_and_none_goes_on() -> None:
    async def main() -> None:
        now, begun, ended = clock(), [], []

        async def write(offset: int, piece: memoryview) -> None:
            begun.append(offset)
            if offset == 3 * PIECE_BYTES:
                raise Unavailable("the peer is gone")
            await asyncio.sleep(1000.0)
            ended.append(offset)

        with pytest.raises(Unavailable, match="the peer is gone"):
            await paced(memoryview(bytes(20 * PIECE_BYTES)), Bandwidth(RATE, now).take, write)
        assert len(begun) <= PIECES
        assert ended == []

    run_simulated(main())
