"""Which part of a trace is replayed or simulated, and at what pace. Pure.

Selection(gpus_min=2, jobs_max=12)           the first 12 jobs of at least 2 GPUs
Selection(start_s=..., end_s=...)            one week; t = 0 is then the start of the week
Selection(time_scale=0.01)                   every time a hundredth of the trace's
"""

from dataclasses import dataclass
from math import inf, isfinite

import msgspec

from slackwater.common.errors import Rejected
from slackwater.loadgen.traces.record import Trace, TraceJob
from slackwater.loadgen.traces.sheet import unix_s


@dataclass(frozen=True, slots=True)
class Selection:
    """What to keep. Submissions in [start_s, end_s) after the trace's origin."""

    gpus_min: int = 0
    gpus_max: int | None = None
    jobs_max: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    time_scale: float = 1.0
    """Multiplies submissions, durations, iterations and stages alike."""
    rebase: bool = True
    """Count time from `start_s`, or without one from the first job kept; False keeps the
    trace's times (rounds at fixed ticks depend on them)."""

    def __post_init__(self) -> None:
        if self.gpus_min < 0 or (self.gpus_max is not None and self.gpus_max < self.gpus_min):
            raise Rejected(
                f"GPUs from {self.gpus_min} to {self.gpus_max}: no job can match; "
                "give a minimum of at least 0 and not above the maximum"
            )
        if self.jobs_max is not None and self.jobs_max < 1:
            raise Rejected(f"{self.jobs_max} jobs asked for; give at least 1, or leave it out")
        bounds = (self.start_s or 0.0, inf if self.end_s is None else self.end_s)
        if not bounds[0] < bounds[1]:
            raise Rejected(f"the time from {self.start_s} to {self.end_s} s is empty; swap them")
        if not (isfinite(self.time_scale) and self.time_scale > 0.0):
            raise Rejected(f"a time scale of {self.time_scale}; give a number above 0")


def select(trace: Trace, selection: Selection) -> tuple[TraceJob, ...]:
    """The jobs kept, in submission order. A selection that keeps none is refused."""
    start_s = 0.0 if selection.start_s is None else selection.start_s
    end_s = inf if selection.end_s is None else selection.end_s
    gpus_max = inf if selection.gpus_max is None else selection.gpus_max
    kept = [
        job
        for job in trace.jobs
        if selection.gpus_min <= job.gpus <= gpus_max and start_s <= job.submit_s < end_s
    ][: selection.jobs_max]
    if not kept:
        raise Rejected(_nothing_kept(trace, selection))
    zero_s = 0.0
    if selection.rebase:
        zero_s = kept[0].submit_s if selection.start_s is None else selection.start_s
    if zero_s == 0.0 and selection.time_scale == 1.0:
        return tuple(kept)
    return tuple(_moved(job, zero_s, selection.time_scale) for job in kept)


def seconds_after_origin(text: str, trace: Trace) -> float:
    """What a person means by a start or an end: seconds after the origin, or a date.

    Dates need a trace with dates of its own (Philly): elsewhere the origin is no calendar time.
    """
    try:
        value = float(text)
    except ValueError:
        moment_s = unix_s(text)
        if moment_s is None:
            raise Rejected(f"{text!r} is neither seconds nor a time such as 2017-10-09") from None
        if not trace.format.startswith("philly"):
            raise Rejected(
                f"{text!r} is a date, but {trace.path} ({trace.format}) has no calendar; "
                "give seconds after its first submission"
            ) from None
        return moment_s - trace.origin_s
    if not isfinite(value):
        raise Rejected(f"{text!r} is not a finite number of seconds")
    return value


def _moved(job: TraceJob, zero_s: float, scale: float) -> TraceJob:
    return msgspec.structs.replace(
        job,
        submit_s=(job.submit_s - zero_s) * scale,
        duration_s=None if job.duration_s is None else job.duration_s * scale,
        iteration_s=None if job.iteration_s is None else job.iteration_s * scale,
        stages_s={name: time_s * scale for name, time_s in job.stages_s.items()},
    )


def _nothing_kept(trace: Trace, selection: Selection) -> str:
    gpus = sorted({job.gpus for job in trace.jobs})
    last_s = trace.jobs[-1].submit_s
    return (
        f"{trace.path}: none of its {len(trace.jobs)} jobs has {selection.gpus_min} to "
        f"{selection.gpus_max or 'any number of'} GPUs and is submitted in "
        f"[{selection.start_s or 0:g}, {'end' if selection.end_s is None else selection.end_s}) s; "
        f"it has jobs of {gpus[0]} to {gpus[-1]} GPUs, submitted from 0 to {last_s:g} s"
    )
