"""One record for a job of any public trace, and the error that refuses a row.

All times are seconds. Readers translate units (Muri's files are in milliseconds) and names; what a
format has beyond these fields stays in `extra` under its own column name.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from slackwater.common.base.errors import Rejected

Scalar = str | int | float | bool


class TraceJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as its trace tells it. None, "" and an empty mapping mean: the trace doesn't say."""

    id: str
    submit_s: float
    """Seconds after the trace's origin, by default its first submission."""
    gpus: int
    """GPUs of the whole gang; 0 for a pod that asks for none (Alibaba)."""
    duration_s: float | None = None
    """Run time on those GPUs without queueing; None where it depends on a performance model."""
    model: str = ""
    """Model or application, in the trace's own spelling."""
    tenant: str = ""
    """Tenant or virtual cluster."""
    iterations: int | None = None
    batch_size: int | None = None
    """The batch size of the whole job, over all its GPUs."""
    iteration_s: float | None = None
    stages_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Time of each stage of one iteration by the resource it occupies, in the trace's order."""
    extra: Mapping[str, Scalar] = msgspec.field(default_factory=dict)


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that was read: its jobs by submission (equals in the file's order)."""

    jobs: tuple[TraceJob, ...]
    format: str
    sha256: str
    """The digest of the file's bytes: a run manifest names it."""
    path: str
    origin_s: float
    """Seconds that were subtracted from the file's own times (Unix seconds for dated formats)."""
    skipped: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Rows that describe no run, by reason. Nothing is left out without being counted here."""


class TraceRejected(Rejected):
    """A trace cannot be used: file, line and column, the value found and what was expected."""

    def __init__(
        self, path: Path, line: int | None, column: str | None, value: str | None, expected: str
    ) -> None:
        where = str(path) if line is None else f"{path}:{line}"
        found = "" if value is None else f"found {_shown(value)}, "
        named = "" if column is None else f"column '{column}': "
        super().__init__(f"{where}: {named}{found}expected {expected}")
        self.path, self.line, self.column = path, line, column
        self.value, self.expected = value, expected


def _shown(value: str) -> str:
    return repr(value if len(value) <= 60 else value[:57] + "...")
