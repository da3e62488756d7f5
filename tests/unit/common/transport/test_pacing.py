"""The cap of what is copied between hosts, in virtual time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.base.errors import Unavailable
from slackwater.common.shell.simulated_loop import SimClock, SimLoop, run_simulated
from slackwater.common.transport.pacing import (
    LEAST_PART,
    PIECE_BYTES,
    PIECES,
    Bandwidth,
    Leftover,
    leftover_of,
    paced,
)

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


class Wire:
    """Counts what a link carried, both ways."""

    def __init__(self) -> None:
        self.received = self.sent = 0

    def carried(self) -> tuple[int, int]:
        return self.received, self.sent


def test_the_rate_is_not_saved_up() -> None:
    async def main() -> None:
        bandwidth = Bandwidth(1000.0, clock())
        assert bandwidth.spend(500, 0.0) == 0.5
        assert bandwidth.spend(500, 0.1) == 1.0
        assert bandwidth.spend(500, 60.0) == 60.5

    run_simulated(main())


def test_background_work_gets_what_others_leave_of_the_link() -> None:
    """Gradients fill half of the link, then all of it, then nothing: what is copied meanwhile goes
    at half of the rate, at a sixteenth, and at all of it."""

    async def main() -> None:
        wire, now = Wire(), clock()
        bandwidth = Bandwidth(0, now, Leftover(RATE, wire.carried))
        rates = []
        for others_bytes_s in (RATE // 2, RATE, 0):
            begun_s, copied = now.now_s(), 0
            while now.now_s() < begun_s + 20.0:
                before_s = now.now_s()
                await bandwidth.take(10_000)
                wire.received += int(others_bytes_s * (now.now_s() - before_s))
                wire.sent += 10_000  # Pulls leave too, and the copy with them.
                wire.sent += int(others_bytes_s * (now.now_s() - before_s))
                if now.now_s() > begun_s + 10.0:
                    copied += 10_000
            rates.append(copied / 10.0)
        assert rates[0] == pytest.approx(RATE / 2, rel=0.1)
        assert rates[1] == pytest.approx(RATE * LEAST_PART, rel=0.2)
        assert rates[2] == pytest.approx(RATE, rel=0.1)

    run_simulated(main())


def test_two_that_share_a_link_keep_to_its_budget_without_knowing_each_other() -> None:
    """An aggregator's copies and a device's pages, each in a process of its own: what one of them
    takes is not left to the other."""

    async def main() -> None:
        wire, now = Wire(), clock()
        wire_bytes: list[tuple[float, int]] = []

        async def copy(bandwidth: Bandwidth, until_s: float) -> None:
            while now.now_s() < until_s:
                await bandwidth.take(10_000)
                wire.sent += 10_000
                wire_bytes.append((now.now_s(), 10_000))

        begun_s = now.now_s()
        both = [Bandwidth(0, now, Leftover(RATE, wire.carried)) for _ in range(2)]
        await asyncio.gather(*(copy(each, begun_s + 40.0) for each in both))
        settled = sum(nbytes for at_s, nbytes in wire_bytes if at_s >= begun_s + 20.0)
        assert settled / 20.0 <= RATE * (1.0 + 2 * LEAST_PART)
        assert settled / 20.0 >= RATE * 0.9

    run_simulated(main())


def test_without_a_cap_and_without_a_link_there_is_no_bandwidth() -> None:
    async def main() -> None:
        with pytest.raises(AssertionError):
            Bandwidth(0, clock())

    run_simulated(main())
    assert leftover_of(None) is None
