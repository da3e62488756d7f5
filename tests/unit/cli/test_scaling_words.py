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
        (
            {"told": "trains with 2 workers; 3 were asked for"},
            "job grows trains with 2 workers; 3 were asked for",
        ),
        (
            {"resizing": "joining", "told": "it takes free slots before jobs that wait: b"},
            "job grows trains on; it has 3 workers once the new ones are ready; it takes free "
            "slots before jobs that wait: b",
        ),
        (
            {"workers": 0, "told": "it takes free slots before jobs that wait: b"},
            "job grows trains on without; `slackwater events` says why it does not get 3 workers",
        ),
        ({"state": "paused"}, "job grows is paused; it starts with 3 workers"),
        (
            {"state": "completed", "finished_s": 9.0},
            "job grows has completed; it never had 3 workers",
        ),
    ],
)
def test_it_says_what_the_job_does_now(changes: dict[str, object], said: str) -> None:
    """Regression: a job that ended while it was waited for was said to train on."""
    told = str(changes.pop("told", ""))
    assert _said(record(**changes), 3, told) == said
