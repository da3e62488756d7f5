"""Microsoft's ITP clusters and ElasticFlow's testbed traces (seconds throughout).

Raw clusters: `job_id,submission_time,duration,num_gpu`; the testbed trace adds
`num_iteration,model_name,deadline,batch_size`. ElasticFlow's simulator files spell the same as
`submit_time`, `iteration` and `ddl`. A deadline becomes `extra["deadline_after_s"]`, counted from
the job's submission, so that it holds whatever origin is chosen.
"""

from collections.abc import Iterator

from slackwater.common.base import limits
from slackwater.loadgen.traces.record import Scalar, TraceJob
from slackwater.loadgen.traces.sheet import Sheet

ITP_COLUMNS = ("job_id", "submission_time", "duration", "num_gpu")
ELASTICFLOW_COLUMNS = (
    "job_id",
    "submit_time",
    "iteration",
    "model_name",
    "ddl",
    "batch_size",
    "num_gpu",
    "duration",
)
_ITP_OPTIONAL = ("num_iteration", "model_name", "deadline", "batch_size")


def itp_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    has = {column: column in sheet for column in _ITP_OPTIONAL}
    for _ in sheet.rows():
        submit_s = sheet.number("submission_time")
        yield TraceJob(
            id=sheet.identifier("job_id"),
            submit_s=submit_s,
            gpus=sheet.gpus("num_gpu"),
            duration_s=sheet.number("duration"),
            model=sheet.text("model_name") if has["model_name"] else "",
            iterations=sheet.whole("num_iteration", low=1) if has["num_iteration"] else None,
            batch_size=sheet.whole("batch_size", low=1) if has["batch_size"] else None,
            extra={
                **(_deadline(sheet, "deadline", submit_s) if has["deadline"] else {}),
                **sheet.others(*ITP_COLUMNS, *_ITP_OPTIONAL),
            },
        )


def elasticflow_jobs(sheet: Sheet) -> Iterator[TraceJob]:
    for _ in sheet.rows():
        submit_s = sheet.number("submit_time")
        yield TraceJob(
            id=sheet.identifier("job_id"),
            submit_s=submit_s,
            gpus=sheet.gpus("num_gpu"),
            duration_s=sheet.number("duration"),
            model=sheet.text("model_name"),
            iterations=sheet.whole("iteration", low=1),
            batch_size=sheet.whole("batch_size", low=1),
            extra={
                **_deadline(sheet, "ddl", submit_s),
                **sheet.others(*ELASTICFLOW_COLUMNS),
            },
        )


def _deadline(sheet: Sheet, column: str, submit_s: float) -> dict[str, Scalar]:
    deadline_s = sheet.number(column, low=submit_s, high=limits.TRACE_SECONDS_MAX)
    return {"deadline_after_s": deadline_s - submit_s}
