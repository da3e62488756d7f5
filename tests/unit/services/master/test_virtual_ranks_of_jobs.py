"""The virtual ranks of a job: its program's, checked against what the job was submitted with."""

from typing import Any

import pytest
from tests.unit.services.master.test_master_core import Harness
from tests.unit.services.master.test_sums import TENSORS, asked, running

from slackwater.schemas.base import Message, Refused
from slackwater.schemas.job_requests import RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import PlaceJob


def register(rank: int, virtual_ranks: int) -> RegisterJob:
    return RegisterJob(job="a", rank=rank, tensors=TENSORS, virtual_ranks=virtual_ranks)


def refusal(harness: Harness, message: Message) -> str:
    answer: Any = harness.answer(message)
    assert isinstance(answer, Refused)
    return answer.reason


def test_a_job_is_placed_with_the_virtual_ranks_of_its_program() -> None:
    harness = running(workers=2, workers_max=4)
    (request,) = asked(harness.ask(register(0, 6)), PlaceJob)
    assert isinstance(request.message, PlaceJob)
    assert request.message.spec.virtual_ranks == 6
    assert "virtual_ranks: 0, the job has 6" in refusal(harness, register(1, 0))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"workers": 2, "workers_max": 4}, "fewer than the 4 workers that the job can have"),
        ({"workers": 2, "consistency": "asynchronous"}, "only a synchronous job has virtual ranks"),
    ],
)
def test_virtual_ranks_that_do_not_fit_the_job_are_refused(
    fields: dict[str, Any], wrong: str
) -> None:
    assert wrong in refusal(running(**fields), register(0, 3))
    with pytest.raises(ValueError, match=wrong):
        JobSpec(id="b", virtual_ranks=3, **fields)
