"""The demonstration that `make run` shows: jobs of a real trace share aggregators. Pure.

Arrivals and durations are those of jobs of the Philly trace that come with the package, all in the
same proportion. The trace names no models: they are chosen here so that one job is hurt by sharing,
as in the paper's case study (Gu et al. 2021, figure 10). GoogLeNet's iterations are short. By the
scheme's reckoning four of them fit a cycle of VGG19's, but each fourth one meets the update of
VGG19's fc6, a quarter of a cycle in one piece. Updates are charged by their bytes, so that a job's
duty is an input of the demonstration, and not an accident of the moment.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from slackwater.common.domains.facts.timeline import UNDONE
from slackwater.loadgen.replay.experiment import Outcome
from slackwater.loadgen.replay.gpu_demo import GpuJob, GpuTurns
from slackwater.loadgen.replay.measures import (
    LOSS_LIMIT,
    UNDERCHARGED_MAX,
    JobFigures,
    cpu_reduction_ratio,
    undercharged,
)
from slackwater.loadgen.replay.story import story
from slackwater.loadgen.replay.workload import PlannedJob, Workload, emulated
from slackwater.loadgen.traces.record import TraceJob

MODELS: Final = ("vgg19", "resnet152", "googlenet", "resnet101", "inception4", "resnet50")
"""Models of the trace's first jobs, in order."""
WORKERS: Final = 2
SERVERS: Final = 2
"""Servers that each job would reserve for itself, as in the paper's "2s-2w"."""
TIME_SCALE: Final = 30.0 / 178_022.0
"""The six jobs arrive within 30 seconds instead of two days."""
COMPUTE_S: Final = 0.5
FAST_COMPUTE_S: Final = {"googlenet": 0.113}
"""A little more than four of its iterations go into one of the others: within the loss limit."""
REFERENCE: Final = "vgg19"
DUTY: Final = 0.38
"""Part of one server that VGG19's updates keep busy; the others follow by their bytes."""
POLICY: Final = "cyclic"
"""The paper's: it places what its reckoning allows, and finds out what that costs (ADR 16)."""
CPU_SHARE: Final = 0.08
AGGREGATORS: Final = 10
WINDOW: Final = 32
WINDOW_S: Final = 4.0
PROFILER: Final = {
    "profile_iterations": 5, "profile_s": 2.0, "window_iterations": WINDOW, "window_s": WINDOW_S,
}  # fmt: skip
STEADY_MIN: Final = 10
"""Iterations under a kept placement that a job's speed is told from."""
PRESSURE_MAX: Final = 0.5
"""Part of the time in which some process waited for a CPU: with more, the machine was busy."""


class DemoJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of the table. Losses are shares of samples per second."""

    job: str
    state: str
    reason: str
    gpus: int
    """GPUs in its row of the trace."""
    servers: int
    ended_on: tuple[str, ...]
    alone_per_s: float | None
    shared_per_s: float | None
    """Iterations a second, under the placements that were kept."""
    loss: float | None
    moved: int
    equal: bool
    """Set where its parameters equal those of a single-process replay, bit for bit."""


class DemoSummary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json. `failures`: why the exit code is 1; `remarks`: what could not be shown."""

    jobs: tuple[DemoJob, ...]
    gpu_jobs: tuple[GpuJob, ...] = ()
    servers_asked_max: int
    aggregators_max: int
    cpu_saved: float | None
    loss_max: float | None
    moved: tuple[str, ...]
    """Sentences about the jobs that were moved away."""
    failures: tuple[str, ...]
    remarks: tuple[str, ...]
    cpu_pressure: float | None
    """Part of the time in which some process of the machine waited for a CPU; None: not known."""
    charge_ns_per_byte: float
    bytes_scale: float
    wall_s: float


def workload(rows: Sequence[TraceJob], bytes_scale: float, seed: int = 1) -> Workload:
    """The first rows of the trace, one for each of MODELS."""
    chosen = list(zip(rows, MODELS, strict=False))
    jobs = []
    for number, (row, model) in enumerate(chosen, 1):
        compute_s = FAST_COMPUTE_S.get(model, COMPUTE_S)
        assert row.duration_s is not None, "the shipped rows have durations"
        spec = emulated(
            f"{model}-{number}", model,
            workers=WORKERS, servers=SERVERS,
            iterations=round(row.duration_s * TIME_SCALE / compute_s),
            compute_s=compute_s, bytes_scale=bytes_scale, seed=seed + number,
        )  # fmt: skip
        source = {"id": row.id, "gpus": str(row.gpus), "duration_s": repr(row.duration_s)}
        at_s = (row.submit_s - rows[0].submit_s) * TIME_SCALE
        jobs.append(PlannedJob(at_s=at_s, compute_s=compute_s, spec=spec, source=source))
    return Workload(
        name="demonstration", jobs=tuple(jobs), bytes_scale=bytes_scale, time_scale=TIME_SCALE,
        seed=seed,
    )  # fmt: skip


def summarize(
    outcome: Outcome,
    work: Workload,
    *,
    charge_ns_per_byte: float,
    cpu_pressure: float | None,
    wall_s: float,
    turns: GpuTurns,
) -> DemoSummary:
    timeline = outcome.timeline
    gpus = {job.spec.id: int(job.source["gpus"]) for job in work.jobs}
    jobs = tuple(
        DemoJob(
            job=row.job,
            state=row.state,
            reason=row.reason,
            gpus=gpus[row.job],
            servers=SERVERS,
            ended_on=timeline.tracks[row.job].aggregators,
            alone_per_s=1.0 / row.standalone_s if row.standalone_s else None,
            shared_per_s=1.0 / row.shared_s if row.shared_s else None,
            loss=row.loss,
            moved=row.reverts,
            equal=row.state == "completed" and row.job not in outcome.mismatches,
        )
        for row in outcome.figures
    )
    busy = cpu_pressure is not None and cpu_pressure > PRESSURE_MAX
    beyond = [row for row in outcome.figures if row.loss is not None and row.loss > LOSS_LIMIT]
    failures = [
        f"{row.job} {row.state}: {row.reason or 'no reason given'}"
        for row in outcome.figures
        if row.state != "completed"
    ]
    failures += [*outcome.mismatches.values(), *turns.failures]
    if not busy:
        failures += [_beyond(row) for row in beyond]
    return DemoSummary(
        jobs=jobs,
        gpu_jobs=turns.jobs,
        servers_asked_max=max((level for _, level in timeline.required), default=0),
        aggregators_max=max((level for _, level in timeline.aggregators), default=0),
        cpu_saved=cpu_reduction_ratio(timeline, outcome.until_s),
        loss_max=max((row.loss for row in outcome.figures if row.loss is not None), default=None),
        moved=_moved(outcome),
        failures=tuple(failures),
        remarks=tuple(_remarks(outcome, beyond if busy else [], cpu_pressure)),
        cpu_pressure=cpu_pressure,
        charge_ns_per_byte=charge_ns_per_byte,
        bytes_scale=work.bytes_scale,
        wall_s=wall_s,
    )


def _beyond(row: JobFigures) -> str:
    assert row.loss is not None
    return (
        f"{row.job} was left in a place where it lost {row.loss:.1%} of its speed; "
        f"the limit is {LOSS_LIMIT:.0%}"
    )


def _moved(outcome: Outcome) -> tuple[str, ...]:
    """Return the sentences about jobs that were moved away, in order."""
    kinds = ("slow-down", "reverted", "relieved")
    told = [each for each in story(outcome.timeline) if each.kind in kinds]
    return tuple(each.text for each in told)


def _remarks(
    outcome: Outcome, beyond: Sequence[JobFigures], cpu_pressure: float | None
) -> list[str]:
    timeline, found = outcome.timeline, []
    if not any(m.cause in UNDONE and m.fact == "finished" for m in timeline.migrations.values()):
        found.append(
            "No job was hurt beyond the limit this time, so none was moved away: run it again."
        )
    short = [row.job for row in outcome.figures if row.state == "completed" and row.loss is None]
    if short:
        found.append(
            f"Too few undisturbed iterations to tell what sharing cost {', '.join(short)}."
        )
    if (over := undercharged(timeline)) > UNDERCHARGED_MAX:
        found.append(
            f"The machine was slower than when it was measured: {over:.0%} of the "
            "updates took more CPU time than they were charged."
        )
    if beyond:
        assert cpu_pressure is not None
        found.append(
            f"{', '.join(row.job for row in beyond)} lost more than {LOSS_LIMIT:.0%}, but the "
            f"machine was busy (somebody waited for a CPU in {cpu_pressure:.0%} of the time): "
            "that need not be sharing's doing."
        )
    return found
