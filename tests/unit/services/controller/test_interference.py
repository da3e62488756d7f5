"""Congested links: which ones are found, and what the controller's core does about them."""

from typing import Any

import pytest
from tests.unit.services.controller.harness import Harness, Pool, placed

from slackwater.schemas.base import AggregatorId, JobId, Ok
from slackwater.schemas.cluster import DeallocateAggregators
from slackwater.schemas.placement import Profile, ReleaseJob
from slackwater.schemas.telemetry import JobProfiled, LinkTimes, WindowMeasured
from slackwater.services.controller.interference import congested, slowdowns

MB = 1_000_000
USUAL = Profile(iteration_s=1.0, task_cpu_s=(), push_s_per_byte=1e-8, pull_s_per_byte=2e-8)


def link(id: str, push: float = 1.0, pull: float = 1.0, nbytes: int = MB) -> LinkTimes:
    """Times as long as usual, by direction."""
    return LinkTimes(
        aggregator=AggregatorId(id),
        pushed_bytes=nbytes,
        pushing_s=push * USUAL.push_s_per_byte * nbytes,
        pulled_bytes=nbytes,
        pulling_s=pull * USUAL.pull_s_per_byte * nbytes,
    )


# Congested links ----------------------------------------------------------------------------------


def test_the_worse_direction_counts_and_what_was_not_measured_does_not() -> None:
    links = [link("a1", push=1.0, pull=9.0), link("a2", push=3.0), link("a3", 50.0, 50.0, 1000)]
    found = slowdowns(USUAL, links)
    assert found == {"a1": pytest.approx(9.0), "a2": pytest.approx(3.0)}
    assert slowdowns(Profile(iteration_s=1.0, task_cpu_s=()), links) == {}


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        pytest.param({"a1": 1.2, "a2": 1.0}, set(), id="as-usual"),
        pytest.param({"a1": 9.0, "a2": 1.1}, {"a1"}, id="one-egress"),
        pytest.param({"a1": 9.0, "a2": 8.0, "a3": 1.0}, {"a1", "a2"}, id="two-of-three"),
        pytest.param({"a1": 9.0, "a2": 8.0}, set(), id="the-workers-own-link"),
        pytest.param({"a1": 9.0, "a2": 0.5}, {"a1"}, id="less-traffic-elsewhere"),
        pytest.param({"a1": 2.0}, {"a1"}, id="its-only-one"),
        pytest.param({"a1": 1.99}, set(), id="not-enough"),
        pytest.param({}, set(), id="shared-memory"),
    ],
)
def test_an_aggregator_is_congested_if_it_stands_out(
    factors: dict[AggregatorId, float], expected: set[str]
) -> None:
    assert set(congested(factors, 2.0)) == expected


# Moves --------------------------------------------------------------------------------------------


class Measured(Harness):
    """Jobs whose transfers are measured."""

    profiled_workers = 0

    def profile(
        self, id: str, costs_s: list[float], iteration_s: float = 1.0, network_bytes: int = 0
    ) -> None:
        profile = Profile(
            iteration_s=iteration_s, task_cpu_s=tuple(costs_s), iterations=5,
            push_s_per_byte=USUAL.push_s_per_byte, pull_s_per_byte=USUAL.pull_s_per_byte,
            network_bytes=network_bytes, workers=self.profiled_workers,
        )  # fmt: skip
        self.see(JobProfiled(job=JobId(id), location_epoch=self.epoch_of(id), profile=profile))

    def epoch_of(self, id: str) -> int:
        return sum(place.location_epoch for place in self.stored[id].places)

    def window_with(self, id: str, iteration_s: float, *links: LinkTimes, workers: int = 0) -> None:
        self.pass_time(30)
        self.see(
            WindowMeasured(
                job=JobId(id), location_epoch=self.epoch_of(id), last_iteration=100,
                iterations=3, iteration_s=iteration_s, links=links, workers=workers,
            )
        )  # fmt: skip

    def congestions(self) -> list[str]:
        return [f"{fact.aggregator} {fact.fact}" for fact in self.told]


def lone(room: int = 2, **config: Any) -> Measured:
    """Job j alone on a0 and a1, of a pool of four of which `room` may be had."""
    harness = Measured(Pool(4, room=room), **config)
    harness.place("j", [0.02, 0.01, 0.005])
    assert harness.homes("j") == ["a0", "a1", "a0"]
    return harness


def test_without_a_spare_aggregator_the_others_take_the_congested_ones_aggregations() -> None:
    """Appendix D: no additional aggregator; what is left of two delivers."""
    harness = lone()
    harness.window_with("j", 9.0, link("a0", pull=16.0), link("a1"))
    harness.migrated("j")
    assert harness.homes("j") == ["a1", "a1", "a1"]
    assert harness.stored["j"].cause == "interfered"
    assert "interfered" in harness.said("j")
    assert harness.congestions() == ["a0 congested"]


def test_with_a_spare_one_a_lone_job_keeps_as_many_as_it_asked_for() -> None:
    harness = lone(room=3)
    harness.window_with("j", 9.0, link("a0", pull=16.0), link("a1"))
    harness.migrated("j")
    assert harness.homes("j") == ["a2", "a1", "a2"]


def test_above_the_limit_nothing_moves_whatever_the_link_does() -> None:
    """The paper's VGG19 with two background flows: 93 % of its speed is left."""
    harness = lone()
    harness.window_with("j", 1.0 / 0.93, link("a0", pull=3.0), link("a1"))
    assert not harness.stored["j"].target
    assert harness.congestions() == []


def test_slow_iterations_on_good_links_are_not_taken_for_congestion() -> None:
    harness = lone()
    harness.window_with("j", 9.0, link("a0", pull=1.5), link("a1"))
    assert not harness.stored["j"].target
    assert harness.congestions() == []


def test_it_can_be_switched_off() -> None:
    harness = lone(congested_at=0.0)
    harness.window_with("j", 9.0, link("a0", pull=16.0), link("a1"))
    assert not harness.stored["j"].target


def test_a_congested_aggregator_is_kept_from_everybody_until_it_was_not_seen_for_a_while() -> None:
    """Given back at once it would be lent to the next job, or to this one again."""
    harness = lone(room=4, congestion_s=100.0, resync_s=5.0)
    harness.window_with("j", 9.0, link("a0", pull=16.0), link("a1"))
    harness.migrated("j")
    harness.pass_time(20)
    assert "a0" in harness.pool.records
    harness.place("k", [0.001, 0.001])
    assert "a0" not in harness.homes("k")
    harness.pass_time(100)
    assert harness.congestions() == ["a0 congested", "a0 cleared"]
    assert "a0" not in harness.pool.records
    given_back = [m.aggregators for m in harness.sent if isinstance(m, DeallocateAggregators)]
    assert ("a0",) in given_back


def test_a_job_that_has_grown_is_no_sign_of_congestion() -> None:
    """Its own workers share the link that it was profiled on with fewer."""
    harness = Measured(Pool(4, room=2))
    harness.profiled_workers = 2
    harness.place("j", [0.02, 0.01, 0.005])
    harness.window_with("j", 9.0, link("a0", pull=16.0), link("a1"), workers=8)
    assert harness.congestions() == []
    harness.window_with("j", 9.0, link("a0", pull=16.0), link("a1"), workers=2)
    assert harness.congestions() == ["a0 congested"]


def test_a_new_job_begins_behind_a_congested_link_where_there_is_no_other() -> None:
    """It waited for five minutes, and its program gave up after two."""
    harness = Measured(Pool(1, room=1), unprofiled_after_s=10.0)
    harness.place("j", [0.02])
    harness.window_with("j", 9.0, link("a0", pull=16.0))
    assert harness.congestions() == ["a0 congested"]
    harness.ask(ReleaseJob(job=JobId("j")))
    harness.pass_time(5)
    assert harness.ask(placed("k", 2, servers=1)) == Ok()
    harness.pass_time(5)
    assert harness.stored["k"].phase == "waiting", "it may be good again soon"
    harness.pass_time(10)
    assert harness.homes("k") == ["a0", "a0"]


def test_windows_that_still_show_it_keep_it_congested() -> None:
    """A neighbour whose speed is above the limit stays, and its windows tell of the link."""
    harness = lone(room=4, congestion_s=100.0)
    harness.place("k", [0.001, 0.001])
    assert set(harness.homes("k")) <= {"a0", "a1"}
    home = harness.homes("k")[0]
    harness.window_with("j", 9.0, link(home, pull=16.0), link("a1" if home == "a0" else "a0"))
    harness.migrated("j")
    harness.pass_time(60)
    harness.window_with("k", 1.0, link(home, pull=16.0))
    harness.pass_time(60)
    assert harness.congestions() == [f"{home} congested"]
    assert harness.homes("k")[0] == home
    assert home not in harness.homes("j")


def test_a_remaining_aggregator_that_is_fuller_than_the_congestion_is_slow_takes_nothing() -> None:
    """By the model an iteration would take 1.4 s there; congested it takes 1.3 s."""
    harness = Measured(Pool(4, room=2))
    harness.place("j", [0.07, 0.07])
    assert harness.homes("j") == ["a0", "a1"]
    harness.window_with("j", 1.3, link("a0", pull=4.0), link("a1"))
    assert not harness.stored["j"].target
    assert "elsewhere an iteration would take 1.4 s" in harness.stored["j"].reason
    harness.pass_time(400)
    harness.window_with("j", 6.0, link("a0", pull=30.0), link("a1"))
    harness.migrated("j")
    assert harness.homes("j") == ["a1", "a1"]


def test_a_job_does_not_flee_for_ever() -> None:
    """Wherever it goes its link is slow: after `reverts_max` times in a row it stays."""
    harness = lone(room=4, reverts_max=2)
    for _ in range(4):
        home = harness.homes("j")[0]
        harness.window_with("j", 9.0, link(home, pull=16.0), link("a9"))
        harness.migrated("j")
    assert harness.said("j").count("interfered") == 2


def test_a_restarted_controller_learns_of_links_again() -> None:
    harness = lone()
    harness.window_with("j", 9.0, link("a0", pull=16.0), link("a1"))
    harness.migrated("j")
    harness.restart()
    assert harness.homes("j") == ["a1", "a1", "a1"]
    assert harness.core.state.aggregators[AggregatorId("a0")].congested_s is None
