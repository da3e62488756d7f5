"""Jobs that wait for aggregators stand in line: nobody asks in vain, and whoever came first is
served first."""

from tests.unit.services.controller.harness import Harness, Pool, placed

from slackwater.common.base.effects import Observed
from slackwater.schemas.base import AggregatorId, ClusterId, JobId, Ok
from slackwater.schemas.cluster import AllocateAggregators, AllocationEvent
from slackwater.schemas.placement import ReleaseJob
from slackwater.services.controller.waiting_jobs import TRIED_AT_ONCE


def full(room: int, patience_s: float = 1e6, **config: object) -> Harness:
    """`room` aggregators, all of them a job's for its profiling."""
    harness = Harness(Pool(room + 4, room=room), unprofiled_after_s=patience_s, **config)
    for number in range(room):
        assert harness.ask(placed(f"first{number}", 2, servers=1)) == Ok()
    return harness


def wait(harness: Harness, *jobs: tuple[str, int]) -> None:
    """Jobs that need so many aggregators, in that order."""
    for id, servers in jobs:
        harness.tick(0.1)
        assert harness.ask(placed(id, 2, servers=servers)) == Ok()


def asked(harness: Harness) -> int:
    return sum(isinstance(message, AllocateAggregators) for message in harness.sent)


def phases(harness: Harness, *jobs: str) -> list[str]:
    return [harness.stored[id].phase for id in jobs]


def end(harness: Harness, *jobs: str) -> None:
    for id in jobs:
        harness.ask(ReleaseJob(job=id))


def test_nobody_asks_while_nothing_is_different() -> None:
    harness = full(2)
    wait(harness, *((f"w{n}", 1 + n % 3) for n in range(30)))
    harness.sent.clear()
    harness.pass_time(60)
    looks = 60 / harness.config.retry_s
    assert asked(harness) <= looks + 4, "one for all of them, now and then"
    assert set(phases(harness, "w0", "w29")) == {"waiting"}


def test_jobs_of_a_policy_that_does_not_adapt_do_not_poll_either() -> None:
    harness = full(2, 20.0, policy="static")
    wait(harness, *((f"w{n}", 1) for n in range(30)))
    harness.sent.clear()
    harness.pass_time(60)
    assert asked(harness) <= 60 / harness.config.retry_s + 4


def test_who_came_first_is_served_first() -> None:
    harness = full(4)
    wait(harness, ("b", 2), ("a", 2))
    end(harness, "first0", "first1")
    harness.pass_time(1)
    assert phases(harness, "b", "a") == ["profiling", "waiting"]
    end(harness, "first2", "first3")
    harness.pass_time(1)
    assert phases(harness, "a") == ["profiling"]


def test_who_needs_fewer_does_not_wait_for_who_needs_more() -> None:
    harness = full(3)
    wait(harness, ("large", 3), ("equal", 3), ("small", 1), ("next", 1))
    harness.sent.clear()
    end(harness, "first0")
    assert phases(harness, "large", "equal", "small", "next") == [
        "waiting", "waiting", "profiling", "waiting",
    ]  # fmt: skip
    assert asked(harness) <= 4, "each number once, and what the answers led to"


def test_an_aggregator_that_another_cluster_gives_back_is_asked_for_at_once() -> None:
    harness = full(2)
    wait(harness, ("w", 1))
    harness.pool.room += 1
    fact = AllocationEvent(
        aggregator=AggregatorId("a3"), fact="released", cluster=ClusterId("c1"), in_use=2, at_s=1.0
    )
    harness.step(Observed("", fact))
    assert phases(harness, "w") == ["profiling"]


def test_a_new_aggregator_is_asked_for_at_once() -> None:
    harness = full(2)
    wait(harness, ("w", 1))
    harness.pool.room += 1
    harness.pool.all.append(AggregatorId("a9"))
    harness.pool.held[AggregatorId("a9")] = {}
    harness.pool.incarnations[AggregatorId("a9")] = 1
    harness.beat("a9")
    assert phases(harness, "w") == ["profiling"]


def test_what_nobody_told_is_found_within_the_longest_wait() -> None:
    harness = full(2)
    wait(harness, ("w", 1))
    harness.pass_time(20)
    harness.pool.room += 1
    harness.pass_time(int(harness.config.retry_s) + 1)
    assert phases(harness, "w") == ["profiling"]


def test_the_line_is_the_same_after_a_restart() -> None:
    harness = full(3)
    wait(harness, ("c", 2), ("b", 2), ("a", 2))
    harness.restart()
    end(harness, "first0", "first1")
    harness.pass_time(1)
    assert phases(harness, "c", "b", "a") == ["profiling", "waiting", "waiting"]


def test_patience_ends_for_all_of_them_a_few_at_a_time() -> None:
    """Once a job shares an aggregator, whoever has waited long enough joins it there."""
    harness = full(2, 20.0)
    wait(harness, *((f"w{n}", 2) for n in range(30)))
    harness.profile("first0", [0.001, 0.001])
    harness.migrated("first0")
    harness.profile("first1", [0.001, 0.001])
    harness.migrated("first1")
    steps: list[int] = []
    before = harness.core.step

    def counted(event: object, now_s: float) -> object:
        waited = sum(job.record.phase == "waiting" for job in harness.core.state.jobs.values())
        effects = before(event, now_s)  # type: ignore[arg-type]
        still = sum(job.record.phase == "waiting" for job in harness.core.state.jobs.values())
        steps.append(waited - still)
        return effects

    harness.core.step = counted  # type: ignore[assignment]
    harness.pass_time(25)
    assert all(harness.stored[f"w{n}"].phase != "waiting" for n in range(30))
    assert max(steps) <= TRIED_AT_ONCE + 1, "with the one who was just answered"
    assert harness.core.state.jobs[JobId("w0")].pending is None
