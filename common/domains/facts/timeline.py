"""Fold facts and telemetry into a read model: jobs, what they hold, aggregators, migrations. Pure.

It follows the jobs that it is told to `expect`, and is told nothing but what the bus tells
everybody. Time is the observer's clock; the facts carry the ids under which an operator finds them
again in `nats sub 'sw.v1.evt.>'`. It keeps all that it hears, and is made for a run, not for weeks.
"""

from dataclasses import dataclass, field
from typing import Final

from slackwater.common.domains.facts.sentences import named
from slackwater.schemas.base import Message
from slackwater.schemas.cluster import AggregatorHeartbeat, AllocationEvent
from slackwater.schemas.facts import Fact
from slackwater.schemas.gpus import NodeAllocation, held
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import TERMINAL_STATES, WAITING_STATES, JobState
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import MigrationEvent, Profile, TensorCopyDone
from slackwater.schemas.telemetry import (
    IterationsObserved,
    JobProfiled,
    TasksObserved,
    WindowMeasured,
)

Observed = (
    JobEvent
    | AllocationEvent
    | MigrationEvent
    | TensorCopyDone
    | JobProfiled
    | WindowMeasured
    | IterationsObserved
    | AggregatorHeartbeat
    | TasksObserved
)
"""The messages that a timeline understands."""
FACTS = (
    JobEvent, AllocationEvent, MigrationEvent, TensorCopyDone, JobProfiled, WindowMeasured,
)  # fmt: skip
PLACED: Final = frozenset({"located", "assigned", "steady"})
"""Facts that name all of a job's aggregators."""
LIFE: Final[dict[str, JobState]] = {
    "pending": "pending", "starting": "starting", "running": "running", "stopping": "stopping",
    "resized": "stopping", "paused": "paused", "joining": "running", "scaled": "running",
}  # fmt: skip
"""The master's facts about a job that goes on -> the state that it is in then."""
ENDS: Final[dict[str, JobState]] = {state: state for state in TERMINAL_STATES}
UNDONE: Final = frozenset({"reverted", "expanded", "protected"})
"""Causes of migrations that take back, for a loss, what an assignment had saved."""


@dataclass
class Iteration:
    number: int
    at_s: float
    duration_s: float


@dataclass(frozen=True)
class MonitorWindow:
    """The profiler's measurements of a job in one window, received at `at_s`."""

    at_s: float
    iterations: int
    iteration_s: float

    @property
    def begun_s(self) -> float:
        return self.at_s - self.iterations * self.iteration_s


@dataclass
class JobTrack:
    spec: JobSpec
    submitted_s: float
    placed_s: float | None = None
    ended_s: float | None = None
    state: JobState = "pending"
    reason: str = ""
    cluster: str = ""
    aggregators: tuple[str, ...] = ()
    """Where its tensors are by the last fact that said so, or were when it ended."""
    attempt: int = 0
    allocation: NodeAllocation = ()
    """GPUs, or slots of processes, that it holds; empty: none, or nobody said."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Steps of how many they are: (second, number from then on)."""
    iterations: list[Iteration] = field(default_factory=list)
    """Rank 0's, in order."""
    profile: Profile | None = None
    """The first one: standalone, on temporary aggregators."""
    windows: list[MonitorWindow] = field(default_factory=list)
    facts: list[tuple[float, str, dict[str, str]]] = field(default_factory=list)
    reported: int = 0
    cpu_s: float = 0.0
    """CPU seconds that aggregators spent on it, as they account for them."""

    def hold(self, allocation: NodeAllocation, now_s: float) -> None:
        """Note what it holds from now on."""
        self.allocation = allocation
        if held(allocation) != (self.sizes[-1][1] if self.sizes else 0):
            self.sizes.append((now_s, held(allocation)))

    @property
    def alone_s(self) -> float | None:
        """The iteration when nobody shares: the least of the profile and of all windows, because
        nobody is faster shared than alone. None: not profiled yet."""
        if self.profile is None:
            return None
        return min([self.profile.iteration_s, *(each.iteration_s for each in self.windows)])

    def speed(self, now_s: float, over_s: float = 5.0) -> float:
        """Iterations per second over the last `over_s` seconds (0 when none ended)."""
        recent = [i.duration_s for i in self.iterations[-200:] if i.at_s > now_s - over_s]
        return len(recent) / sum(recent) if recent and sum(recent) > 0 else 0.0


@dataclass
class Migration:
    id: str
    job: str
    cause: str
    buckets: int
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    started_s: float
    ended_s: float | None = None
    fact: str = "started"
    copied: int = 0


@dataclass
class Timeline:
    """`aggregators` and `required` are steps: (second, number from then on)."""

    started_s: float
    tracks: dict[str, JobTrack] = field(default_factory=dict)
    aggregators: list[tuple[float, int]] = field(default_factory=list)
    required: list[tuple[float, int]] = field(default_factory=list)
    allocations: list[AllocationEvent] = field(default_factory=list)
    migrations: dict[str, Migration] = field(default_factory=dict)
    heartbeats: dict[str, AggregatorHeartbeat] = field(default_factory=dict)
    events: list[tuple[float, Fact]] = field(default_factory=list)
    """Every fact heard (telemetry is none), by its second."""
    bytes_first: dict[tuple[str, int], int] = field(default_factory=dict)
    bytes_last: dict[tuple[str, int], int] = field(default_factory=dict)

    def expect(self, spec: JobSpec, now_s: float) -> None:
        """A job is about to be submitted: its facts are ours."""
        self.tracks[spec.id] = JobTrack(spec=spec, submitted_s=now_s)

    def observe(self, message: Message, now_s: float) -> None:
        if isinstance(message, FACTS):
            self.events.append((now_s, message))
        match message:
            case JobEvent():
                self._job(message, now_s)
            case AllocationEvent():
                self.allocations.append(message)
                self.aggregators.append((now_s, message.in_use))
            case MigrationEvent():
                self._migration(message, now_s)
            case TensorCopyDone():
                if (migration := self.migrations.get(message.migration)) is not None:
                    migration.copied += 1
            case JobProfiled():
                track = self.tracks.get(message.job)
                if track is not None and track.profile is None:
                    track.profile = message.profile
            case WindowMeasured():
                if (track := self.tracks.get(message.job)) is not None:
                    found = MonitorWindow(now_s, message.iterations, message.iteration_s)
                    track.windows.append(found)
            case IterationsObserved():
                self._iterations(message, now_s)
            case AggregatorHeartbeat():
                self._heartbeat(message)
            case TasksObserved(jobs=jobs):
                for spent in jobs:
                    if (track := self.tracks.get(spent.job)) is not None:
                        track.cpu_s += spent.cpu_s
            case _:
                raise AssertionError(f"a timeline does not observe {type(message).__name__}")

    def _job(self, event: JobEvent, now_s: float) -> None:
        track = self.tracks.get(event.job)
        if track is None:
            return
        track.facts.append((now_s, event.fact, event.detail))
        if track.ended_s is not None:
            return  # A fact that comes late does not revive it, and another run is another life.
        if event.cluster:
            track.cluster = event.cluster
        if event.fact in PLACED:
            track.aggregators = named(event.detail, "aggregators")
        if event.fact == "located" and track.placed_s is None:
            track.placed_s = now_s
            self._count_required(now_s)
        elif event.fact in ENDS:
            self.end(event.job, ENDS[event.fact], event.reason, now_s)
        elif event.fact in LIFE and event.attempt >= track.attempt:
            track.attempt, track.state = event.attempt, LIFE[event.fact]
            if track.state in WAITING_STATES:
                track.hold((), now_s)
            elif track.state == "running" and event.allocation:
                # One that starts may still wait for it; one that stops keeps it until the last of
                # its processes has ended.
                track.hold(event.allocation, now_s)

    def end(self, job: str, state: JobState, reason: str, now_s: float) -> None:
        track = self.tracks[job]
        if track.ended_s is None:
            track.state, track.reason, track.ended_s = state, reason, now_s
            track.hold((), now_s)
            self._count_required(now_s)

    def _count_required(self, now_s: float) -> None:
        servers = sum(
            track.spec.servers
            for track in self.tracks.values()
            if track.placed_s is not None and track.ended_s is None
        )
        self.required.append((now_s, servers))

    def _migration(self, event: MigrationEvent, now_s: float) -> None:
        if event.job not in self.tracks:
            return
        known = self.migrations.get(event.migration)
        if known is None:
            known = self.migrations[event.migration] = Migration(
                id=event.migration,
                job=event.job,
                cause=event.cause,
                buckets=len(event.buckets),
                sources=tuple(sorted(set(event.sources))),
                targets=tuple(sorted(set(event.targets))),
                started_s=now_s,
            )
        known.fact = event.fact
        if event.fact != "started":
            known.ended_s = now_s

    def _iterations(self, message: IterationsObserved, now_s: float) -> None:
        track = self.tracks.get(message.job)
        if track is None or message.rank != 0:
            return
        total_s = sum(message.durations_s)
        for offset, duration_s in enumerate(message.durations_s):
            number = message.first_iteration + offset
            if number <= track.reported:
                continue  # A repeated message.
            total_s -= duration_s
            track.iterations.append(Iteration(number, now_s - total_s, duration_s))
            track.reported = number

    def _heartbeat(self, message: AggregatorHeartbeat) -> None:
        self.heartbeats[message.id] = message
        key = (message.id, message.incarnation)
        moved = message.bytes_in + message.bytes_out
        self.bytes_first.setdefault(key, moved)
        self.bytes_last[key] = moved

    @property
    def bytes_moved(self) -> int:
        """The growth of the regions' own counters while this timeline watched."""
        return sum(last - self.bytes_first[key] for key, last in self.bytes_last.items())

    @property
    def in_use(self) -> int:
        return self.aggregators[-1][1] if self.aggregators else 0

    @property
    def required_now(self) -> int:
        return self.required[-1][1] if self.required else 0

    def ended(self) -> bool:
        return all(track.ended_s is not None for track in self.tracks.values())


def integral(steps: list[tuple[float, int]], until_s: float) -> float:
    """Area under steps, from the first to `until_s`: server-seconds."""
    ends_s = [*(at_s for at_s, _ in steps[1:]), until_s]
    return sum(
        level * max(0.0, min(end_s, until_s) - start_s)
        for (start_s, level), end_s in zip(steps, ends_s, strict=False)
    )
