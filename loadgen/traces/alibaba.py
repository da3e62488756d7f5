"""Alibaba's GPU-sharing pods, v2023 (`openb_pod_list_*.csv`, seconds).

A pod runs from `scheduled_time` to `deletion_time`. `gpu_milli` below 1000 is a share of one GPU
and stays in `extra`, as do the pod's CPU and memory; the simulator gives such a pod a whole GPU and
says how many there were. Pods that were never scheduled have no run
time; they are counted as skipped.
"""

from collections.abc import Iterator

from slackwater.common.base import limits
from slackwater.loadgen.traces.record import TraceJob
from slackwater.loadgen.traces.sheet import Sheet

ALIBABA_COLUMNS = (
    "name",
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "qos",
    "pod_phase",
    "creation_time",
    "deletion_time",
    "scheduled_time",
)


def alibaba_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    for _ in sheet.rows():
        created_s = sheet.number("creation_time")
        if sheet.is_blank("scheduled_time") or sheet.is_blank("deletion_time"):
            sheet.skip("never scheduled, or not ended when the trace was taken")
            continue
        scheduled_s = sheet.number("scheduled_time", low=created_s)
        ended_s = sheet.number("deletion_time", low=scheduled_s, high=limits.TRACE_SECONDS_MAX)
        yield TraceJob(
            id=sheet.identifier("name"),
            submit_s=created_s,
            gpus=sheet.gpus("num_gpu", low=0),
            duration_s=ended_s - scheduled_s,
            tenant=sheet.text("qos"),
            extra={
                "cpu_milli": sheet.whole("cpu_milli"),
                "memory_mib": sheet.whole("memory_mib"),
                "gpu_milli": sheet.whole("gpu_milli", high=1000),
                "gpu_spec": sheet.text("gpu_spec"),
                "pod_phase": sheet.text("pod_phase"),
                "queued_s": scheduled_s - created_s,
                **sheet.others(*ALIBABA_COLUMNS),
            },
        )
