"""Check what `slackwater scale` says of a job."""

import pytest

from slackwater.cli.scaling import _said
from slackwater.schemas.base import NodeId
from slackwater.schemas.jobs import JobRecord, JobSpec


def record(**changes: object) -> JobRecord:
    spec = JobSpec(id="grows", workers=2, workers_max=4, program=("python", "train.py"))
    fields: dict[str, object] = {
        "state": "running", "workers": 3, "allocation": ((NodeId("w1"), 2),), **changes
    }  # fmt: skip
    return JobRecord(spec=spec, submitted_s=1.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"allocation": ((NodeId("w1"), 3),)}, "job grows trains with 3 workers"),
        ({}, "job grows trains on; it has 3 workers once so many fit on the nodes"),
        ({"state": "paused"}, "job grows is paused; it starts with 3 workers"),
        (
            {"state": "completed", "finished_s": 9.0},
            "job grows has completed; it never had 3 workers",
        ),
    ],
)
def test_it_says_what_the_job_does_now(changes: dict[str, object], said: str) -> None:
    """A job that ended while it was waited for was said to train on."""
    assert _said(record(**changes), 3) == said
