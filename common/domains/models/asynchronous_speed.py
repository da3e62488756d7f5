"""How fast an asynchronous job would be with any number of workers, of the four times that its
Agents measure: Lin et al. (2018), sections III-B (exact analysis) and VII (several servers)."""

from collections.abc import Sequence

import numpy as np

from slackwater.common.domains.models.queueing import (
    EQ_4,
    Floats,
    Method,
    StepTimes,
    throughputs,
    undisturbed,
)
from slackwater.common.domains.models.queueing_servers import longest_s
from slackwater.common.domains.models.queueing_stations import Sharing
from slackwater.schemas.steps import SHARES_MAX, StepProfile, TurnTimes

SHARE_MIN = 1e-6
"""A server with a smaller part of the bytes is left out."""


def profile_of(times: TurnTimes, workers: int, pushed_bytes: Sequence[int] = ()) -> StepProfile:
    """Make a profile of the turns that workers counted while `workers` trained; of at least one
    turn. `pushed_bytes`: to each server. Raises Rejected for times that cannot be."""
    mean = StepTimes(
        worker_s=times.worker_s / times.turns,
        uplink_s=times.uplink_s / times.turns,
        server_s=times.server_s / times.turns,
        downlink_s=times.downlink_s / times.turns,
    )
    if workers > 1 and mean.uplink_s + mean.server_s + mean.downlink_s > 0:
        mean = undisturbed(mean, workers)
    return StepProfile(
        worker_s=mean.worker_s,
        uplink_s=mean.uplink_s,
        server_s=mean.server_s,
        downlink_s=mean.downlink_s,
        turns=times.turns,
        workers=workers,
        shares=shares_of(pushed_bytes),
    )


def shares_of(nbytes: Sequence[int]) -> tuple[float, ...]:
    """Return each server's part of the bytes, the largest first; empty: there are not several that
    count, or too many to tell."""
    whole = sum(nbytes)
    parts = sorted((each / whole for each in nbytes if each > SHARE_MIN * whole), reverse=True)
    if not 1 < len(parts) <= SHARES_MAX:
        return ()
    return tuple(part / sum(parts) for part in parts)


def speeds(
    profile: StepProfile, workers: int, method: Method = "exact", sharing: Sharing = EQ_4
) -> Floats:
    """X(0) = 0, X(1), ..., X(workers): iterations a second of all workers together. X(1) is what
    was measured, whatever the servers' shares. Raises Rejected for times that cannot be."""
    # A worker waits for the slowest of its servers: their times together are longer than measured.
    longer = 1.0 / longest_s(profile.shares) if profile.shares else 1.0
    step = StepTimes(
        worker_s=profile.worker_s,
        uplink_s=longer * profile.uplink_s,
        server_s=longer * profile.server_s,
        downlink_s=longer * profile.downlink_s,
    )
    found = throughputs(step, workers, method, shares=profile.shares, sharing=sharing)
    return np.asarray(found, np.float64)
