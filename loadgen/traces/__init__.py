"""Public job traces as one record: `read(path)` finds the format and gives a `Trace`.

trace = read("cluster02.csv")                    # format found from the content
jobs = select(trace.jobs, min_gpus=2, jobs=12, time_scale=0.001)
"""

from slackwater.loadgen.traces.distribution import read_distribution
from slackwater.loadgen.traces.formats import FORMATS, detect, read
from slackwater.loadgen.traces.own import write
from slackwater.loadgen.traces.record import Trace, TraceJob, TraceRejected
from slackwater.loadgen.traces.select import seconds_after_origin, select

__all__ = [
    "FORMATS",
    "Trace",
    "TraceJob",
    "TraceRejected",
    "detect",
    "read",
    "read_distribution",
    "seconds_after_origin",
    "select",
    "write",
]
