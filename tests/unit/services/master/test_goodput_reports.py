"""Reports of goodput at the master: what it believes and refuses, and what Pollux makes of them."""

from math import inf, nan
from typing import Any

import msgspec
import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import Harness, heartbeat, spec

from slackwater.common.base import codec
from slackwater.common.base.effects import Count, Effect, Log, Observed, TimerFired
from slackwater.common.base.errors import DecodeRejected
from slackwater.common.domains.models.shared_throughput import SharedThroughput
from slackwater.schemas import subjects
from slackwater.schemas.base import ClusterId, JobId
from slackwater.schemas.gpus import held
from slackwater.schemas.job_requests import SubmitJob
from slackwater.schemas.telemetry import (
    AggregatedSync,
    BatchBounds,
    GoodputReport,
    ThroughputTheta,
)
from slackwater.services.master.environment import launch_environment
from slackwater.services.master.keys import DecisionDue
from slackwater.services.master.scheduling.policies.pollux import PolluxFacts
from slackwater.services.master.snapshot import NOT_REPORTED

THETA = ThroughputTheta(
    alpha_grad_s=0.05, beta_grad_s=0.001, alpha_local_s=0.001, beta_local_s=0.0,
    alpha_node_s=0.002, beta_node_s=0.0, gamma=2.0,
)  # fmt: skip
REPORT = GoodputReport(
    job=JobId("a"), theta=THETA, noise_scale=1e6,
    batch=BatchBounds(initial=128, total_max=8192, per_gpu_max=256), gpus_seen=1,
)  # fmt: skip


def tell(harness: Harness, report: GoodputReport, of: str = "") -> list[Effect]:
    subject = subjects.telemetry("job", of or report.job, "goodput")
    return harness.step(Observed(subject, report))


def round_at(harness: Harness, at_s: float) -> list[Effect]:
    harness.now_s = at_s
    return harness.step(TimerFired(DecisionDue("gpus")))


def trained(gpus: int = 2) -> GpuHarness:
    """A cluster under Pollux, with job `a`, which may use all GPUs and was given one."""
    harness = GpuHarness(gpus, gpu_policy="pollux", node_silent_s=1e6)
    asked = spec("a", workers=2, gpus=2, gpus_min=1, gpus_max=2 * gpus, adaptive=True)
    harness.ask(SubmitJob(spec=asked))
    round_at(harness, 120.0)
    assert held(harness.job("a").allocation) == 1, "a new job gets one GPU first"
    harness.confirm("start/a")
    return harness


def test_a_job_grows_to_twice_what_its_agent_was_measured_on_and_no_further() -> None:
    harness = trained()
    tell(harness, REPORT)
    assert harness.job("a").state == "running", "no policy is asked because of a report"
    round_at(harness, 180.0)
    assert held(harness.job("a").planned) == 2
    round_at(harness, 240.0)
    assert held(harness.job("a").planned) == 2, "nobody has measured it on more than one"


def test_a_job_that_never_reports_keeps_its_first_gpu() -> None:
    harness = trained()
    for at_s in (180.0, 240.0, 300.0):
        round_at(harness, at_s)
        assert (harness.job("a").state, held(harness.job("a").allocation)) == ("running", 1)


def test_a_report_that_says_the_same_again_changes_nothing() -> None:
    """Tables of goodput are made anew for a model that is another object."""
    harness = trained()
    tell(harness, REPORT)
    profiles = harness.core.state.gpus.snapshot.profiles
    first = profiles[JobId("a")]
    tell(harness, REPORT)
    assert profiles[JobId("a")] is first
    tell(harness, msgspec.structs.replace(REPORT, noise_scale=5.0))
    assert profiles[JobId("a")] is not first


AGGREGATED = AggregatedSync(alpha_sync_s=0.001, share_bytes_s=1e9, nbytes=5e8, incast_s=0.001)


def test_a_job_that_aggregates_is_planned_with_the_aggregators_that_it_can_have() -> None:
    """Its own, and what its cluster has free, up to the servers that it asks for. Pollux keeps that
    form over a restart."""
    harness = trained()
    state = harness.core.state
    report = msgspec.structs.replace(REPORT, aggregated=AGGREGATED)
    for free, servers, most in ((0, 3, 1), (1, 3, 2), (7, 3, 3), (7, 1, 1)):
        job = state.jobs[JobId("a")]
        spec_now = msgspec.structs.replace(job.record.spec, servers=servers)
        state.change(job, harness.now_s, spec=spec_now, cluster=ClusterId("c0"))
        for number in range(free):
            harness.see(heartbeat(f"a{number}", harness.now_s))
        tell(harness, report)
        model = state.gpus.snapshot.profiles[JobId("a")].model
        assert model is not None
        assert isinstance(model.throughput, SharedThroughput)
        assert model.throughput.aggregators_max == most
    round_at(harness, 180.0)
    (kept,) = msgspec.msgpack.decode(state.policy.facts, type=PolluxFacts).reports.values()
    assert kept.profile.model == model


def test_a_batch_that_its_user_fixed_is_planned_with_as_fixed() -> None:
    harness = trained()
    job = harness.core.state.jobs[JobId("a")]
    fixed = msgspec.structs.replace(job.record.spec, batch="fixed", batch_size=256)
    harness.core.state.change(job, harness.now_s, spec=fixed)
    tell(harness, REPORT)
    model = harness.core.state.gpus.snapshot.profiles[JobId("a")].model
    assert model is not None
    assert model.limits.fixed == 256
    assert launch_environment(fixed)["SLACKWATER_BATCH"] == "256"
    assert "SLACKWATER_BATCH" not in launch_environment(spec("b", batch_size=256))


def changed(**fields: Any) -> GoodputReport:
    return msgspec.structs.replace(REPORT, **fields)


NO_COMPUTING = msgspec.structs.replace(THETA, alpha_grad_s=0.0, beta_grad_s=0.0)
CONTRADICTED = BatchBounds(initial=128, total_max=64, per_gpu_max=256)


@pytest.mark.parametrize(
    ("report", "of", "cause", "said"),
    [
        (changed(job=JobId("b")), "", "job", "there is no job b"),
        (REPORT, "b", "job", "which is not of job a"),
        (changed(job=JobId("waits")), "", "job", "job waits is pending and holds no GPUs"),
        (changed(attempt=1), "", "attempt", "it is of attempt 1; job a is in 0"),
        (changed(gpus_seen=5), "", "figures", "gpus_seen is 5; job a is given 4 at most"),
        (changed(batch=CONTRADICTED), "", "figures", "initial=128 and total_max=64"),
        (changed(theta=NO_COMPUTING), "", "figures", "computing takes no time"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_logged_and_counted(
    report: GoodputReport, of: str, cause: str, said: str
) -> None:
    harness = trained()
    harness.submit("waits", 4)
    effects = tell(harness, report, of)
    assert [e.name for e in effects if isinstance(e, Count)] == [f"goodput_{cause}"]
    (logged,) = [e for e in effects if isinstance(e, Log)]
    assert (logged.event, logged.level) == ("goodput.refused", "warning")
    assert said in logged.fields["reason"]
    assert harness.core.state.reports_refused == {cause: 1}
    assert harness.core.state.gpus.snapshot.profiles == {}
    assert harness.core.state.gpus.snapshot.jobs[JobId("a")].profile is NOT_REPORTED


def test_a_report_of_an_attempt_before_is_refused() -> None:
    """A process that was told to stop may report once more after its job went on elsewhere."""
    harness = trained()
    tell(harness, REPORT)
    round_at(harness, 180.0)
    assert harness.job("a").state == "stopping"
    tell(harness, changed(noise_scale=7.0))
    assert not harness.core.state.reports_refused, "it still stops: this is what it has learned"
    harness.confirm("stop/a")
    assert harness.job("a").attempt == 1
    tell(harness, changed(noise_scale=9.0))
    assert harness.core.state.reports_refused == {"attempt": 1}
    profile = harness.core.state.gpus.snapshot.profiles[JobId("a")]
    assert profile.model is not None
    assert profile.model.noise_scale == 7.0


def test_refusals_fill_no_log() -> None:
    harness = trained()
    logged = 0
    for _ in range(150):
        logged += sum(isinstance(e, Log) for e in tell(harness, changed(attempt=1)))
    assert logged == 100
    assert harness.core.state.reports_refused == {"attempt": 150}


@pytest.mark.parametrize(
    ("field", "value"),
    [("alpha_grad_s", nan), ("beta_node_s", -1e-9), ("gamma", 0.5), ("alpha_local_s", inf)],
)
def test_a_figure_that_is_none_does_not_come_as_far_as_the_master(field: str, value: float) -> None:
    theta = msgspec.structs.replace(THETA, **{field: value})
    payload = codec.encode(changed(theta=theta))
    with pytest.raises(DecodeRejected, match=rf"GoodputReport: .*theta.{field}"):
        codec.decode(payload, GoodputReport)
    with pytest.raises(DecodeRejected, match="noise_scale"):
        codec.decode(codec.encode(changed(noise_scale=-abs(value))), GoodputReport)


def test_a_master_that_restarts_remembers_the_reports_that_it_planned_with() -> None:
    """Without, a job that its agent told to scale badly would be given all GPUs."""
    slow = msgspec.structs.replace(THETA, alpha_local_s=5.0, alpha_node_s=9.0)
    harness = trained()
    tell(harness, changed(theta=slow, gpus_seen=4))
    round_at(harness, 180.0)
    assert held(harness.job("a").allocation) == 1
    assert harness.job("a").state == "running"
    harness.restart()
    harness.hear()
    round_at(harness, 240.0)
    assert harness.core.state.gpus.decisions, "it was asked"
    assert (harness.job("a").state, held(harness.job("a").allocation)) == ("running", 1)


@pytest.mark.parametrize("policy", ["pollux", "tiresias-artifact", "gandiva"])
def test_a_round_that_begins_milliseconds_late_takes_place(policy: str) -> None:
    """Regression: timers fire a moment after their instant, which rounds took for one between two
    rounds, so that these policies never did anything on a running cluster."""
    harness = GpuHarness(1, gpu_policy=policy)
    for id in ("a", "b", "c"):
        harness.submit(id, 1)
    round_at(harness, 120.003)
    states = {id: harness.job(id).state for id in ("a", "b", "c")}
    assert list(states.values()).count("starting") == 2
    assert states["c"] == ("starting" if policy == "gandiva" else "pending"), "its turn has come"
    assert harness.core.state.gpus.wake_s == 180.0


def test_a_wake_that_was_long_ago_is_as_of_now() -> None:
    harness = GpuHarness(1, gpu_policy="pollux", node_silent_s=1e6)
    harness.submit("a", 1)
    assert harness.core.state.gpus.wake_s == 120.0
    round_at(harness, 150.0)
    assert harness.job("a").state == "pending", "it waits for the next round"
    assert harness.core.state.gpus.wake_s == 180.0
    assert "number 1 of the waiting by attained service" in harness.why("a")
