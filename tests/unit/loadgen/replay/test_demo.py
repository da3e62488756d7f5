"""The demo that `make run` plays, and when it says that the product failed."""

from dataclasses import replace
from html.parser import HTMLParser
from math import floor
from pathlib import Path

import pytest
from rich.console import Console

from slackwater.common.domains.facts.timeline import Timeline
from slackwater.loadgen import models
from slackwater.loadgen.cli.demo import table
from slackwater.loadgen.replay import calibrate, demo
from slackwater.loadgen.replay.experiment import Outcome
from slackwater.loadgen.replay.gpu_demo import GpuTurns
from slackwater.loadgen.replay.machine import cpu_stalled_s
from slackwater.loadgen.replay.measures import LOSS_LIMIT, JobFigures
from slackwater.loadgen.replay.workload import Workload
from slackwater.loadgen.samples import PHILLY
from slackwater.loadgen.traces import read


@pytest.fixture(scope="module")
def work() -> Workload:
    return demo.workload(read(PHILLY).jobs, bytes_scale=0.05)


def test_the_shipped_rows_are_some_twenty_of_philly_with_their_licence() -> None:
    trace = read(PHILLY)
    assert trace.format == "philly"
    assert len(trace.jobs) == 20
    assert "CC-BY-4.0" in PHILLY.with_name("ATTRIBUTION.md").read_text()


def test_jobs_arrive_and_last_in_the_proportions_of_the_trace(work: Workload) -> None:
    rows = read(PHILLY).jobs
    assert len(work.jobs) == len(demo.MODELS) >= 5
    for job, row in zip(work.jobs, rows, strict=False):
        assert row.duration_s is not None
        assert job.at_s == pytest.approx((row.submit_s - rows[0].submit_s) * demo.TIME_SCALE)
        lasts_s = job.spec.iterations * job.compute_s
        assert lasts_s == pytest.approx(row.duration_s * demo.TIME_SCALE, abs=job.compute_s)
    assert max(job.at_s + job.spec.iterations * job.compute_s for job in work.jobs) < 85.0


def test_the_fast_job_fits_by_the_schemes_reckoning_and_not_in_truth(work: Workload) -> None:
    """d_j = C / floor(C / D) stays within the limit, with room for what iterating costs beside
    computing; but VGG19's fc6 takes longer than an iteration may lose."""
    cycle_s = demo.COMPUTE_S
    for costs_s in (0.002, 0.008):
        ratio = cycle_s / (demo.FAST_COMPUTE_S["googlenet"] + costs_s)
        assert 1.0 - floor(ratio) / ratio < LOSS_LIMIT
    tensors = models.tensors(demo.REFERENCE)
    largest = max(models.parameters((each,)) for each in tensors)
    slot_s = demo.DUTY * demo.COMPUTE_S * largest / models.parameters(tensors)
    assert slot_s / cycle_s > 2 * LOSS_LIMIT


def test_a_jobs_duty_is_what_it_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine: bytes x workers and update passes x charge / share / iteration."""
    for fold_s in (1e-10, 3e-9, 1e-7):
        monkeypatch.setattr(calibrate, "fold_s_per_element", lambda fold_s=fold_s: fold_s)
        charge = calibrate.charge(0.08, 0.5, 0.38)
        elements = charge.bytes_scale * models.parameters(models.tensors("vgg19"))
        charged_s = elements * 4 * (2 + 2) * charge.ns_per_byte / 1e9
        assert charged_s / 0.08 / 0.5 == pytest.approx(0.38)


def figures(**changes: object) -> list[JobFigures]:
    row = JobFigures(
        job="vgg19-1", model="vgg19", cluster="c1", state="completed", iterations=80,
        standalone_s=0.5, shared_s=0.51, static_s=None, steady_iterations=60, loss=0.02,
        loss_whole_life=0.03, loss_against_standalone=0.02, duty=0.38, cpu_s=1.0, migrations=1,
        reverts=0, reason="",
    )  # fmt: skip
    return [replace(row, **changes)]  # type: ignore[arg-type]


def summary(work: Workload, rows: list[JobFigures], **given: object) -> demo.DemoSummary:
    timeline = Timeline(started_s=0.0)
    for job in work.jobs:
        timeline.expect(job.spec, job.at_s)
    outcome = Outcome(timeline, 90.0, rows, 0.08)
    outcome.mismatches.update(given.pop("mismatches", {}))  # type: ignore[call-overload]
    settings: dict[str, object] = {
        "charge_ns_per_byte": 0.1,
        "cpu_pressure": 0.2,
        "wall_s": 100.0,
        "turns": GpuTurns(Timeline(started_s=0.0), (), ()),
    }
    return demo.summarize(outcome, work, **{**settings, **given})  # type: ignore[arg-type]


def test_a_run_that_did_its_work_has_no_failure(work: Workload) -> None:
    found = summary(work, figures())
    assert found.failures == ()
    assert found.jobs[0].equal
    assert found.jobs[0].gpus == 4
    assert any("none was moved away" in remark for remark in found.remarks)


def test_a_failed_job_is_a_failure_with_its_reason(work: Workload) -> None:
    found = summary(work, figures(state="failed", reason="rank 1 vanished"))
    assert found.failures == ("vgg19-1 failed: rank 1 vanished",)


def test_a_parameter_that_differs_is_a_failure(work: Workload) -> None:
    found = summary(work, figures(), mismatches={"vgg19-1": "job vgg19-1: its parameters differ"})
    assert found.failures == ("job vgg19-1: its parameters differ",)
    assert not found.jobs[0].equal


def test_a_kept_placement_beyond_the_limit_is_a_failure_on_a_quiet_machine_only(
    work: Workload,
) -> None:
    (failure,) = summary(work, figures(loss=0.14)).failures
    assert "lost 14.0% of its speed; the limit is 10%" in failure
    busy = summary(work, figures(loss=0.14), cpu_pressure=0.97)
    assert busy.failures == ()
    assert any("the machine was busy" in remark for remark in busy.remarks)


def test_a_job_too_short_to_be_judged_is_a_remark(work: Workload) -> None:
    found = summary(work, figures(loss=None, shared_s=None))
    assert found.failures == ()
    assert any("vgg19-1" in remark for remark in found.remarks)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_table_fits_into_80_columns(work: Workload) -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        longest = figures(job="inception4-5", loss=-0.123, reverts=10)
        console.print(table(summary(work, longest).jobs))
    text = captured.get()
    assert "inception4-5" in text
    assert "10 times" in text
    assert "parameters" in text
    assert "…" not in text


def test_cpu_pressure_is_read_where_the_kernel_tells_it(tmp_path: Path) -> None:
    there = tmp_path / "cpu"
    there.write_text("some avg10=1.00 avg60=0.50 avg300=0.10 total=2500000\nfull total=0\n")
    assert cpu_stalled_s(there) == 2.5
    assert cpu_stalled_s(tmp_path / "none") is None
