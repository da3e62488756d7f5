"""Figures as people read them: how long, how far, how fast, when."""

from datetime import UTC, datetime
from typing import Final

from slackwater.common.base.words import number_of
from slackwater.console.tables import NOTHING
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.progress import JobProgress, ProgramProgress
from slackwater.schemas.steps import StepProfile
from slackwater.schemas.traffic import By, JobTraffic

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"))
_COARSE: Final = 10
"""From so many of a unit on, the next smaller one is left out."""


def lasted(seconds: float) -> str:
    """Show a duration in two units at most: 12s, 3m5s, 35m, 2h40m, 4d."""
    whole = max(0, int(seconds))
    for size, unit in _UNITS:
        if whole < size:
            continue
        count, rest = divmod(whole, size)
        smaller = {86_400: (3_600, "h"), 3_600: (60, "m"), 60: (1, "s")}[size]
        part = rest // smaller[0]
        return f"{count}{unit}" + (f"{part}{smaller[1]}" if part and count < _COARSE else "")
    return f"{whole}s"


def at(seconds: float) -> str:
    """Show a time since 1970 in UTC; empty for 0, which means that it is not known."""
    if seconds <= 0.0:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def done(progress: JobProgress | None) -> str:
    """Show progress as 7,210/20,000; without a total where the program counts for itself. A job
    that reports statistical epochs is that far: 3.21/10 epochs."""
    if progress is None or not (progress.updated_s or progress.iteration):
        return NOTHING
    if progress.epochs is not None:
        target = f"/{progress.epochs_target:g}" if progress.epochs_target is not None else ""
        return f"{progress.epochs:.2f}{target} epochs"
    total = f"/{progress.iterations:,}" if progress.iterations else ""
    return f"{progress.iteration:,}{total}"


def program(told: ProgramProgress) -> str:
    """Say what an elastic program measured, and on how many hosts its executors are."""
    measured = [f"{name} {value:.6g}" for name, value in told.measured.items()]
    on = f"{number_of(told.executors, 'executor')} on {number_of(told.hosts, 'host')}"
    done = f"{told.version:,} tasks done"
    moved = f"{told.moves:,} moves of executors"
    return ", ".join([*measured, on, done, moved])


def speed(iterations_s: float) -> str:
    if iterations_s <= 0.0:
        return NOTHING
    if iterations_s < 1 / 3600:
        return "0 it/min"  # It hangs: its figure falls towards zero for ever.
    if iterations_s < 0.1:
        return f"{iterations_s * 60:.2g} it/min"
    return f"{iterations_s:.1f} it/s" if iterations_s < 100 else f"{iterations_s:,.0f} it/s"


BY: Final[dict[By, str]] = {
    "agent": "as its Agents registered them",
    "calls": "by its send calls",
    "gloo": "by gloo's headers",
    "pauses": "by pauses between packets",
}


def traffic(of: JobTraffic) -> str:
    """Show what a rank sends in an iteration, and how that is known."""
    parts = [f"{of.bytes_per_iteration / 1e6:,.1f} MB an iteration"]
    if of.sizes:
        largest = f", the largest {of.skew:.1%} of it" if of.skew else ""
        parts.append(f" in {of.sizes:,} {of.kind if of.sizes > 1 else of.kind[:-1]}{largest}")
    elif not of.skew:
        parts.append(", of sizes that are not known")
    parts.append(f"; {BY[of.by]}")
    if of.iterations:
        each = f" of {of.iteration_s:.3g} s" if of.iteration_s else ""
        watched = ", watched in windows" if of.windows else ""
        parts.append(f", {of.iterations:,} iterations{each} seen{watched}")
    if of.dropped:
        parts.append(f"; {of.dropped:,} packets were missed")
    return "".join(parts)


def loss(of: float | None) -> str:
    """Show a loss. A job that is faster than it was profiled loses nothing."""
    return NOTHING if of is None else f"{max(0.0, of):.1%}"


def eta(progress: JobProgress | None) -> str:
    return NOTHING if progress is None or progress.eta_s is None else lasted(progress.eta_s)


def left(progress: JobProgress) -> str:
    """Show how long a job still trains, and the interval where known: 12m left (10m to 15m)."""
    if progress.eta_s is None:
        return NOTHING
    least, most = progress.eta_s_min, progress.eta_s_max
    interval = ""
    if least is not None:
        to = f"to {lasted(most)}" if most is not None else "or more"
        interval = f" ({lasted(least)} {to})"
    return f"{lasted(progress.eta_s)} left{interval}"


def mode(spec: JobSpec) -> str:
    """Say when the job's updates are applied."""
    if spec.consistency == "stale-synchronous":
        return f"stale by {spec.staleness}"
    return spec.consistency


def step_times(steps: StepProfile) -> str:
    """Say where one worker's iteration spends its time."""
    alone = f"; {steps.workers} trained, their waiting left out" if steps.workers > 1 else ""
    return (
        f"{steps.worker_s:.3g} s computing, {steps.uplink_s:.3g} s up, {steps.server_s:.3g} s at "
        f"the server, {steps.downlink_s:.3g} s down ({steps.turns:,} iterations{alone})"
    )


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
