"""An aggregator that its supervisor starts anew is waited for; one that was given up is not."""

from tests.unit.services.controller.harness import Harness, Pool, placed

from slackwater.schemas.base import AggregatorId, JobId, Ok, Refused
from slackwater.schemas.cluster import AggregatorHeartbeat, AggregatorLost, AggregatorRestarts
from slackwater.schemas.placement import HostBuckets
from slackwater.services.controller import hosting

A0 = AggregatorId("a0")


def trained(**config: float) -> Harness:
    """A job on a0 and a1; a0 was killed."""
    harness = Harness(Pool(4), rehost_after_s=15.0, **config)
    harness.place("j", [0.02, 0.01])
    harness.pass_time(1)
    assert harness.homes("j") == ["a0", "a1"]
    harness.pool.dead.add(A0)
    return harness


def restarting(harness: Harness, restarts: int, given_up: bool = False) -> None:
    harness.see(AggregatorRestarts(aggregator=A0, restarts=restarts, given_up=given_up))


def crash_loop(harness: Harness, seconds: int) -> None:
    """Killed every 3.5 s, each time before its first heartbeat."""
    for second in range(seconds):
        restarting(harness, 1 + int(second / 3.5))
        harness.pass_time(1, "a0")


def test_a_crash_loop_of_a_minute_keeps_what_the_aggregator_holds() -> None:
    harness = trained()
    crash_loop(harness, 60)
    assert harness.homes("j") == ["a0", "a1"]
    harness.pool.dead.discard(A0)
    harness.pool.incarnations[A0] += 18
    harness.pass_time(3)
    assert harness.homes("j") == ["a0", "a1"]
    assert harness.waiting() == {}
    assert "rehosted" not in harness.said("j")
    assert [place.location_epoch for place in harness.stored["j"].places] == [1, 1]
    assert harness.pool.held[A0] == {(JobId("j"), 0): 1}


def test_the_job_says_what_it_waits_for_meanwhile() -> None:
    harness = trained()
    crash_loop(harness, 8)
    why = "waits for aggregator a0, which is being restarted (3rd time)"
    assert harness.waiting() == {"j": why}


def test_a_job_says_that_an_aggregator_is_silent_where_no_supervisor_speaks() -> None:
    harness = trained()
    harness.pass_time(9, "a0")
    (why,) = harness.waiting().values()
    assert why.startswith("waits for aggregator a0, silent for 11 s; what is there begins anew")


def test_a_supervisor_that_gave_up_ends_the_wait_at_once() -> None:
    harness = trained()
    crash_loop(harness, 40)
    restarting(harness, 21, given_up=True)
    harness.pass_time(1, "a0")
    assert harness.homes("j") == ["a2", "a1"]
    assert "rehosted" in harness.said("j")


def test_an_operator_that_knows_better_ends_the_wait_at_once() -> None:
    """An operator's order is refused for an aggregator that lives: it is to be drained."""
    harness = trained()
    answer = harness.ask(AggregatorLost(aggregator=AggregatorId("a1")))
    assert isinstance(answer, Refused)
    assert "`slackwater drain a1` empties it" in answer.reason
    crash_loop(harness, 4)
    assert harness.ask(AggregatorLost(aggregator=A0)) == Ok()
    harness.pass_time(1, "a0")
    assert harness.homes("j") == ["a2", "a1"]


def test_a_supervisor_that_says_no_more_is_gone_itself() -> None:
    """The whole machine ended: nothing of it comes back by itself."""
    harness = trained()
    crash_loop(harness, 30)
    harness.pass_time(14, "a0")
    assert harness.homes("j") == ["a0", "a1"]
    harness.pass_time(3, "a0")
    assert harness.homes("j") == ["a2", "a1"]


def test_an_aggregator_says_how_long_its_supervisor_tries() -> None:
    """systemd tells nobody, so the aggregator itself says it."""
    harness = trained()
    harness.see(
        AggregatorHeartbeat(
            service="aggregator", id=A0, incarnation=1, at_s=harness.now_s, node="n",
            cpu_share=0.1, addresses=(("shm", "a0"),), buckets=1, jobs=1, held_bytes=0,
            busy_s=0.0, bytes_in=0, bytes_out=0, restart_window_s=60.0,
        )
    )  # fmt: skip
    harness.pass_time(59, "a0")
    assert harness.homes("j") == ["a0", "a1"]
    harness.pass_time(4, "a0")
    assert harness.homes("j") == ["a2", "a1"]


def test_one_that_was_given_up_and_comes_back_serves_again() -> None:
    harness = trained()
    restarting(harness, 21, given_up=True)
    harness.pool.dead.discard(A0)
    harness.pool.incarnations[A0] += 1
    harness.beat()
    harness.pass_time(20)
    assert harness.homes("j") == ["a0", "a1"]
    assert harness.waiting() == {}


def test_what_begins_anew_of_a_profiled_job_is_where_it_stays() -> None:
    """Only what was in a temporary place goes to another one."""
    harness = trained()
    assert harness.stored["j"].temporary == ()
    restarting(harness, 21, given_up=True)
    harness.pass_time(1, "a0")
    assert harness.homes("j") == ["a2", "a1"]
    assert harness.stored["j"].temporary == ()
    assert harness.said("j")[-3:] == ["rehosted", "located", "steady"]


def test_an_aggregator_that_is_restarted_before_it_hosts_has_lost_nothing() -> None:
    """It is told again, of the same buckets at the same epoch."""
    harness = Harness(Pool(4))
    harness.hold = (HostBuckets,)
    assert harness.ask(placed("j", 2)) == Ok()
    harness.pass_time(3)
    harness.pool.incarnations[A0] += 1
    harness.pass_time(1)
    assert harness.stored["j"].phase == "hosting"
    assert [place.location_epoch for place in harness.stored["j"].places] == [1, 1]
    assert "rehosted" not in harness.said("j")


def test_a_job_without_temporary_places_is_profiled_where_it_begins() -> None:
    """The pool has one aggregator, which it shares from the start."""
    harness = Harness(Pool(1))
    harness.place("first", [0.02, 0.01])
    assert harness.ask(placed("j", 2)) == Ok()
    harness.pass_time(60)
    assert harness.stored["j"].temporary == ()
    assert harness.stored["j"].phase == "profiling"


def test_times_are_counted_as_in_english() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)
    said = "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th"
    assert " ".join(map(hosting._nth, numbers)) == said
