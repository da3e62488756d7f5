"""Squares of gradients are summed where the job was submitted so, or where its program asks."""

import pytest
from tests.unit.services.master.test_sums import TENSORS, asked, running

from slackwater.schemas.job_requests import RegisterJob
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import PlaceJob


@pytest.mark.parametrize(
    ("submitted", "program", "placed"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_either_the_job_or_its_program_asks(submitted: bool, program: bool, placed: bool) -> None:
    harness = running(noise=submitted)
    message = RegisterJob(job="a", rank=0, tensors=TENSORS, noise=program)
    (request,) = asked(harness.ask(message), PlaceJob)
    assert isinstance(request.message, PlaceJob)
    assert request.message.spec.noise is placed
    assert harness.job("a").spec.noise is submitted, "the record keeps what was submitted"


def test_an_asynchronous_job_is_not_measured_whatever_its_program_says() -> None:
    harness = running(consistency="asynchronous")
    message = RegisterJob(job="a", rank=0, tensors=TENSORS, noise=True)
    (request,) = asked(harness.ask(message), PlaceJob)
    assert isinstance(request.message, PlaceJob)
    assert not request.message.spec.noise


def test_submitting_noise_of_an_asynchronous_job_is_refused() -> None:
    with pytest.raises(ValueError, match="noise: the job is asynchronous"):
        JobSpec(id="a", consistency="asynchronous", noise=True)
