"""Samples of a job-size distribution: one column `duration`, as the Tiresias simulator ships them.

The Gittins index needs the distribution of total GPU time (Gu, dissertation, section 3.3.2.2);
these files are the samples that its simulator started from, in GPU-seconds.
"""

from pathlib import Path

from slackwater.common.base import limits
from slackwater.loadgen.traces.record import TraceRejected
from slackwater.loadgen.traces.sheet import Sheet, load


def read_distribution(path: Path | str) -> tuple[float, ...]:
    """The samples in ascending order."""
    path = Path(path)
    sheet = Sheet(path, load(path)[1])
    if "duration" not in sheet:
        raise TraceRejected(path, sheet.line, "duration", None, "this column; it is missing")
    high = limits.TRACE_SECONDS_MAX * limits.TRACE_GPUS_MAX
    samples = sorted(sheet.number("duration", high=high) for _ in sheet.rows())
    if not samples:
        raise TraceRejected(path, None, None, None, "at least one sample")
    return tuple(samples)
