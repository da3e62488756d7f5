"""Microsoft's Philly trace: the original `cluster_job_log` and the CSVs derived from it.

The original is a JSON list of jobs with `vc`, `jobid`, `submitted_time` and `attempts`, each
attempt with `start_time`, `end_time` and the GPUs it held on each machine. A job's duration here is
the sum of its attempts' run times and its GPUs the most that an attempt held, which is how the
derived CSVs (`timestamp,duration,num_gpus,gpu_time,cluster`) fold attempts too. Jobs that never ran
or held no GPU are counted as skipped. Times carry no zone and are taken as UTC.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from slackwater.common.base import limits
from slackwater.loadgen.traces.record import TraceJob, TraceRejected
from slackwater.loadgen.traces.sheet import Sheet, unix_s

PHILLY_COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")
_MISSING = (None, "", "None")


def philly_csv_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    for number, _ in enumerate(sheet.rows()):
        duration_s = sheet.number("duration")
        gpus = sheet.gpus("num_gpus")
        gpu_s = sheet.number("gpu_time", high=limits.TRACE_SECONDS_MAX * limits.TRACE_GPUS_MAX)
        if abs(gpu_s - duration_s * gpus) > max(1.0, 1e-6 * gpu_s):
            sheet.refuse("gpu_time", f"duration times num_gpus, {duration_s * gpus:g}")
        yield TraceJob(
            id=str(number),
            submit_s=sheet.moment("timestamp"),
            gpus=gpus,
            duration_s=duration_s,
            tenant=sheet.identifier("cluster"),
            extra=dict(sheet.others(*PHILLY_COLUMNS)),
        )


class JobLog:
    """The JSON list as a cursor: `line` is where the current job begins."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.line = 0
        self.skipped: Counter[str] = Counter()
        self._text = text

    def jobs(self) -> Iterator[TraceJob]:
        for entry in self._entries():
            if not isinstance(entry, Mapping):
                self._refuse("job", entry, "an object with jobid, vc, submitted_time, attempts")
            job = self._job(entry)
            if job is not None:
                yield job

    def _entries(self) -> Iterator[Any]:
        """Yield the list's elements one by one, so that a fault is located by line."""
        text, decoder = self._text, json.JSONDecoder(parse_constant=self._refuse_constant)
        position = _blank_until(text, 0)
        if text[position : position + 1] != "[":
            self._refuse("file", text[position : position + 20], "a JSON list of jobs")
        position = _blank_until(text, position + 1)
        self.line, counted = 1, 0
        while text[position : position + 1] != "]":
            self.line += text.count("\n", counted, position)
            counted = position
            try:
                entry, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                self._refuse("job", text[position : position + 20], f"valid JSON ({error})")
            yield entry
            position = _blank_until(text, position)
            separator = text[position : position + 1]
            if separator == ",":
                position = _blank_until(text, position + 1)
            elif separator != "]":
                self._refuse("job", text[position : position + 20], "',' or ']' after a job")
        rest = text[position + 1 : position + 21]
        if text[position + 1 :].strip():
            self._refuse("file", rest, "nothing after the list")

    def _job(self, entry: Mapping[str, Any]) -> TraceJob | None:
        job_id = self._text_of(entry, "jobid")
        submit_s = self._moment(entry, "submitted_time", "submitted_time")
        if submit_s is None:
            self._refuse("submitted_time", entry.get("submitted_time"), "the time of submission")
        attempts = entry.get("attempts")
        if not isinstance(attempts, list):
            self._refuse("attempts", attempts, "a list")
        duration_s, gpus, runs = 0.0, 0, 0
        for index, attempt in enumerate(attempts):
            where = f"attempts[{index}]"
            if not isinstance(attempt, Mapping):
                self._refuse(where, attempt, "an object")
            start_s = self._moment(attempt, "start_time", f"{where}.start_time")
            end_s = self._moment(attempt, "end_time", f"{where}.end_time")
            gpus = max(gpus, self._gpus(attempt, where))
            if start_s is None or end_s is None:
                continue
            if end_s < start_s:
                self._refuse(f"{where}.end_time", attempt["end_time"], "a time after start_time")
            duration_s += end_s - start_s
            runs += 1
        if runs == 0 or gpus == 0:
            self.skipped["never ran" if runs == 0 else "held no GPU"] += 1
            return None
        return TraceJob(
            id=job_id,
            submit_s=submit_s,
            gpus=gpus,
            duration_s=duration_s,
            tenant=self._text_of(entry, "vc"),
            extra={
                "status": str(entry.get("status", ""))[: limits.TRACE_TEXT_MAX],
                "user": str(entry.get("user", ""))[: limits.TRACE_TEXT_MAX],
                "attempts": runs,
            },
        )

    def _gpus(self, attempt: Mapping[str, Any], where: str) -> int:
        detail = attempt.get("detail", [])
        try:
            held = sum(len(machine["gpus"]) for machine in detail)
        except (TypeError, KeyError):
            self._refuse(f"{where}.detail", detail, "a list of machines with their gpus")
        if held > limits.TRACE_GPUS_MAX:
            self._refuse(f"{where}.detail", held, f"at most {limits.TRACE_GPUS_MAX} GPUs")
        return held

    def _moment(self, entry: Mapping[str, Any], key: str, where: str) -> float | None:
        value = entry.get(key)
        if value in _MISSING:
            return None
        moment = unix_s(value) if isinstance(value, str) else None
        if moment is None or not 0.0 <= moment <= limits.TRACE_SECONDS_MAX:
            self._refuse(where, value, "a time such as 2017-10-09 07:02:35, or null")
        return moment

    def _text_of(self, entry: Mapping[str, Any], key: str) -> str:
        value = entry.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= limits.TRACE_TEXT_MAX:
            self._refuse(key, value, f"1 to {limits.TRACE_TEXT_MAX} characters")
        return value

    def _refuse(self, column: str, value: object, expected: str) -> NoReturn:
        raise TraceRejected(self.path, self.line or 1, column, str(value), expected)

    def _refuse_constant(self, constant: str) -> NoReturn:
        self._refuse("job", constant, "finite numbers only")


def _blank_until(text: str, position: int) -> int:
    """Return the next position that is not white space."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
