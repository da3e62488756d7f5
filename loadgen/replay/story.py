"""Events that an onlooker should notice in a replay, in sentences: those of the paper's case study
(Gu et al. 2021, figure 10), told from the timeline. Pure."""

from dataclasses import dataclass, field
from typing import Final, Literal

from slackwater.common.base.words import number_of
from slackwater.common.domains.facts import sentences
from slackwater.common.domains.facts.timeline import UNDONE, Migration, Timeline
from slackwater.loadgen.replay.measures import LOSS_LIMIT
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.placement import MigrationEvent

Kind = Literal[
    "arrival", "shared", "slow-down", "reverted", "relieved", "added", "released", "gpus", "exit"
]
LABELS: Final[dict[Kind, str]] = {
    "arrival": "job arrives",
    "shared": "job gets its place",
    "slow-down": "slow-down found",
    "reverted": "job moved away",
    "relieved": "speed is back",
    "added": "aggregator added",
    "released": "aggregator released",
    "gpus": "job gets or gives up its GPUs",
    "exit": "job ends",
}
"""In the order of figure 10; GPUs are ours."""
_TURNS: Final = frozenset({"running", "stopping", "paused", "held", "released", "resized"})
"""Facts of a job that gets, gives up or changes its GPUs."""


@dataclass(frozen=True, slots=True)
class Happening:
    at_s: float
    kind: Kind
    text: str
    job: str = ""
    """The job that it happened to; empty: the pool."""


@dataclass
class _StoryWriter:
    """Walks through the facts in order."""

    timeline: Timeline
    told: list[Happening] = field(default_factory=list)

    def tell(self, at_s: float, kind: Kind, text: str, job: str = "") -> None:
        self.told.append(Happening(at_s, kind, text, job))

    def of_job(self, fact: JobEvent, at_s: float) -> None:
        if fact.fact == "assigned" and fact.detail.get("cause") == "profiled":
            self.tell(at_s, "shared", sentences.sentence(fact), fact.job)
        elif fact.fact in UNDONE:
            self.tell(at_s, "slow-down", sentences.loss(fact, LOSS_LIMIT), fact.job)
        elif fact.fact in _TURNS and self.timeline.tracks[fact.job].spec.gpus:
            self.tell(at_s, "gpus", sentences.sentence(fact), fact.job)

    def moved(self, migration: Migration) -> None:
        if migration.cause not in UNDONE or migration.fact != "finished":
            return
        assert migration.ended_s is not None
        text = sentences.migration(
            migration.job, migration.fact, migration.sources, migration.targets
        )
        self.tell(migration.ended_s, "reverted", text, migration.job)

    def of_pool(self, fact: AllocationEvent, at_s: float) -> None:
        """Temporary aggregators of profiling come and go unmentioned."""
        if fact.temporary_for:
            return
        if fact.fact == "allocated":
            self.tell(at_s, "added", sentences.allocation(fact))
        elif fact.fact == "released":
            self.tell(at_s, "released", sentences.allocation(fact))

    def relieved(self) -> None:
        """The first window that a job measured after it was moved says what that did for it."""
        for migration in self.timeline.migrations.values():
            track = self.timeline.tracks[migration.job]
            if migration.cause not in UNDONE or migration.ended_s is None or not track.alone_s:
                continue
            for window in track.windows:
                if window.begun_s >= migration.ended_s:
                    lost = 1.0 - track.alone_s / window.iteration_s
                    text = f"{migration.job} loses {max(0.0, lost):.1%} since it was moved"
                    self.tell(window.at_s, "relieved", text, migration.job)
                    break


def story(timeline: Timeline) -> list[Happening]:
    """Tell what happened, by time."""
    teller = _StoryWriter(timeline)
    for id, track in timeline.tracks.items():
        spec = track.spec
        asked = number_of(spec.servers, "server")
        asked += f" and {number_of(spec.gpus, 'GPU')}" if spec.gpus else ""
        text = f"{id} arrives: {number_of(spec.workers, 'worker')}, asks for {asked}"
        teller.tell(track.submitted_s, "arrival", text, id)
    for at_s, fact in timeline.events:
        match fact:
            case JobEvent() if fact.job in timeline.tracks:
                teller.of_job(fact, at_s)
            case AllocationEvent():
                teller.of_pool(fact, at_s)
            case MigrationEvent() if fact.fact != "started" and fact.job in timeline.tracks:
                teller.moved(timeline.migrations[fact.migration])
    for id, track in timeline.tracks.items():  # Its fact may have been lost: the master knows.
        if track.ended_s is not None:
            text = sentences.ended(id, track.state, track.reason, track.reported)
            teller.tell(track.ended_s, "exit", text, id)
    teller.relieved()
    return sorted(teller.told, key=lambda each: each.at_s)
