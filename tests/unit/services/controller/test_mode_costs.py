"""The cost of a job to its aggregators depends on when its updates are applied."""

import random

import pytest

from slackwater.common.domains.slots.layout import plan_buckets
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import Consistency, JobSpec
from slackwater.schemas.placement import JobPlacement, JobPlan, Profile
from slackwater.schemas.tensors import TensorSpec, UpdateRule
from slackwater.services.controller.config import ControllerConfig
from slackwater.services.controller.snapshot import job_view
from slackwater.services.controller.state import Job, State

TENSORS = (TensorSpec(name="w", shape=(300_000,)), TensorSpec(name="v", shape=(300_000,)))


@pytest.mark.parametrize(
    ("consistency", "per_iteration"),
    [("synchronous", 1), ("asynchronous", 3), ("stale-synchronous", 3)],
)
def test_each_push_of_its_own_is_an_execution(consistency: Consistency, per_iteration: int) -> None:
    spec = JobSpec(id="j", workers=3, consistency=consistency)
    plan = JobPlan(
        job=JobId("j"),
        workers=3,
        gradient_dtype="float32",
        update=UpdateRule(),
        consistency=consistency,
        layout_epoch=1,
        token="",
    )
    record = JobPlacement(
        spec=spec,
        tensors=TENSORS,
        plan=plan,
        buckets=plan_buckets(TENSORS),
        profile=Profile(iteration_s=0.5, task_cpu_s=(0.01, 0.02)),
    )
    state = State(ControllerConfig(id="c1"), random.Random(0))
    view = job_view(state, Job(record))
    assert view.task_cpu_s == pytest.approx((0.01 * per_iteration, 0.02 * per_iteration))
    assert view.iteration_s == 0.5
