"""Find a job's iterations, their bytes and their messages in what it sends, knowing no protocol.

Times are noisy, bytes are not: every iteration sends the same bytes. So the period is looked for in
the byte stream (after how many bytes do the sender's pauses come again?) and only then in time; and
a message begins where the sender pauses in most iterations at the same byte. The tensors' sizes of
a parameter-server job come out of it (Tiresias: Gu, dissertation, section 3.3.3.2, where they are
read from RDMA messages).

A ring all-reduce sends pieces of buckets, whose sizes say nothing of tensors: it is known by its
sending and receiving at the same time, or its receiving elsewhere.
"""

from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

PAUSES_S: Final = (0.0001, 0.0003, 0.001)
SHARE: Final = 0.6
"""The part of all iterations that pause where a message begins."""
SURE: Final = 0.9
"""The same, where a message of more than BUFFER_BYTES would be cut there."""
BUFFER_BYTES: Final = 1 << 22
"""Most bytes that Linux keeps to send (tcp_wmem): a sender with more pauses while they drain."""
PEAK: Final = 0.75
"""The first peak of the likeness counts that is so high, relative to the highest."""
SLACK: Final = 0.01
FLOW_BYTES_MIN: Final = 20_000
"""A flow of fewer bytes is not training."""
ITERATIONS_MIN: Final = 3
MIXED: Final = 0.25
"""A flow receives while it sends if more than this part comes outside the pauses of iterations."""
_BINS: Final = 1 << 16
_PERIOD_BINS_MIN: Final = 8
Array = Any


class Flow(NamedTuple):
    """Bursts that one direction of a connection sent; arrays of equal length, in order."""

    begin_s: Array
    end_s: Array
    at: Array
    """Bytes of the stream before the burst, since the first."""
    nbytes: Array
    received: Array
    """Bytes that had come the other way when the burst began, since the first."""
    received_end: Array


class Recurrence(NamedTuple):
    """A flow's iterations."""

    nbytes: int
    """Bytes of one iteration."""
    iterations: float
    iteration_s: float
    messages: tuple[int, ...]
    """Bytes of the messages of one iteration, in order; empty: none is to be told."""
    both_ways: bool
    """It receives while it sends, or hardly at all: pieces of a ring."""


def unwrapped(numbers: Array) -> Array:
    """Turn 32-bit numbers of a stream into distances from the first."""
    step = np.diff(numbers.astype(np.int64))
    return np.r_[0, np.cumsum((step + (1 << 31)) % (1 << 32) - (1 << 31))]


def flow_of(bursts: Array) -> Flow:
    """Take the bursts of one flow: columns begin_ns, end_ns, flow, seq, nbytes, ack, ack_end."""
    acks = unwrapped(bursts[:, 5:7].reshape(-1)).reshape(-1, 2)
    return Flow(
        bursts[:, 0] * 1e-9, bursts[:, 1] * 1e-9, unwrapped(bursts[:, 3]), bursts[:, 4],
        acks[:, 0], acks[:, 1],
    )  # fmt: skip


def recurrence(flow: Flow) -> Recurrence | None:
    """Return the flow's iterations; None: nothing in it comes again."""
    if len(flow.at) < ITERATIONS_MIN or flow.at[-1] + flow.nbytes[-1] < FLOW_BYTES_MIN:
        return None
    pause_s = np.r_[PAUSES_S[-1], np.maximum(0.0, flow.begin_s[1:] - flow.end_s[:-1])]
    rough = _rough_period(flow.at, pause_s)
    best: Recurrence | None = None
    for least_s in PAUSES_S:
        pausing = pause_s >= least_s
        period = _exact_period(flow.at[pausing], rough)
        found = _cut(flow, pausing, pause_s, period) if period else None
        if found and (best is None or len(found.messages) >= len(best.messages)):
            best = found
    return best


def _rough_period(at: Array, pause_s: Array) -> int:
    """Find the first high peak of the autocorrelation of pauses over the bytes; 0: there is
    none."""
    width = int(at[-1]) // _BINS + 1
    pauses = np.zeros(_BINS + 2)
    np.add.at(pauses, at // width, pause_s)
    pauses -= pauses.mean()
    spectrum = np.fft.rfft(np.r_[pauses, np.zeros(len(pauses))])
    likeness = np.fft.irfft(spectrum * spectrum.conj())[: int(len(pauses) * 0.6)]
    if likeness[0] <= 0.0:
        return 0
    likeness *= len(pauses) / (len(pauses) - np.arange(len(likeness))) / likeness[0]
    smooth = np.convolve(likeness, np.ones(3), "same")
    first = _PERIOD_BINS_MIN
    high = PEAK * smooth[first:].max()
    for place in np.flatnonzero(smooth[first:-1] >= high) + first:
        if smooth[place] == smooth[max(first, place - first) : place + first + 1].max():
            return width * int(place)
    return 0


def _exact_period(starts: Array, rough: int) -> int:
    """Find the distance that most pairs of pauses about a period apart have, to the byte; 0: there
    are no such pairs."""
    slack = max(2_000.0, SLACK * rough)
    first, last = np.searchsorted(starts, (starts + rough - slack, starts + rough + slack))
    votes: Counter[int] = Counter()
    for start, low, high in zip(starts, first, last, strict=True):
        votes.update((starts[low:high] - start).tolist())
    votes.pop(0, None)
    return votes.most_common(1)[0][0] if votes else 0


def _cut(flow: Flow, pausing: Array, pause_s: Array, period: int) -> Recurrence | None:
    """Cut the flow into iterations of `period` bytes, and these into messages."""
    starts, lasting_s, begun_s = flow.at[pausing], pause_s[pausing], flow.begin_s[pausing]
    end = int(flow.at[-1] + flow.nbytes[-1])
    votes = Counter((starts % period).tolist())
    begins = _begins(votes, end / period - 1, period)
    if not begins:
        return None
    # Iterations are counted from where the longest pauses are.
    boundary = max(begins, key=lambda residue: np.median(lasting_s[starts % period == residue]))
    marks = np.flatnonzero(starts % period == boundary)
    first = int(starts[marks[0]])
    iterations = (end - first) / period
    apart = (starts[marks[-1]] - first) / period
    if apart < ITERATIONS_MIN - 1:
        return None
    turned = [(residue - boundary) % period for residue in begins]
    turned = [*sorted(turned), period]
    return Recurrence(
        nbytes=period,
        iterations=iterations,
        iteration_s=float((begun_s[marks[-1]] - begun_s[marks[0]]) / apart),
        messages=tuple(after - before for before, after in pairwise(turned)),
        both_ways=_both_ways(flow, round(iterations), end),
    )


def _begins(votes: Counter[int], iterations: float, period: int) -> list[int]:
    """Choose where in an iteration messages begin. `votes`: how often the sender paused there."""
    found = sorted(at for at, count in votes.items() if count >= max(2, SHARE * iterations))
    sure = [at for at in found if votes[at] >= SURE * iterations]
    if not sure:
        return found
    around = [sure[-1] - period, *sure, sure[0] + period]

    def stalls(at: int) -> bool:
        after = bisect_right(around, at)
        return around[after] - around[after - 1] > BUFFER_BYTES

    return [at for at in found if votes[at] >= SURE * iterations or not stalls(at)]


def _both_ways(flow: Flow, iterations: int, sent: int) -> bool:
    """Say whether the flow receives hardly anything, or while it sends: what comes then does not
    come in one pause of each iteration."""
    received = int(flow.received_end[-1] - flow.received[0])
    if received < sent / 2:
        return True
    between = np.sort(flow.received[1:] - flow.received_end[:-1])[::-1]
    return bool(received - between[: iterations + 1].sum() > MIXED * received)
