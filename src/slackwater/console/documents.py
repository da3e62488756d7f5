"""Records as JSON for scripts: no default left out, times as text beside the number, results as the
values that they are."""

from typing import Any, Final

import msgspec

from slackwater.client.results import results
from slackwater.console import figures
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.progress import JobProgress

TIMES: Final = frozenset(
    {
        "submitted_s", "started_s", "finished_s", "updated_s", "heard_s", "since_s", "at_s",
        "begun_s", "deadline_s",
    }
)  # fmt: skip
"""Fields that are times since 1970; all others with `_s` are durations."""


def whole(value: Any) -> Any:
    """Convert to plain JSON values, with every field of every struct."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        if isinstance(value, JobRecord):
            fields["results"] = results(value)
        return _with_times({name: whole(field) for name, field in fields.items()})
    if isinstance(value, dict):
        return {key: whole(field) for key, field in value.items()}
    if isinstance(value, list | tuple):
        return [whole(each) for each in value]
    return value


def _with_times(fields: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, field in fields.items():
        found[name] = field
        if name in TIMES:
            found[name.removesuffix("_s")] = figures.at(field) or None
    return found


def job(record: JobRecord, progress: JobProgress | None) -> dict[str, Any]:
    """Convert a job: its record, and `progress` beside it (null: nothing is known)."""
    found: dict[str, Any] = whole(record)
    return found | {"progress": whole(progress)}
