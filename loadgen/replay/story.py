"""What an onlooker should notice in a replay: the events of the paper's case study (Gu et al. 2021,
figure 10), told from the timeline. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

from slackwater.loadgen.replay.timeline import Timeline
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.jobs import JobEvent

Kind = Literal["arrival", "shared", "slow-down", "reverted", "added", "released", "exit"]
LABELS: Final[dict[Kind, str]] = {
    "arrival": "job arrives",
    "shared": "placed on shared aggregators",
    "slow-down": "slow-down found",
    "reverted": "assignment reverted",
    "added": "aggregator added",
    "released": "aggregator released",
    "exit": "job ends",
}
"""In the order of figure 10."""


@dataclass(frozen=True, slots=True)
class Happening:
    at_s: float
    kind: Kind
    text: str


def story(timeline: Timeline) -> list[Happening]:
    """By time. Temporary aggregators of profiling come and go unmentioned."""
    told: list[Happening] = []
    for id, track in timeline.tracks.items():
        told.append(Happening(track.submitted_s, "arrival", f"{id} arrives"))
        if track.ended_s is not None:
            told.append(Happening(track.ended_s, "exit", f"{id} {track.state}"))
    for at_s, fact in timeline.events:
        if isinstance(fact, JobEvent) and fact.job in timeline.tracks:
            told += _of_job(fact, at_s)
        elif isinstance(fact, AllocationEvent) and not fact.temporary_for:
            told += _of_pool(fact, at_s)
    for migration in timeline.migrations.values():
        if migration.cause in ("reverted", "expanded") and migration.fact == "finished":
            assert migration.ended_s is not None
            where = ", ".join(migration.targets)
            text = f"{migration.job}: {migration.cause}, now on {where}"
            told.append(Happening(migration.ended_s, "reverted", text))
    return sorted(told, key=lambda each: each.at_s)


def _of_job(fact: JobEvent, at_s: float) -> list[Happening]:
    detail = fact.detail
    match fact.fact:
        case "assigned" if detail.get("cause") == "profiled":
            text = f"{fact.job} placed on {detail.get('aggregators', '').replace(',', ', ')}"
            return [Happening(at_s, "shared", text)]
        case "reverted" | "expanded":
            lost = float(detail.get("loss", "0"))
            text = f"{detail.get('loser', fact.job)} lost {lost:.1%}: {fact.job} must go"
            return [Happening(at_s, "slow-down", text)]
    return []


def _of_pool(fact: AllocationEvent, at_s: float) -> list[Happening]:
    if fact.fact == "allocated":
        return [Happening(at_s, "added", f"{fact.aggregator} added")]
    if fact.fact == "released":
        return [Happening(at_s, "released", f"{fact.aggregator} released")]
    return []
