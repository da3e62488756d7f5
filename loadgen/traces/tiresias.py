"""The Tiresias simulator's job files, and Muri's extension of them.

Tiresias: `job_id,num_gpu,submit_time,iterations,model_name,duration,interval`, in seconds.
Muri: the same with `batch_size`, `iteration_time`, `resource_time_0..2` (the stage times of one
iteration, each on a resource of its own) and `priority`, all times in MILLISECONDS. The stages keep
the file's order and are named after its columns.
"""

from collections.abc import Iterator

from slackwater.loadgen.traces.record import TraceJob
from slackwater.loadgen.traces.sheet import Sheet

TIRESIAS_COLUMNS = (
    "job_id",
    "num_gpu",
    "submit_time",
    "iterations",
    "model_name",
    "duration",
    "interval",
)
MURI_COLUMNS = (
    *TIRESIAS_COLUMNS,
    "batch_size",
    "iteration_time",
    "resource_time_0",
    "resource_time_1",
    "resource_time_2",
    "priority",
)


def tiresias_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    for _ in sheet.rows():
        yield TraceJob(
            id=sheet.identifier("job_id"),
            submit_s=sheet.number("submit_time"),
            gpus=sheet.gpus("num_gpu"),
            duration_s=sheet.number("duration"),
            model=sheet.text("model_name"),
            iterations=sheet.whole("iterations", low=1),
            extra={"interval_s": sheet.number("interval"), **sheet.others(*TIRESIAS_COLUMNS)},
        )


def muri_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    for _ in sheet.rows():
        yield TraceJob(
            id=sheet.identifier("job_id"),
            submit_s=_from_ms(sheet, "submit_time"),
            gpus=sheet.gpus("num_gpu"),
            duration_s=_from_ms(sheet, "duration"),
            model=sheet.text("model_name"),
            iterations=sheet.whole("iterations", low=1),
            batch_size=sheet.whole("batch_size", low=1),
            iteration_s=_from_ms(sheet, "iteration_time"),
            stages_s={
                "resource_0": _from_ms(sheet, "resource_time_0"),
                "resource_1": _from_ms(sheet, "resource_time_1"),
                "resource_2": _from_ms(sheet, "resource_time_2"),
            },
            extra={
                "interval_s": _from_ms(sheet, "interval"),
                "priority": sheet.whole("priority"),
                **sheet.others(*MURI_COLUMNS),
            },
        )


def _from_ms(sheet: Sheet, column: str) -> float:
    return sheet.number(column, high=1e13) / 1000.0
