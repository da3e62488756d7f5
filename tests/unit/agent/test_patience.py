"""Waits for other ranks: whose push is missing, and what ends the wait."""

from collections.abc import Coroutine
from typing import Any

import pytest

from slackwater.agent import patience
from slackwater.agent.patience import Patience, missing
from slackwater.agent.worker_bucket import Waiter, WorkerBucket
from slackwater.common.base.errors import SlackwaterError
from slackwater.schemas.base import JobId
from slackwater.schemas.job_requests import MissingRanks
from slackwater.schemas.jobs import Consistency
from slackwater.schemas.placement import BucketLayout, JobPlan
from slackwater.schemas.tensors import TensorSpec, UpdateRule


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


class Told:
    """A wait in which each question is answered at once, by the next of `answers`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[MissingRanks | None]) -> None:
        monkeypatch.setattr(patience, "ASK_AFTER_S", 0.01)
        monkeypatch.setattr(patience, "ASK_EVERY_S", 0.01)
        self.answers = answers
        self.failed: list[SlackwaterError] = []
        self.patience = Patience("job j, rank 0", 0, self._start, self.failed.append)
        layout = BucketLayout(index=0, first=0, count=1, elements=1)
        self.bucket = WorkerBucket(layout, (TensorSpec(name="w", shape=(1,)),), UpdateRule())
        self.bucket.version, self.bucket.iteration = 0, 1
        self.waiter = Waiter([self.bucket])

    def _start(self, asking: Coroutine[Any, Any, None]) -> None:
        asking.close()
        self.patience._asking = False
        if self.answers:
            self.patience.told = self.answers.pop(0)
        else:
            self.bucket.version = 1
            self.waiter.look()

    def sleep(self, deadline_s: float) -> WorkerBucket | None:
        control: Any = object()
        return self.patience.sleep(
            self.waiter, [self.bucket], deadline_s, plan("synchronous"), control
        )


def test_the_time_of_a_restart_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty questions take longer than the deadline, and all are answered: it is under way."""
    again = MissingRanks(reason="rank 1 died and is being started again", restarting=True)
    told = Told(monkeypatch, [again] * 40)
    assert told.sleep(0.2) is None


def test_without_a_restart_the_deadline_holds_and_says_who_was_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = MissingRanks(reason="rank 1 is silent since 31 s (iteration 13)")
    told = Told(monkeypatch, [silent] * 10_000)
    assert told.sleep(0.2) is told.bucket
    assert told.patience.reason == ": rank 1 is silent since 31 s (iteration 13)"


def test_a_long_wait_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "WARN_AFTER_S", 0.0)
    told = Told(monkeypatch, [MissingRanks(reason="rank 1 is silent since 31 s")] * 5)
    assert told.sleep(10.0) is None
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ["job j, rank 0: rank 1 is silent since 31 s"]
