"""A job's traffic: kept by how it is known, shown, and used by Tiresias."""

import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_model_skew import register, seen, submit

from slackwater.common.base.effects import Observed
from slackwater.console import figures
from slackwater.loadgen import models
from slackwater.schemas import subjects
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.tensors import largest_share
from slackwater.schemas.traffic import By, JobTraffic, TrafficObserved
from slackwater.services.master.traffic import better


def traffic(by: By = "pauses", **figures: object) -> JobTraffic:
    given: dict[str, object] = {
        "bytes_per_iteration": 1000, "iterations": 20, "sizes_bytes": (700, 300), "sizes": 2,
        "skew": 0.7,
    }  # fmt: skip
    return JobTraffic(by=by, **(given | figures))  # type: ignore[arg-type]


def report(harness: GpuHarness, found: JobTraffic, job: str = "a", **other: object) -> None:
    subject = subjects.telemetry("job", str(other.pop("of", job)), "traffic")
    given: dict[str, object] = {"attempt": 0, "node": NodeId("n1")}
    message = TrafficObserved(job=JobId(job), traffic=found, **(given | other))  # type: ignore[arg-type]
    harness.step(Observed(subject, message))


def running(**config: object) -> GpuHarness:
    harness = GpuHarness(gpu_policy="tiresias-las", **config)
    submit(harness, "a", "", 2)
    assert harness.job("a").allocation
    return harness


def test_the_skew_that_was_seen_decides_a_job_without_an_agent() -> None:
    harness = running()
    report(harness, traffic(skew=0.71))
    assert harness.job("a").traffic == traffic(skew=0.71)
    assert harness.job("a").skew == 0.71
    assert seen(harness, "a").skew == 0.71
    harness.restart()
    assert seen(harness, "a").skew == 0.71


def test_registered_tensors_are_trusted_above_all_that_is_seen() -> None:
    harness = running()
    report(harness, traffic("calls"))
    register(harness, "a", "vgg16")
    found = harness.job("a").traffic
    assert found is not None
    skew = largest_share(models.tensors("vgg16", 0.01))
    assert (found.by, found.kind, found.skew) == ("agent", "tensors", pytest.approx(skew))
    report(harness, traffic("calls", iterations=4000))
    assert harness.job("a").traffic == found


@pytest.mark.parametrize(
    ("known", "found", "replaces"),
    [
        (traffic(), traffic("gloo"), True),
        (traffic("calls"), traffic("gloo"), False),
        (traffic("gloo", skew=0.5), traffic("calls", skew=0.0), False),
        (traffic("calls", skew=0.0), traffic("gloo"), True),
        (traffic(), traffic(iterations=39), False),
        (traffic(), traffic(iterations=40), True),
        (traffic(), traffic(skew=0.6), True),
        (traffic(), traffic(bytes_per_iteration=1005), True),
        (traffic(rank=1), traffic(rank=0), True),
        (traffic(rank=0), traffic(rank=1, skew=0.6), False),
    ],
)
def test_what_says_more_replaces_what_is_known(
    known: JobTraffic, found: JobTraffic, replaces: bool
) -> None:
    assert better(known, found) == replaces


def test_reports_of_others_and_of_before_are_left_out() -> None:
    harness = running()
    report(harness, traffic(), attempt=3)
    report(harness, traffic(), job="b")
    report(harness, traffic(), of="b")
    report(harness, traffic(rank=7))
    report(harness, traffic("agent"))
    assert harness.job("a").traffic is None


def test_people_are_told_how_it_is_known() -> None:
    text = figures.traffic(
        traffic("gloo", kind="buckets", bytes_per_iteration=10_847_204, iteration_s=0.122,
                iterations=41, windows=True, skew=0.758, dropped=3)
    )  # fmt: skip
    assert text == (
        "10.8 MB an iteration in 2 buckets, the largest 75.8% of it; by gloo's headers, 41 "
        "iterations of 0.122 s seen, watched in windows; 3 packets were missed"
    )
    text = figures.traffic(traffic(sizes=0, sizes_bytes=(), skew=0.0, iterations=20))
    assert "of sizes that are not known; by pauses between packets" in text
