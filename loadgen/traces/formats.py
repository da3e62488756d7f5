"""Recognise a trace's format and read it: one entry point for every public trace.

The format is found from the content: `[` begins Philly's JSON, a first line of 7, 10 or 12 tab
separated columns is Gavel's, otherwise the header decides: the format with the most required
columns present wins (Muri's header holds all of Tiresias').
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slackwater.common.base import limits
from slackwater.common.base.errors import Rejected
from slackwater.loadgen.traces import (
    alibaba,
    elasticflow,
    gavel,
    own,
    philly,
    pollux,
    tiresias,
)
from slackwater.loadgen.traces.record import Trace, TraceJob, TraceRejected
from slackwater.loadgen.traces.sheet import Sheet, load


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """A format known by its header."""

    columns: tuple[str, ...]
    jobs: Callable[[Sheet], Iterator[TraceJob]]
    title: str


CSV_FORMATS: dict[str, CsvFormat] = {
    "slackwater": CsvFormat(own.OWN_REQUIRED, own.own_jobs, "Slackwater's own CSV"),
    "tiresias": CsvFormat(tiresias.TIRESIAS_COLUMNS, tiresias.tiresias_jobs, "Tiresias simulator"),
    "muri": CsvFormat(tiresias.MURI_COLUMNS, tiresias.muri_jobs, "Muri (milliseconds)"),
    "itp": CsvFormat(elasticflow.ITP_COLUMNS, elasticflow.itp_jobs, "Microsoft ITP clusters"),
    "elasticflow": CsvFormat(
        elasticflow.ELASTICFLOW_COLUMNS, elasticflow.elasticflow_jobs, "ElasticFlow simulator"
    ),
    "pollux": CsvFormat(pollux.POLLUX_COLUMNS, pollux.pollux_jobs, "Pollux and Sia workloads"),
    "alibaba": CsvFormat(alibaba.ALIBABA_COLUMNS, alibaba.alibaba_jobs, "Alibaba GPU pods v2023"),
    "philly": CsvFormat(philly.PHILLY_COLUMNS, philly.philly_csv_jobs, "CSV derived from Philly"),
}
FORMATS: tuple[str, ...] = (*CSV_FORMATS, "philly-json", "gavel")


def detect(path: Path | str) -> str:
    """The name of the format that the file is in."""
    path = Path(path)
    _, text = load(path)
    return _detect(path, text)


def read(
    path: Path | str,
    format: str | None = None,
    limit: int | None = None,
    origin_s: float | None = None,
) -> Trace:
    """Read a trace, or refuse it with file, line, column, value and what was expected.

    `limit` stops after that many jobs of the file. `origin_s` is what the file's own times are
    counted from: by default its first submission; 0 keeps the file's times.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise Rejected(f"unknown trace format {format!r}; known: {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise Rejected(f"a limit of {limit} jobs; give at least 1, or none")
    sha256, text = load(path)
    format = format or _detect(path, text)
    source, stream = _open(path, text, format)
    jobs = _collect(source, stream, min(limit or limits.TRACE_JOBS_MAX, limits.TRACE_JOBS_MAX))
    if not jobs:
        why = "; ".join(f"{count} {reason}" for reason, count in source.skipped.items())
        raise TraceRejected(path, None, None, None, f"at least one job ({why or 'no rows'})")
    if origin_s is None:
        origin_s = min(job.submit_s for job in jobs)
    return Trace(
        jobs=_from_origin(jobs, origin_s),
        format=format,
        sha256=sha256,
        path=str(path),
        origin_s=origin_s,
        skipped=dict(source.skipped),
    )


def _collect(
    source: Sheet | philly.JobLog, stream: Iterator[TraceJob], jobs_max: int
) -> list[TraceJob]:
    jobs: list[TraceJob] = []
    lines: dict[str, int] = {}
    for job in stream:
        first = lines.setdefault(job.id, source.line)
        if first != source.line:
            raise TraceRejected(
                source.path, source.line, "job id", job.id, f"each id once; line {first} has it too"
            )
        jobs.append(job)
        if len(jobs) == jobs_max:
            break
    return jobs


def _from_origin(jobs: list[TraceJob], origin_s: float) -> tuple[TraceJob, ...]:
    jobs.sort(key=lambda job: job.submit_s)
    if origin_s == 0.0:
        return tuple(jobs)
    if jobs[0].submit_s < origin_s:
        raise Rejected(
            f"origin {origin_s} is after job {jobs[0].id!r}, submitted at {jobs[0].submit_s}; "
            "give an earlier origin"
        )
    return tuple(msgspec.structs.replace(job, submit_s=job.submit_s - origin_s) for job in jobs)


def _open(path: Path, text: str, format: str) -> tuple[Sheet | philly.JobLog, Iterator[TraceJob]]:
    if format == "philly-json":
        log = philly.JobLog(path, text)
        return log, log.jobs()
    if format == "gavel":
        width = _first_line(text).count("\t") + 1
        if width not in gavel.GAVEL_WIDTHS:
            raise TraceRejected(path, 1, None, None, f"7, 10 or 12 tab-separated columns, {width=}")
        sheet = Sheet(path, text, gavel.GAVEL_WIDTHS[width], delimiter="\t")
        return sheet, gavel.gavel_jobs(sheet)
    sheet = Sheet(path, text)
    for column in CSV_FORMATS[format].columns:
        if column not in sheet:
            raise TraceRejected(
                path, sheet.line, column, None, f"this column in the format {format}; it is missing"
            )
    return sheet, CSV_FORMATS[format].jobs(sheet)


def _detect(path: Path, text: str) -> str:
    first = _first_line(text)
    if first.lstrip().startswith("["):
        return "philly-json"
    if first.count("\t") + 1 in gavel.GAVEL_WIDTHS and "," not in first.split("\t")[0]:
        return "gavel"
    present = set(Sheet(path, text).columns)
    complete = [name for name, known in CSV_FORMATS.items() if present.issuperset(known.columns)]
    if complete:
        return max(complete, key=lambda name: len(CSV_FORMATS[name].columns))
    nearest = max(CSV_FORMATS, key=lambda name: _likeness(present, CSV_FORMATS[name].columns))
    missing = [column for column in CSV_FORMATS[nearest].columns if column not in present]
    if _likeness(present, CSV_FORMATS[nearest].columns) >= 0.5:
        raise TraceRejected(
            path, 1, missing[0], None, f"this column in the format {nearest}; it is missing"
        )
    raise TraceRejected(
        path, 1, None, first[:200], f"the header of a known format: {', '.join(FORMATS)}"
    )


def _likeness(present: set[str], columns: tuple[str, ...]) -> float:
    return len(present.intersection(columns)) / len(columns)


def _first_line(text: str) -> str:
    """Return the first line that is not blank (its beginning, where it is very long)."""
    start = len(text) - len(text.lstrip())
    return text[start : start + 2 * limits.TRACE_TEXT_LONG_MAX].split("\n", 1)[0].rstrip("\r")
