"""The summary of a run: how much memory is in use, how evenly, and is its baseline the paper's."""

from collections.abc import Sequence
from statistics import median
from typing import Final

import msgspec

from slackwater.loadgen.simulator.memory.run import MachineRow, MemoryOutcome

BASELINE: Final = (0.388, 0.428)
"""Within two points of 40.8 %."""
BASELINE_IMBALANCE: Final = (18.0, 27.0)
"""Within 20 % of 22.5."""


class MemorySummary(msgspec.Struct):
    """Shares of memory in use are averages over the run, by machine, unless it says `end`."""

    policy: str
    seed: int
    machines: int
    containers: int
    utilization: float
    gain: float
    """Gain over the baseline of the same seed."""
    max_to_median: float
    max_to_min: float
    utilization_end: float
    max_to_min_end: float
    comparable: bool
    """The baseline of this seed is the paper's: 40.8 % within 2 points, 22.5 within a fifth."""
    mapped: int
    evicted: int
    revoked: int
    refused: int
    paging_mbps: float
    """A machine's, read and written."""
    read_remote: float
    filled: float
    over_limit_bytes: float
    map_ms: float
    evict_us: float
    steps: int
    wall_s: float


def summarize(outcome: MemoryOutcome, seconds: int, baseline: MemoryOutcome) -> MemorySummary:
    used, at_end = [r.used for r in outcome.rows], [r.used_end for r in outcome.rows]
    mean, of_baseline = _mean(outcome.rows), _mean(baseline.rows)
    of_baseline_used = [row.used for row in baseline.rows]
    low, high = BASELINE
    least, most = BASELINE_IMBALANCE
    facts = outcome.facts
    return MemorySummary(
        policy=outcome.policy,
        seed=outcome.seed,
        machines=len(outcome.rows),
        containers=outcome.containers,
        utilization=mean,
        gain=mean / of_baseline,
        max_to_median=max(used) / median(used),
        max_to_min=_spread(used),
        utilization_end=sum(at_end) / len(at_end),
        max_to_min_end=_spread(at_end),
        comparable=low <= of_baseline <= high and least <= _spread(of_baseline_used) <= most,
        mapped=facts.get("span mapped", 0),
        evicted=facts.get("slab evicted", 0),
        revoked=facts.get("slab revoked", 0),
        refused=facts.get("span refused", 0),
        paging_mbps=outcome.paged_bytes * 8 / 1e6 / seconds / len(outcome.rows),
        read_remote=outcome.read_remote,
        filled=outcome.filled,
        over_limit_bytes=outcome.over_limit_bytes,
        map_ms=outcome.map_ms,
        evict_us=outcome.evict_us,
        steps=outcome.steps,
        wall_s=outcome.wall_s,
    )


def _mean(rows: Sequence[MachineRow]) -> float:
    return sum(row.used for row in rows) / len(rows)


def _spread(used: Sequence[float]) -> float:
    """Infinite where a machine uses nothing at all; JSON has no such number."""
    return max(used) / max(min(used), 1e-9)
