"""Transfer times on their way from Agents into profiles and windows."""

from typing import Any

from slackwater.common.base.effects import Effect, Observed, Publish
from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.telemetry import (
    IterationsObserved,
    JobProfiled,
    LinkTimes,
    TaskCost,
    TasksObserved,
    WindowMeasured,
)
from slackwater.services.profiler.config import ProfilerConfig
from slackwater.services.profiler.core import Profiler

JOB = JobId("j")


def link(id: str, pull_s: float, nbytes: int = 1000) -> LinkTimes:
    return LinkTimes(
        aggregator=AggregatorId(id),
        pushed_bytes=nbytes,
        pushing_s=0.5,
        pulled_bytes=nbytes,
        pulling_s=pull_s,
    )


def profiler() -> Profiler:
    made = Profiler(ProfilerConfig(warm_up_iterations=0, profile_iterations=5, window_iterations=5))
    task = TaskCost(job=JOB, bucket=0, executions=3, cpu_s=0.01, nbytes=8)
    told = TasksObserved(aggregator=AggregatorId("a"), period_s=1.0, tasks=(task,))
    made.step(Observed("", told), 0.0)
    return made


def report(made: Profiler, first: int, count: int, *links: LinkTimes, epoch: int = 2) -> list[Any]:
    message = IterationsObserved(
        job=JOB, rank=0, first_iteration=first, durations_s=(1.0,) * count, location_epoch=epoch,
        bytes_pushed=0, bytes_pulled=0, workers=1, buckets=1, links=links,
    )  # fmt: skip
    effects: list[Effect] = list(made.step(Observed("", message), 0.0))
    return [effect.message for effect in effects if isinstance(effect, Publish)]


def test_the_profile_takes_the_usual_link_for_its_yardstick_not_the_congested_one() -> None:
    made = profiler()
    said = report(made, 1, 5, link("a1", 1.0), link("a2", 30.0), link("a3", 1.2))
    (fact,) = [message for message in said if isinstance(message, JobProfiled)]
    assert fact.profile.pull_s_per_byte == 1.2e-3
    assert fact.profile.push_s_per_byte == 0.5e-3


def test_a_window_says_what_went_since_the_last_one() -> None:
    made = profiler()
    report(made, 1, 4, link("a1", 1.0))
    (first,) = [m for m in report(made, 5, 1, link("a1", 2.0)) if isinstance(m, WindowMeasured)]
    assert [(each.pulled_bytes, each.pulling_s) for each in first.links] == [(2000, 3.0)]
    later = [m for m in report(made, 6, 10, link("a1", 9.0)) if isinstance(m, WindowMeasured)]
    assert [window.links[0].pulling_s for window in later] == [9.0, 9.0]


def test_what_a_rank_says_first_of_a_new_placement_is_partly_of_the_old_one() -> None:
    made = profiler()
    report(made, 1, 5, link("a1", 1.0))
    report(made, 6, 3, link("a1", 50.0), epoch=3)
    said = report(made, 9, 5, link("a2", 2.0), epoch=3)
    (window,) = [message for message in said if isinstance(message, WindowMeasured)]
    assert [each.aggregator for each in window.links] == ["a2"]
