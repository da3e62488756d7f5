"""The four times out of a capture of one worker and one server (Lin et al. 2018, III-A)."""

from collections.abc import Iterator
from random import Random

import pytest

from slackwater.common.domains.models.captured_turns import (
    LEAST_BYTES,
    QUIET_S,
    Segment,
    captured_turns,
)

NBYTES, SEGMENT, RATE = 500_000, 1448, 50e6 / 8


def message(at_s: float, down: bool, stall_s: float = 0.0) -> Iterator[Segment]:
    """A message at the link's rate; it stalls once, half-way."""
    for number in range(NBYTES // SEGMENT):
        late_s = stall_s if number > NBYTES // SEGMENT // 2 else 0.0
        yield Segment(at_s + number * SEGMENT / RATE + late_s, down, SEGMENT)


def capture(turns: int, rng: Random, stall_s: float = 0.0) -> tuple[list[Segment], list[float]]:
    """Generate turns; return the times that they were made of, as sums."""
    found: list[Segment] = []
    now_s, sums = 0.0, [0.0] * 4
    for number in range(turns + 1):
        begun_s = now_s
        for down, server_s in ((False, 0.012), (True, 0.0)):
            segments = list(message(now_s, down, stall_s))
            found += segments
            lasted_s = segments[-1].at_s - now_s
            now_s = segments[-1].at_s + server_s
            if number < turns:
                sums[3 if down else 1] += lasted_s
                sums[2] += server_s
            # Acknowledgements and control go the other way meanwhile.
            found += [Segment(s.at_s + 1e-4, not down, 66) for s in segments[::2]]
        found.append(Segment(now_s + 0.05, False, LEAST_BYTES - 1))
        think_s = 0.25 * rng.uniform(0.8, 1.2)
        now_s += think_s
        if number < turns:
            sums[0] += think_s
        assert now_s > begun_s
    return sorted(found), sums


@pytest.mark.parametrize("stall_s", [0.0, QUIET_S / 2, 4 * QUIET_S])
def test_the_times_that_a_capture_was_made_of_come_out(stall_s: float) -> None:
    """Also where a transmission pauses, for less or longer than what ends a burst."""
    segments, sums = capture(40, Random(1), stall_s)
    found = captured_turns(segments)
    assert found.turns == 40
    assert found.worker_s == pytest.approx(sums[0], rel=1e-6)
    assert found.uplink_s == pytest.approx(sums[1], rel=1e-6)
    assert found.server_s == pytest.approx(sums[2], rel=1e-6)
    assert found.downlink_s == pytest.approx(sums[3], rel=1e-6)


def test_a_capture_without_whole_turns_tells_none() -> None:
    assert captured_turns([]).turns == 0
    assert captured_turns(list(message(0.0, down=True))).turns == 0
    assert captured_turns([Segment(0.1 * n, n % 2 == 1, 700) for n in range(100)]).turns == 0
