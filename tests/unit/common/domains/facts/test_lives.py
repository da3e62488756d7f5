"""Facts folded into lives of jobs: stretches, speeds, moves, levels of the pools; all bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.common.domains.facts import lives as lives_of
from slackwater.common.domains.facts.lives import Lives, Points
from slackwater.common.domains.facts.timeline import ENDS, LIFE
from slackwater.schemas.base import AggregatorId, JobId, NodeId
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.memory import LenderId, SlabEvent, SlabId
from slackwater.schemas.placement import MigrationEvent, Profile
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured


def told(lives: Lives, job: str, fact: str, at_s: float, held: int = 0, **detail: str) -> None:
    allocation = ((NodeId("n1"), held),) if held else ()
    event = JobEvent(
        job=JobId(job), fact=fact, at_s=at_s, allocation=allocation, detail=detail, reason="why"
    )
    assert lives.tell(event, at_s) == job


def a_life() -> Lives:
    lives = Lives()
    told(lives, "a", "pending", 1.0, servers="2", gpus="4", tenant="vision")
    told(lives, "a", "starting", 3.0, 4)
    told(lives, "a", "running", 4.0, 4)
    told(lives, "a", "located", 5.0, aggregators="a1,a2")
    told(lives, "a", "stopping", 10.0, 4)
    told(lives, "a", "paused", 11.0)
    told(lives, "a", "running", 15.0, 8)
    told(lives, "a", "completed", 20.0)
    return lives


def test_a_life_is_told_in_stretches() -> None:
    life = a_life().jobs["a"]
    assert [(each.state, each.from_s, each.to_s, each.held) for each in life.stretches] == [
        ("pending", 1.0, 3.0, 0),
        ("starting", 3.0, 4.0, 4),
        ("running", 4.0, 10.0, 4),
        ("stopping", 10.0, 11.0, 4),
        ("paused", 11.0, 15.0, 0),
        ("running", 15.0, 20.0, 8),
        ("completed", 20.0, 20.0, 0),
    ]
    assert (life.tenant, life.gpus, life.servers, life.aggregators) == (
        "vision", 4, 2, ("a1", "a2"),
    )  # fmt: skip
    assert life.spent_s(("pending", "paused"), 99.0) == 6.0
    assert life.held_s(99.0) == 4 * 8.0 + 8 * 5.0
    assert (life.state, life.ended_s, life.served) == ("completed", 20.0, [(5.0, 20.0)])


def test_a_late_fact_revives_no_ended_job_and_a_rerun_does() -> None:
    lives = a_life()
    told(lives, "a", "running", 21.0, 4)
    assert lives.jobs["a"].state == "completed"
    told(lives, "a", "pending", 30.0)
    told(lives, "a", "running", 31.0, 2)
    life = lives.jobs["a"]
    assert (life.state, life.ended_s, life.submitted_s) == ("running", None, 1.0)
    told(lives, "a", "cancelled", 32.0)
    told(lives, "a", "deleted", 33.0)
    told(lives, "a", "pending", 40.0)
    assert [each.from_s for each in lives.jobs["a"].stretches] == [40.0], "another job of that id"


def test_speed_is_told_against_the_profile() -> None:
    lives = a_life()
    window = WindowMeasured(
        job=JobId("a"), location_epoch=1, last_iteration=9, iterations=5, iteration_s=0.5
    )
    lives.tell(window, 12.0)
    assert lives.jobs["a"].speeds() == [], "it was not profiled"
    profile = Profile(iterations=8, iteration_s=0.4, task_cpu_s=(0.1,))
    assert lives.tell(JobProfiled(job=JobId("a"), location_epoch=1, profile=profile), 13.0) == "a"
    assert lives.jobs["a"].speeds() == [(12.0, pytest.approx(0.8))]
    assert lives.tell(JobProfiled(job=JobId("b"), location_epoch=1, profile=profile), 1.0) is None


@pytest.mark.parametrize(("fact", "done"), [("finished", True), ("cancelled", False)])
def test_moves_end_as_they_ended(fact: str, done: bool) -> None:
    lives = a_life()
    for name, at_s in (("started", 6.0), (fact, 7.0)):
        event = MigrationEvent(
            migration="m", job=JobId("a"), fact=name, cause="reverted", buckets=(0, 1),  # type: ignore[arg-type]
            sources=(AggregatorId("a1"),) * 2, targets=(AggregatorId("a4"),) * 2, at_s=at_s,
        )  # fmt: skip
        assert lives.tell(event, at_s) == "a"
    (move,) = lives.jobs["a"].moves
    assert (move.sources, move.targets, move.ended_s, move.done) == (("a1",), ("a4",), 7.0, done)


def test_levels_of_the_pools() -> None:
    lives = a_life()
    for at_s, in_use in ((2.0, 1), (6.0, 2)):
        lives.tell(
            AllocationEvent(
                aggregator=AggregatorId("a1"), fact="allocated", cluster=None, in_use=in_use,
                at_s=at_s,
            ),
            at_s,
        )  # fmt: skip
    assert lives.used.points == [(2.0, 1), (6.0, 2)]
    for at_s, fact in ((1.0, "lent"), (2.0, "lent"), (3.0, "evicted"), (4.0, "returned")):
        slab = SlabEvent(
            slab=SlabId("0123456789ab"), fact=fact, lender=LenderId("s1"), device="d", span=0,  # type: ignore[arg-type]
            at_s=at_s,
        )  # fmt: skip
        lives.tell(slab, at_s)
    assert lives.lent["s1"].points == [(1.0, 1.0), (3.0, 0.0)], "each change counts once"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives_of, "JOBS_MAX", 3)
    monkeypatch.setattr(lives_of, "STRETCHES_MAX", 4)
    lives = Lives()
    for id in "abcde":
        told(lives, id, "pending", 1.0)
        if id != "a":
            told(lives, id, "failed", 2.0)
    assert set(lives.jobs) == {"a", "d", "e"}, "ended ones are forgotten first, the oldest first"
    for at in range(20):
        told(lives, "a", "running" if at % 2 else "paused", 3.0 + at, 1)
    assert len(lives.jobs["a"].stretches) == 4
    points = Points(8)
    for at in range(100):
        points.add(float(at), float(at))
    assert len(points.points) <= 8
    assert points.points == sorted(points.points)
    assert points.points[-1] == (99.0, 99.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from([*LIFE, *ENDS, "located", "assigned", "waiting", "deleted", "window"]),
            st.integers(0, 8),
            st.floats(0.0, 5.0),
        ),
        max_size=60,
    )
)
def test_stretches_follow_each_other(
    facts: list[tuple[str, str, int, float]],
) -> None:
    lives, at_s = Lives(), 0.0
    for job, fact, gpus, after_s in facts:
        at_s += after_s
        told(lives, job, fact, at_s, gpus, servers="2", aggregators="a1")
    for life in lives.jobs.values():
        for former, latter in zip(life.stretches, life.stretches[1:], strict=False):
            assert former.to_s is not None
            assert former.from_s <= former.to_s <= latter.from_s
        assert life.held_s(at_s) >= 0.0
        for from_s, to_s in life.served:
            assert from_s <= to_s
