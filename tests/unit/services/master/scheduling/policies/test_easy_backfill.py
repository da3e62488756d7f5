"""Backfilling: who may go first, and that nobody's promise is broken.

`test_reference.py` compares whole runs with the textbook's algorithm.
"""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.schemas.base import JobId, NodeId
from slackwater.services.master.scheduling.policies.easy_backfill import EasyBackfill, _Tentative
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.scheduler import Scheduler
from slackwater.services.master.scheduling.view import (
    Allocation,
    ClusterView,
    JobView,
    NodeView,
    Rules,
    View,
)


def job(
    id: str, number: int, gpus: int, limit_s: float = inf, held: Allocation = (), **fields: object
) -> JobView:
    return JobView(
        id=JobId(id), number=number, submitted_s=0.0, gpus=gpus, gpus_min=gpus, gpus_max=gpus,
        limit_s=limit_s, allocation=held, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def view(*jobs: JobView, gpus: tuple[int, ...] = (4, 4), now_s: float = 0.0) -> View:
    nodes = tuple(NodeView(n, NodeId(f"n{n}"), count) for n, count in enumerate(gpus))
    free = list(gpus)
    for each in jobs:
        for node, count in each.allocation:
            free[node] -= count
    cluster = ClusterView(nodes, sum(gpus), node_gpus_max=max(gpus))
    return View(now_s, cluster, {each.id: each for each in jobs}, free)


def started(*jobs: JobView, now_s: float = 0.0) -> dict[str, Allocation]:
    return dict(Scheduler(EasyBackfill()).decide(view(*jobs, now_s=now_s)).start)


RUNS = job("runs", 0, 4, limit_s=100.0, held=((0, 4),))
FIRST = job("first", 1, 8, limit_s=50.0)


def test_a_job_that_ends_in_time_goes_first() -> None:
    assert started(RUNS, FIRST, job("short", 2, 2, limit_s=100.0)) == {"short": ((1, 2),)}
    assert started(RUNS, FIRST, job("long", 2, 2, limit_s=100.5)) == {}


def test_a_long_job_goes_first_where_it_leaves_room_for_the_first() -> None:
    six = job("first", 1, 6, limit_s=50.0)
    fits, not_beside = job("two", 2, 2, limit_s=1e6), job("one", 3, 1, limit_s=1e6)
    assert started(RUNS, six, fits, not_beside) == {"two": ((1, 2),)}


def test_without_a_limit_of_what_runs_nobody_is_passed() -> None:
    forever = job("runs", 0, 4, held=((0, 4),))
    short = job("short", 2, 1, limit_s=1.0)
    assert started(forever, FIRST, short) == {}
    (first, second) = EasyBackfill().explain(view(forever, FIRST, short), None)
    assert (first.job, second.job) == ("first", "short")
    assert "a job that runs has no time limit" in second.text


def test_a_job_that_nothing_can_hold_is_passed_by_all() -> None:
    huge = job("huge", 1, 9, limit_s=50.0)
    assert started(RUNS, huge, job("long", 2, 4, limit_s=1e6)) == {"long": ((1, 4),)}


def test_a_job_that_waits_is_told_the_promise_of_the_first() -> None:
    long = job("long", 2, 2, limit_s=1e6)
    (_, second) = EasyBackfill().explain(view(RUNS, FIRST, long, now_s=40.0), None)
    assert second.text == (
        "waits behind job first, which starts in 60 s at the latest; this one does not fit, or "
        "would be in its way then"
    )


def test_priorities_decide_who_is_first() -> None:
    urgent = job("urgent", 3, 8, limit_s=10.0, priority=5)
    short = job("short", 2, 2, limit_s=100.0)
    found = EasyBackfill().explain(view(RUNS, FIRST, short, urgent), None)
    assert found[0].job == "urgent"


def test_quotas_hold_by_each_tenant_s_part() -> None:
    rules = Rules(quotas={"a": 4, "b": 4}, borrowing=False)
    jobs = (
        job("a0", 0, 3, limit_s=100.0, held=((0, 3),), tenant="a"),
        job("a1", 1, 4, limit_s=10.0, tenant="a"),
        job("a2", 2, 1, limit_s=10.0, tenant="a"),
        job("b1", 3, 4, limit_s=10.0, tenant="b"),
    )
    decision = Scheduler(make("easy-backfill"), rules).decide(view(*jobs))
    assert set(decision.start) == {"a2", "b1"}


drawn = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 8), st.integers(1, 300)), min_size=1, max_size=30
)


@settings(max_examples=80)
@given(jobs=drawn, nodes=st.sampled_from([(8,), (4, 4), (3, 3, 2)]))
def test_no_job_starts_later_than_it_was_promised(
    jobs: list[tuple[int, int, int]], nodes: tuple[int, ...]
) -> None:
    """Each decision's reservation of its first job, against when that job started."""
    promises: dict[JobId, float] = {}

    class Noted(EasyBackfill):
        def explain_first(self, seen: View, queues: object) -> None:
            waiting = [j for j in self.in_order(seen, queues) if not j.allocation]  # type: ignore[arg-type]
            if waiting:
                at_s, _ = _Tentative(seen, self.consolidate).reservation(waiting[0])
                known = promises.setdefault(waiting[0].id, at_s)
                assert at_s <= known, "a promise was moved"

        def allocate(self, seen: View, memory: object):  # type: ignore[no-untyped-def]
            plan, queues = super().allocate(seen, memory)
            after = dict(seen.jobs)
            free = list(seen.free)
            for id, allocation in plan.allocations.items():
                moved = after[id].moved(allocation, seen.now_s)
                after[id] = replace(moved, speed=1.0, ready_s=seen.now_s)
                for node, gpus in allocation:
                    free[node] -= gpus
            self.explain_first(View(seen.now_s, seen.cluster, after, free), queues)
            return plan, queues

    sim = [
        submission(i, submit_s=s, gpus=g, duration_s=d) for i, (s, g, d) in enumerate(sorted(jobs))
    ]
    result = Engine(sim, Cluster([(gpus, "") for gpus in nodes]), Noted(), FixedModel()).run()
    started_s = {outcome.job.spec.id: outcome.start_s for outcome in result.outcomes}
    for id, at_s in promises.items():
        assert started_s[id] <= at_s
