"""Gavel's and Shockwave's `.trace` files: tab separated, no header, 7, 10 or 12 columns.

The job type names model and batch size ("ResNet-50 (batch size 64)"); the second column is a shell
command template, kept as opaque text and never run. Work is given in steps: `with_durations`
divides by a measured throughput table (`simulation_throughputs.json`); Shockwave's files bring a
duration of their own.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces.record import Scalar, Trace, TraceJob
from slackwater.loadgen.traces.sheet import Sheet

PHILLY_SAMPLE = (
    "job_type",
    "command",
    "steps_argument",
    "needs_data_dir",
    "total_steps",
    "arrival_time",
    "scale_factor",
)
GAVEL = (
    "job_type",
    "command",
    "directory",
    "steps_argument",
    "needs_data_dir",
    "total_steps",
    "scale_factor",
    "priority_weight",
    "slo",
    "arrival_time",
)
SHOCKWAVE = (
    "job_type",
    "command",
    "directory",
    "steps_argument",
    "needs_data_dir",
    "total_steps",
    "scale_factor",
    "mode",
    "priority_weight",
    "slo",
    "duration",
    "arrival_time",
)
GAVEL_WIDTHS = {len(columns): columns for columns in (PHILLY_SAMPLE, GAVEL, SHOCKWAVE)}

_JOB_TYPE = re.compile(r"(?P<model>.+?) \(batch size (?P<batch_size>\d{1,9})\)")


def gavel_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    for number, _ in enumerate(sheet.rows()):
        job_type = sheet.identifier("job_type")
        match = _JOB_TYPE.fullmatch(job_type)
        extra: dict[str, Scalar] = {"job_type": job_type}
        extra["command"] = sheet.text("command", limits.TRACE_TEXT_LONG_MAX)
        if "mode" in sheet:
            extra["mode"] = sheet.text("mode")
        if "priority_weight" in sheet:
            extra["priority_weight"] = sheet.number("priority_weight")
            slo = sheet.number("slo", low=-1.0)
            if slo >= 0:  # -1: none
                extra["slo"] = slo
        yield TraceJob(
            id=str(number),
            submit_s=sheet.number("arrival_time"),
            gpus=sheet.gpus("scale_factor"),
            duration_s=sheet.number("duration") if "duration" in sheet else None,
            model=match["model"] if match else job_type,
            iterations=sheet.whole("total_steps", low=1),
            batch_size=int(match["batch_size"]) if match else None,
            extra=extra,
        )


def with_durations(trace: Trace, throughputs: Path, gpu_type: str = "v100") -> Trace:
    """The trace with each job's duration: steps / measured steps per second, run alone.

    A job type that was not measured at its number of GPUs is refused by name.
    """
    try:
        table: Any = json.loads(throughputs.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Rejected(f"{throughputs}: expected Gavel's throughput table ({error})") from error
    if not isinstance(table, Mapping) or not isinstance(table.get(gpu_type), Mapping):
        known = ", ".join(table) if isinstance(table, Mapping) else "none"
        raise Rejected(f"{throughputs}: no GPU type {gpu_type!r}; it has: {known}")
    measured = table[gpu_type]
    jobs = tuple(_with_duration(job, measured, f"{throughputs} ({gpu_type})") for job in trace.jobs)
    return msgspec.structs.replace(trace, jobs=jobs)


def _with_duration(job: TraceJob, measured: Mapping[str, Any], source: str) -> TraceJob:
    key = repr((job.extra.get("job_type", job.model), job.gpus))
    entry = measured.get(key)
    rate = entry.get("null") if isinstance(entry, Mapping) else None
    if not isinstance(rate, int | float) or not rate > 0 or job.iterations is None:
        raise Rejected(f"{source}: no throughput of {key}, which job {job.id} needs; found {rate}")
    return msgspec.structs.replace(
        job, duration_s=job.iterations / rate, iteration_s=1.0 / float(rate)
    )
