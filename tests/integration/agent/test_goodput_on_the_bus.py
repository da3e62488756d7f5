"""A program's reporter on a real bus: rank 0 reports what the master takes for a job's profile."""

import pytest
from tests.waiting import soon

from slackwater import BatchLimits, GoodputReporter
from slackwater.common.base import codec
from slackwater.common.bus.base import Delivery
from slackwater.common.bus.nats import NatsBus
from slackwater.common.domains.models.goodput_report import profile_of
from slackwater.schemas import subjects
from slackwater.schemas.telemetry import GoodputReport

LIMITS = BatchLimits(initial=32, total_max=1024, per_gpu_max=128)


async def test_rank_0_reports_its_attempt_and_a_profile(
    nats_bus: NatsBus, nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACKWATER_ATTEMPT", "2")
    monkeypatch.setenv("SLACKWATER_GPUS", "n1:4")
    heard: list[GoodputReport] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(codec.decode(delivery.payload, GoodputReport))

    await nats_bus.subscribe(subjects.telemetries("job", unique, "goodput"), hear)
    with (
        GoodputReporter(LIMITS, job=unique, rank=0, workers=2, url=nats_url, report_s=0.05) as one,
        GoodputReporter(LIMITS, job=unique, rank=1, workers=2, url=nats_url, report_s=0.05) as two,
    ):
        for reporter in (one, two):
            reporter.saw_iteration(0.1, per_gpu=16, grad_s=0.08)
            reporter.saw_progress(1.5, target=4.0)
        await soon(lambda: len(heard) > 2, "reports come")
        assert two.reports == 0
    report = heard[0]
    assert (report.job, report.attempt, report.gpus_seen) == (unique, 2, 4)
    assert report.sender == f"agent.{unique}.0"
    assert (report.progress_epochs, report.target_epochs) == (1.5, 4.0)
    assert (report.per_gpu, report.accumulation, report.rate_scale) == (8, 0, 1.0)
    assert profile_of(report) == one._agent.profile()


async def test_training_goes_on_while_the_bus_is_away(
    unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACKWATER_GPUS", "n1:1")
    nobody = "nats://127.0.0.1:9"
    with GoodputReporter(LIMITS, job=unique, rank=0, workers=1, url=nobody, report_s=0.05) as alone:
        alone.saw_iteration(0.1, per_gpu=32)
        assert alone.batch_split() == (32, 0)
