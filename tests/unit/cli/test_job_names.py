"""Ids that are made for jobs, and what is said of a submission."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.console.names import new_id, readable, said
from slackwater.schemas.base import ID_PATTERN
from slackwater.schemas.jobs import JobRecord, JobSpec


@pytest.mark.parametrize(
    ("model", "program", "stem"),
    [
        ("vgg19", None, "vgg19"),
        (None, ["python", "-u", "/work/train_v2.py", "--x"], "train-v2"),
        (None, ["python", "-m", "mine.train"], "mine-train"),
        (None, ["./run.sh"], "run"),
        (None, ["/bin/true"], "true"),
        (None, None, "job"),
    ],
)
def test_an_id_says_what_the_job_runs(
    model: str | None, program: list[str] | None, stem: str
) -> None:
    made = new_id(model, program)
    assert re.fullmatch(rf"{stem}-[0-9a-f]{{6}}", made)
    assert made != new_id(model, program)


@given(st.text(max_size=200))
def test_whatever_a_program_is_called_an_id_is_made_of_it(name: str) -> None:
    assert re.fullmatch(ID_PATTERN, readable(name, "0123ab"))


def test_a_repeated_submission_says_that_nothing_was_started() -> None:
    spec = JobSpec(id="k1", program=("x",))
    assert said(spec, None) == "job k1 is stored"
    live = said(spec, JobRecord(spec=spec, state="running"))
    assert live == "job k1 was stored before and is running: nothing new was started"
    ended = said(spec, JobRecord(spec=spec, state="failed", finished_s=1.0))
    assert "has failed: nothing new was started" in ended
    assert "`slackwater rerun k1`" in ended
