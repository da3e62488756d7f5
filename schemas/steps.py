"""The four times of a worker that trains with a parameter server (Lin et al. 2018, section III-A):
what an Agent measures of its turns, and what its job is known for. Whoever measures by packets
says the same (common/domains/models/captured_turns.py)."""

from typing import Annotated

import msgspec

from slackwater.schemas.base import WORKERS_MAX, Count, Record, Seconds

SHARES_MAX = 12
"""Servers whose parts of the bytes are told; with more, their load is taken to be even."""
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class TurnTimes(Record, kw_only=True, frozen=True):
    """Sums over whole turns of one worker: computing, its gradients on their way up, waiting for
    the server, parameters on their way down. Together they are all of the time."""

    turns: Count = 0
    worker_s: Seconds = 0.0
    uplink_s: Seconds = 0.0
    server_s: Seconds = 0.0
    downlink_s: Seconds = 0.0


class StepProfile(Record, kw_only=True, frozen=True):
    """One worker's times for an iteration, as means, each as if it were alone."""

    worker_s: Seconds
    uplink_s: Seconds
    server_s: Seconds
    downlink_s: Seconds
    turns: Count
    """TurnSums that they are means of."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=WORKERS_MAX)] = 1
    """How many trained meanwhile; of more than one, their waiting for each other is reckoned out.
    """
    shares: Annotated[tuple[Share, ...], msgspec.Meta(max_length=SHARES_MAX)] = ()
    """Part of the pushed bytes that each server took, the largest first; empty: one server, or
    nothing went over a network."""
