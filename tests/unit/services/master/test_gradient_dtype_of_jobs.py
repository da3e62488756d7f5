"""Gradients travel as the program says, unless the job's spec says it."""

import pytest
from tests.unit.services.master.test_sums import TENSORS, asked, running

from slackwater.schemas.job_requests import RegisterJob
from slackwater.schemas.placement import PlaceJob
from slackwater.schemas.tensors import DType


@pytest.mark.parametrize(
    ("submitted", "program", "placed"),
    [
        ("float32", "int8", "int8"),
        ("float32", None, "float32"),
        ("bfloat16", "int8", "bfloat16"),
        ("float16", None, "float16"),
    ],
)
def test_a_job_is_placed_with_the_dtype_of_its_program(
    submitted: DType, program: DType | None, placed: DType
) -> None:
    harness = running(workers=2, gradient_dtype=submitted)
    message = RegisterJob(job="a", rank=0, tensors=TENSORS, gradient_dtype=program)
    (request,) = asked(harness.ask(message), PlaceJob)
    assert isinstance(request.message, PlaceJob)
    assert request.message.spec.gradient_dtype == placed
