"""Select the part of a trace to replay or simulate, and its pace. Pure.

select(jobs, min_gpus=2, jobs=12)            the first 12 jobs of at least 2 GPUs
select(jobs, start_s=..., end_s=...)         one week; t = 0 is then the start of the week
select(jobs, time_scale=0.01)                every time a hundredth of the trace's
"""

from collections.abc import Sequence
from math import inf, isfinite

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces.record import Trace, TraceJob
from slackwater.loadgen.traces.sheet import unix_s


def select(
    rows: Sequence[TraceJob],
    *,
    min_gpus: int = 0,
    max_gpus: int | None = None,
    jobs: int | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    time_scale: float = 1.0,
    rebase: bool = True,
) -> tuple[TraceJob, ...]:
    """The rows of `min_gpus` to `max_gpus` submitted in [start_s, end_s), the first `jobs` of them.

    `rows` are in submission order, as `read` gives them. `time_scale` multiplies submissions,
    durations, iterations and stages alike. Time then counts from `start_s`, or without one from the
    first job kept; with `rebase` off it stays the trace's (rounds at fixed ticks depend on it). A
    selection that keeps nothing is refused.
    """
    _check(min_gpus, max_gpus, jobs, start_s, end_s, time_scale)
    from_s = -inf if start_s is None else start_s
    to_s = inf if end_s is None else end_s
    gpus_max = inf if max_gpus is None else max_gpus
    kept = [
        row for row in rows if min_gpus <= row.gpus <= gpus_max and from_s <= row.submit_s < to_s
    ][:jobs]
    if not kept:
        asked = (
            f"{min_gpus} to {max_gpus or 'any number of'} GPUs, submitted in [{from_s}, {to_s}) s"
        )
        raise Rejected(f"no job of {asked}; {_there_is(rows)}")
    zero_s = 0.0
    if rebase:
        zero_s = kept[0].submit_s if start_s is None else start_s
    if zero_s == 0.0 and time_scale == 1.0:
        return tuple(kept)
    return tuple(_moved(row, zero_s, time_scale) for row in kept)


def seconds_after_origin(text: str, trace: Trace) -> float:
    """Turn a person's start or end into seconds after the origin: a number of seconds, or a date.

    Dates need a trace with dates of its own (Philly): elsewhere the origin is not a date.
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


def _check(
    min_gpus: int,
    max_gpus: int | None,
    jobs: int | None,
    start_s: float | None,
    end_s: float | None,
    time_scale: float,
) -> None:
    if min_gpus < 0 or (max_gpus is not None and max_gpus < min_gpus):
        raise Rejected(
            f"{min_gpus} to {max_gpus} GPUs: no job can match; give a minimum of at least 0 and "
            "not above the maximum"
        )
    if jobs is not None and jobs < 1:
        raise Rejected(f"{jobs} jobs asked for; give at least 1, or leave it out")
    if not (0.0 if start_s is None else start_s) < (inf if end_s is None else end_s):
        raise Rejected(
            f"the time from {start_s} to {end_s} s is empty; give an end after the start"
        )
    if not (isfinite(time_scale) and time_scale > 0.0):
        raise Rejected(f"a time scale of {time_scale}; give a number above 0")


def _there_is(rows: Sequence[TraceJob]) -> str:
    if not rows:
        return "there are no jobs at all"
    gpus = [row.gpus for row in rows]
    return (
        f"the trace's {len(rows)} jobs have {min(gpus)} to {max(gpus)} GPUs and are submitted "
        f"from {rows[0].submit_s:g} to {rows[-1].submit_s:g} s"
    )
