"""The profiler's core: from what Agents and aggregators report, jobs' profiles and monitor windows.

Pure, and without durable state: a profiler that was killed learns everything again from the next
reports. A profile is said when every rank has enough iterations under one placement, of which both
halves say the same, and every bucket's cost is known; because the bus may lose it, it is said again
at twice, four times ... the iterations and with every window. Costs are per bucket and not per
placement: a task's CPU time is measured alone, wherever it runs.
"""

from dataclasses import dataclass, field
from typing import Final

from slackwater.common.base.effects import (
    Action,
    Effect,
    EffectKey,
    Log,
    Observed,
    Publish,
    Recovered,
    ShellEvent,
    StartTimer,
    TimerFired,
)
from slackwater.common.base.limits import JOBS_MAX
from slackwater.schemas import subjects
from slackwater.schemas.base import BUCKETS_MAX, JobId, Message
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.placement import Profile
from slackwater.schemas.telemetry import (
    HostLoad,
    IterationsObserved,
    JobProfiled,
    TasksObserved,
    WindowMeasured,
)
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.windows import Iterations

AGREEING: Final = 0.05
"""Halves of a profile that differ by no more than this part say the same."""


@dataclass(slots=True)
class _Job:
    iterations: Iterations
    heard_s: float
    buckets: int = 0
    """0: not said; then the costs seen so far must be gapless and twice the same in number."""
    costs_s: dict[int, float] = field(default_factory=dict)
    costs_before: int = 0
    said_epoch: int = -1
    say_at: int = 0
    """Iterations at which the profile is said next."""
    cpu_s: float = 0.0
    slot_s: float = 0.0
    """Slot time that its tasks took of all aggregators since `used_s`."""
    used_s: float = 0.0
    """When the last window was said."""

    def usage(self, now_s: float) -> tuple[float, float]:
        """(cores, aggregators) that it used since the last call."""
        elapsed_s = now_s - self.used_s
        used = (self.cpu_s / elapsed_s, self.slot_s / elapsed_s) if elapsed_s > 0.0 else (0.0, 0.0)
        self.cpu_s, self.slot_s, self.used_s = 0.0, 0.0, now_s
        return used


@dataclass(frozen=True, slots=True)
class MeasureHost(Action):
    """Look at the machine's load. `HostMeasured` follows."""


class HostDue(EffectKey, frozen=True):
    """The host is measured again."""


@dataclass(frozen=True, slots=True)
class HostMeasured:
    load: HostLoad


class Profiler:
    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._jobs: dict[JobId, _Job] = {}
        self._out: list[Effect] = []

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    def step(self, event: ShellEvent | HostMeasured, now_s: float) -> list[Effect]:
        self._out = []
        match event:
            case Observed():
                self._observe(event.message, now_s)
            case HostMeasured():
                subject = subjects.telemetry("profiler", self._config.id, "host")
                self._out.append(Publish(subject, event.load))
            case Recovered() | TimerFired():
                self._forget_silent(now_s)
                self._out.append(MeasureHost())
                self._out.append(StartTimer(HostDue(), now_s + self._config.host_period_s))
            case _:
                pass
        return self._out

    def _observe(self, message: Message, now_s: float) -> None:
        match message:
            case IterationsObserved():
                self._iterated(message, now_s)
            case TasksObserved():
                self._costs(message, now_s)
            case JobEvent():
                if message.fact in TERMINAL_STATES:
                    self._jobs.pop(message.job, None)
            case _:
                self._out.append(Log("unexpected", {"type": type(message).__name__}, "warning"))

    def _job(self, id: JobId, now_s: float) -> _Job | None:
        job = self._jobs.get(id)
        if job is None:
            if len(self._jobs) >= JOBS_MAX:
                return None
            job = _Job(Iterations(self._config.warm_up_iterations), now_s, used_s=now_s)
            self._jobs[id] = job
        job.heard_s = now_s
        return job

    def _iterated(self, message: IterationsObserved, now_s: float) -> None:
        job = self._job(message.job, now_s)
        if job is None:
            return
        job.buckets = max(job.buckets, message.buckets)
        job.iterations.add(
            message.rank,
            message.first_iteration,
            message.durations_s,
            message.location_epoch,
            message.workers,
            message.links,
            message.gaps_s,
        )
        self._say(message.job, job, now_s)

    def _costs(self, message: TasksObserved, now_s: float) -> None:
        for used in message.jobs:
            user = self._job(used.job, now_s)
            if user is not None:
                user.cpu_s += used.cpu_s
                user.slot_s += used.slot_s
        touched: dict[JobId, _Job] = {}
        for task in message.tasks:
            job = touched.get(task.job) or self._job(task.job, now_s)
            if job is None or task.bucket >= BUCKETS_MAX or task.executions == 0:
                continue
            if task.job not in touched:
                touched[task.job] = job
                job.costs_before = len(job.costs_s)
            job.costs_s[task.bucket] = task.cpu_s
        for id, job in touched.items():
            self._say(id, job, now_s)

    def _say(self, id: JobId, job: _Job, now_s: float) -> None:
        """Publish all that is complete: the profile, and the windows behind it."""
        epoch = job.iterations.location_epoch
        if epoch != job.said_epoch:
            job.said_epoch, job.say_at = epoch, self._config.profile_iterations
        config = self._config
        while window := job.iterations.window(config.window_iterations, config.window_s):
            used_cpu, used_slots = job.usage(now_s)
            fact = WindowMeasured(
                job=id,
                location_epoch=epoch,
                last_iteration=window.last_iteration,
                iterations=window.iterations,
                iteration_s=window.iteration_s,
                quieter_half_s=window.quieter_half_s,
                spanned_s=window.spanned_s,
                links=job.iterations.links.take(),
                workers=job.iterations.workers,
                used_cpu=used_cpu,
                used_slots=used_slots,
            )
            self._out.append(Publish(subjects.event("job", id, "window"), fact))
            job.say_at = min(job.say_at, job.iterations.profiled)
        count = job.iterations.profiled
        if count < max(job.say_at, config.profile_iterations) or not self._costed(job):
            return
        if not self._enough(job.iterations):
            return
        push_s_per_byte, pull_s_per_byte = job.iterations.links.usual()
        positions = job.iterations.positions()
        profile = Profile(
            positions=positions if len(positions) == len(job.costs_s) else (),
            push_s_per_byte=push_s_per_byte,
            pull_s_per_byte=pull_s_per_byte,
            network_bytes=job.iterations.links.bytes_of_iteration(job.iterations.workers),
            iteration_s=job.iterations.iteration_s(),
            task_cpu_s=tuple(job.costs_s[bucket] for bucket in range(len(job.costs_s))),
            iterations=count,
            workers=job.iterations.workers,
        )
        self._out.append(
            Publish(
                subjects.event("job", id, "profiled"),
                JobProfiled(job=id, location_epoch=epoch, profile=profile),
            )
        )
        job.say_at = 2 * count

    def _enough(self, iterations: Iterations) -> bool:
        """Say whether the profile has lasted long enough for its two halves to say the same."""
        config, lasted_s = self._config, iterations.profiled_s
        if lasted_s < config.profile_s:
            return False
        at_most = iterations.profiled >= config.profile_iterations_max
        return at_most or lasted_s >= config.profile_s_max or iterations.agrees(AGREEING)

    def _costed(self, job: _Job) -> bool:
        """Say whether every bucket's cost is known."""
        known = len(job.costs_s)
        if job.buckets:
            return known == job.buckets and max(job.costs_s) == known - 1
        return 0 < known == job.costs_before and max(job.costs_s) == known - 1

    def _forget_silent(self, now_s: float) -> None:
        for id, job in list(self._jobs.items()):
            if now_s - job.heard_s > self._config.forget_after_s:
                del self._jobs[id]
