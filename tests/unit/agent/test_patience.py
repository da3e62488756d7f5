"""Whose push a rank waits for, and what ends its patience."""

import pytest

from slackwater.agent.patience import missing
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import Consistency, UpdateRule
from slackwater.schemas.placement import JobPlan


def plan(consistency: Consistency, staleness: int = 0) -> JobPlan:
    return JobPlan(
        job=JobId("j"), workers=3, gradient_dtype="float32", update=UpdateRule(), token="",
        consistency=consistency, staleness=staleness, layout_epoch=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("consistency", "staleness", "pushed", "ranks"),
    [
        ("synchronous", 0, (14, 13, 14), {1: 13}),
        ("synchronous", 0, (13, 14, 12), {2: 12}),
        ("synchronous", 0, (14, 14, 14), {}),
        ("stale-synchronous", 2, (14, 12, 11), {2: 11}),
        ("asynchronous", 0, (14, 0, 0), {}),
    ],
)
def test_a_rank_waits_for_those_that_are_behind_and_never_for_itself(
    consistency: Consistency, staleness: int, pushed: tuple[int, ...], ranks: dict[int, int]
) -> None:
    assert missing(plan(consistency, staleness), 0, 14, pushed) == ranks
