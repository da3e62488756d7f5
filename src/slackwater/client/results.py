"""Read the values that a job's ranks closed with."""

from typing import Any

import msgspec

from slackwater.schemas.jobs import JobRecord


def results(record: JobRecord) -> dict[str, Any]:
    """Return the value that each rank closed with; text that is not JSON stays as it is."""
    return {rank: result(text) for rank, text in record.results.items()}


def result(text: str) -> Any:
    """Parse a rank's result; text that is not JSON stays as it is."""
    try:
        return msgspec.json.decode(text) if text else None
    except msgspec.DecodeError:
        return text
