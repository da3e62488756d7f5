"""Job arrays: numbers as they are written, the jobs that they become, and what cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.cli.arrays import JOBS_MAX, Array, jobs, parsed
from slackwater.console.outcome import Usage
from slackwater.schemas.jobs import JobSpec

BASE = JobSpec(id="sweep", program=("python", "train.py", "--seed={index}"), env={"A": "1"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3", Array((0, 1, 2, 3))),
        ("7", Array((7,))),
        ("1,5,3-4", Array((1, 3, 4, 5))),
        ("0-99%4", Array(tuple(range(100)), 4)),
    ],
)
def test_numbers_are_read_as_they_are_written(text: str, expected: Array) -> None:
    assert parsed(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "0-5%0", "0-5%", "0-1000", "1;2", "-1"])
def test_what_is_not_an_array_says_how_to_write_one(text: str) -> None:
    with pytest.raises(Usage, match="--array"):
        parsed(text)


@given(st.sets(st.integers(0, 5_000), min_size=1, max_size=50), st.integers(0, 60))
def test_each_number_is_one_job_and_no_more_than_allowed_run_at_once(
    numbers: set[int], at_once: int
) -> None:
    text = ",".join(map(str, numbers)) + (f"%{at_once}" if at_once else "")
    found = jobs(BASE, parsed(text))
    assert [spec.env["ARRAY_INDEX"] for spec in found] == [str(n) for n in sorted(numbers)]
    assert len(numbers) <= JOBS_MAX
    free = [spec for spec in found if not spec.after]
    assert len(free) == (min(at_once, len(numbers)) if at_once else len(numbers))
    before = {spec.id for spec in found}
    for spec in found:
        assert set(spec.after) <= before
        assert not spec.after or spec.after_any


def test_a_job_knows_its_number() -> None:
    spec = jobs(BASE, parsed("3,4"))[1]
    assert spec.id == "sweep-4"
    assert spec.program == ("python", "train.py", "--seed=4")
    assert spec.env == {
        "A": "1", "ARRAY_INDEX": "4", "ARRAY_COUNT": "2", "ARRAY_ID": "sweep",
    }  # fmt: skip


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Usage, match="beside --after"):
        jobs(JobSpec(id="a", program=("x",), after=("b",)), parsed("0-3%2"))
    with pytest.raises(Usage, match="too long for a job's id"):
        jobs(JobSpec(id="a" * 63, program=("x",)), parsed("10"))
