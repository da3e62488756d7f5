"""Workloads of Pollux and Sia: `name,time,application,num_replicas,batch_size` (seconds).

They carry no duration: it follows from the application's measured throughput and statistical
efficiency under whatever allocation a policy gives it (Qiao, thesis, section 3.5.3).
"""

from collections.abc import Iterator

from slackwater.loadgen.traces.record import TraceJob
from slackwater.loadgen.traces.sheet import Sheet

POLLUX_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


def pollux_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    for _ in sheet.rows():
        yield TraceJob(
            id=sheet.identifier("name"),
            submit_s=sheet.number("time"),
            gpus=sheet.gpus("num_replicas"),
            model=sheet.identifier("application"),
            batch_size=sheet.whole("batch_size", low=1),
            extra=dict(sheet.others(*POLLUX_COLUMNS)),
        )
