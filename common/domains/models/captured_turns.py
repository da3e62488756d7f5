"""The four times of a worker (Lin et al. 2018, section III-A) out of a capture of its messages.

For a job that nobody modified: what is known of it are the segments between one worker and one
server, each with its instant, its direction and its bytes. Segments of one direction less than
20 ms apart are a burst; bursts of less than 20 kB are control; of two that follow each other in one
direction, the second goes on with the first. A turn is: up, a gap, down, and the gap to the next.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from slackwater.schemas.steps import TurnTimes

QUIET_S: Final = 0.02
"""A pause within one direction that does not end a burst."""
LEAST_BYTES: Final = 20_000
"""The fewest bytes of a burst that are gradients or parameters."""
SEGMENT_BYTES_MIN: Final = 600
"""Smaller segments are acknowledgements and control."""


class Segment(NamedTuple):
    at_s: float
    down: bool
    """From the server to the worker."""
    nbytes: int


@dataclass(slots=True)
class _Burst:
    down: bool
    first_s: float
    last_s: float
    nbytes: int


def captured_turns(segments: Iterable[Segment]) -> TurnTimes:
    """Sum up the whole turns of one worker with one server; `segments` in the order of time."""
    bursts = _whole([each for each in _bursts(segments) if each.nbytes >= LEAST_BYTES])
    turns, worker_s, uplink_s, server_s, downlink_s = 0, 0.0, 0.0, 0.0, 0.0
    for up, down, following in zip(bursts, bursts[1:], bursts[2:], strict=False):
        if up.down:
            continue
        turns += 1
        uplink_s += up.last_s - up.first_s
        server_s += down.first_s - up.last_s
        downlink_s += down.last_s - down.first_s
        worker_s += following.first_s - down.last_s
    return TurnTimes(
        turns=turns,
        worker_s=worker_s,
        uplink_s=uplink_s,
        server_s=server_s,
        downlink_s=downlink_s,
    )


def _bursts(segments: Iterable[Segment]) -> list[_Burst]:
    found: list[_Burst] = []
    for segment in segments:
        if segment.nbytes < SEGMENT_BYTES_MIN:
            continue
        last = found[-1] if found else None
        if last and last.down == segment.down and segment.at_s - last.last_s < QUIET_S:
            last.last_s = segment.at_s
            last.nbytes += segment.nbytes
        else:
            found.append(_Burst(segment.down, segment.at_s, segment.at_s, segment.nbytes))
    return found


def _whole(bursts: Sequence[_Burst]) -> list[_Burst]:
    """Join neighbours of one direction: a transmission that paused."""
    found: list[_Burst] = []
    for burst in bursts:
        if found and found[-1].down == burst.down:
            found[-1].last_s = burst.last_s
        else:
            found.append(burst)
    return found
