"""Slackwater's own trace CSV: what `loadgen generate` writes, and anybody may write by hand.

Header, in any order; only the first three columns are required, an empty cell means unknown:

    job_id        unique, not empty
    submit_s      seconds after the trace's origin
    gpus          GPUs of the whole gang
    duration_s    run time on those GPUs, seconds
    model         model or application
    tenant        tenant or virtual cluster
    iterations    whole number
    batch_size    of the whole job
    iteration_s   seconds of one iteration
    stages_s      stage times of one iteration, "cpu=12.5;network=30.25"
    extra         a JSON object of texts, numbers and booleans

Any other column goes into `extra`. A replay reads `consistency` and `staleness` there, the job's
mode; a simulation `batch`: adaptive or fixed, whatever the policy says of others.

Floats are written with the shortest digits that read back to the same number, so a trace survives
a round trip bit for bit.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces.record import Scalar, TraceJob
from slackwater.loadgen.traces.sheet import Sheet

OWN_REQUIRED = ("job_id", "submit_s", "gpus")
OWN_COLUMNS = (
    *OWN_REQUIRED,
    "duration_s",
    "model",
    "tenant",
    "iterations",
    "batch_size",
    "iteration_s",
    "stages_s",
    "extra",
)

_STAGE = re.compile(r"[A-Za-z0-9_]{1,32}")
_EXPECTED_STAGES = 'stage times such as "cpu=12.5;network=30.25"'


def own_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    has = {column: column in sheet for column in OWN_COLUMNS}
    for _ in sheet.rows():
        yield TraceJob(
            id=sheet.identifier("job_id"),
            submit_s=sheet.number("submit_s"),
            gpus=sheet.gpus("gpus", low=0),
            duration_s=sheet.number_or_none("duration_s") if has["duration_s"] else None,
            model=sheet.text("model") if has["model"] else "",
            tenant=sheet.text("tenant") if has["tenant"] else "",
            iterations=sheet.whole_or_none("iterations", low=1) if has["iterations"] else None,
            batch_size=sheet.whole_or_none("batch_size", low=1) if has["batch_size"] else None,
            iteration_s=sheet.number_or_none("iteration_s") if has["iteration_s"] else None,
            stages_s=_stages(sheet) if has["stages_s"] else {},
            extra={**(_extra(sheet) if has["extra"] else {}), **sheet.others(*OWN_COLUMNS)},
        )


def write(jobs: Iterable[TraceJob]) -> str:
    """The jobs as this format's text, in the order given. Unwritable values are refused."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(OWN_COLUMNS)
    written: set[str] = set()
    for job in jobs:
        if job.id in written:
            raise Rejected(f"two jobs have the id {job.id!r}; a trace names each job once")
        written.add(job.id)
        extra = json.dumps(dict(job.extra), sort_keys=True) if job.extra else ""
        stages = ";".join(f"{name}={float(time_s)!r}" for name, time_s in job.stages_s.items())
        _check(job, stages, extra)
        writer.writerow(
            (
                job.id,
                repr(float(job.submit_s)),
                job.gpus,
                "" if job.duration_s is None else repr(float(job.duration_s)),
                job.model,
                job.tenant,
                "" if job.iterations is None else job.iterations,
                "" if job.batch_size is None else job.batch_size,
                "" if job.iteration_s is None else repr(float(job.iteration_s)),
                stages,
                extra,
            )
        )
    return out.getvalue()


def _check(job: TraceJob, stages: str, extra: str) -> None:
    """Refuse to write a job that a reader would refuse."""
    if max(len(stages), len(extra)) > limits.TRACE_TEXT_LONG_MAX:
        raise Rejected(f"job {job.id!r} cannot be written: over {limits.TRACE_TEXT_LONG_MAX} bytes")
    if fault := _fault(job):
        raise Rejected(f"job {job.id!r} cannot be written: {fault}")


def _fault(job: TraceJob) -> str:
    times = {
        "submit_s": job.submit_s,
        "duration_s": job.duration_s,
        "iteration_s": job.iteration_s,
        **{f"stage {name!r}": time_s for name, time_s in job.stages_s.items()},
    }
    for name, time_s in times.items():
        if time_s is not None and not 0.0 <= time_s <= limits.TRACE_SECONDS_MAX:
            return f"{name} is {time_s}, expected 0 to {limits.TRACE_SECONDS_MAX:g} seconds"
    counts = {
        "gpus": (job.gpus, 0, limits.TRACE_GPUS_MAX),
        "iterations": (job.iterations, 1, limits.TRACE_COUNT_MAX),
        "batch_size": (job.batch_size, 1, limits.TRACE_COUNT_MAX),
    }
    for name, (count, low, high) in counts.items():
        if count is not None and not low <= count <= high:
            return f"{name} is {count}, expected {low} to {high}"
    for name, text in (("id", job.id), ("model", job.model), ("tenant", job.tenant)):
        if text != text.strip() or not text.isprintable() or len(text) > limits.TRACE_TEXT_MAX:
            return f"{name} is {text!r}, expected plain printable text"
    if not job.id:
        return "its id is empty"
    for name in job.stages_s:
        if not _STAGE.fullmatch(name):
            return f"stage {name!r}, expected letters, digits and '_'"
    for name, value in job.extra.items():
        if not _plain(value):
            return f"extra {name!r} is {value!r}, expected text, a finite number or a boolean"
    return ""


def _plain(value: object) -> bool:
    """A value of `extra` that reads back as it was written."""
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, int):
        return abs(value) <= limits.TRACE_COUNT_MAX
    return isinstance(value, str)


def _stages(sheet: Sheet) -> dict[str, float]:
    stages: dict[str, float] = {}
    cell = sheet.text("stages_s", limits.TRACE_TEXT_LONG_MAX)
    for part in cell.split(";") if cell else ():
        name, _, raw = part.partition("=")
        try:
            time_s = float(raw)
        except ValueError:
            sheet.refuse("stages_s", _EXPECTED_STAGES)
        plausible = 0.0 <= time_s <= limits.TRACE_SECONDS_MAX and "_" not in raw
        if not plausible or not _STAGE.fullmatch(name) or name in stages:
            sheet.refuse("stages_s", _EXPECTED_STAGES)
        stages[name] = time_s
    return stages


def _extra(sheet: Sheet) -> dict[str, Scalar]:
    cell = sheet.text("extra", limits.TRACE_TEXT_LONG_MAX)
    if not cell:
        return {}
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        sheet.refuse("extra", "a JSON object")
    if not isinstance(value, Mapping):
        sheet.refuse("extra", "a JSON object")
    if not all(_plain(item) for item in value.values()):
        sheet.refuse("extra", "a JSON object of texts, finite numbers and booleans")
    return dict(value)
