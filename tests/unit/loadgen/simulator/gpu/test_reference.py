"""The engine with its heaps, buckets and memory against a slow program without any of them.

The reference keeps every active job in one list and, at every instant, re-sorts all of it, walks
it greedily and compares. It shares no code with the simulator.
"""

from dataclasses import dataclass
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.submissions import submission

from slackwater.loadgen.simulator.gpu.cluster import Cluster
from slackwater.loadgen.simulator.gpu.engine import Engine
from slackwater.loadgen.simulator.gpu.jobmodels.fixed import FixedModel
from slackwater.services.master.scheduling.registry import make
from slackwater.services.master.scheduling.view import Plan, View

POLICIES = ["fifo", "easy-backfill", "best-effort", "sf", "srtf", "srsf", "tiresias-las"]


@dataclass
class Row:
    number: int
    submit: int
    gpus: int
    left: int
    attained: int = 0
    running: bool = False
    first_start: float = inf
    end: int = -1
    stops: int = 0


def reference(
    jobs: list[tuple[int, int, int]], gpus: int, policy: str, limits: tuple[int, ...] = ()
) -> tuple[list[int], int]:
    """(completion of each job, preemptions) of jobs (submit, GPUs, duration)."""
    rows = [Row(i, s, g, d) for i, (s, g, d) in enumerate(jobs)]
    active: list[Row] = []
    now, coming = 0, sorted(rows, key=lambda r: (r.submit, r.number))
    while coming or active:
        steps = [r.left for r in active if r.running]
        steps += [
            ceil((limit - r.attained) / r.gpus)
            for r in active
            for limit in limits
            if r.running and limit > r.attained
        ]
        if coming:
            steps.append(coming[0].submit - now)
        step = min(steps)
        now += step
        for r in active:
            if r.running:
                r.left -= step
                r.attained += step * r.gpus
                if r.left == 0:
                    r.end = now
        active = [r for r in active if r.end < 0]
        while coming and coming[0].submit <= now:
            active.append(coming.pop(0))
        decide(active, gpus, policy, limits)
    return [r.end for r in rows], sum(r.stops for r in rows)


def decide(active: list[Row], gpus: int, policy: str, limits: tuple[int, ...]) -> None:
    free = gpus
    runs = set()
    for r in sorted(active, key=lambda r: order(r, policy, limits)):
        if r.gpus <= free:
            free -= r.gpus
            runs.add(r.number)
        elif policy == "easy-backfill":
            runs |= backfilled(active, runs, gpus)
            break
        elif policy == "fifo":
            break
    for r in active:
        r.stops += r.running and r.number not in runs
        r.running = r.number in runs


def backfilled(active: list[Row], runs: set[int], gpus: int) -> set[int]:
    """The textbook's EASY: a shadow time, and the GPUs that are left over then."""
    now = {r.number: r for r in active}
    first, *others = [r for r in active if r.number not in runs]
    free = gpus - sum(now[number].gpus for number in runs)
    shadow, then = 0, free
    for r in sorted((now[number] for number in runs), key=lambda r: (r.left, r.number)):
        if then >= first.gpus and r.left > shadow:
            break
        shadow, then = r.left, then + r.gpus
    extra, found = then - first.gpus, set()
    for r in others:
        in_time = r.left <= shadow
        if r.gpus <= free and (in_time or r.gpus <= extra):
            free -= r.gpus
            extra -= 0 if in_time else r.gpus
            found.add(r.number)
    return found


def order(r: Row, policy: str, limits: tuple[int, ...]) -> tuple[float, ...]:
    match policy:
        case "fifo" | "best-effort" | "easy-backfill":
            return (not r.running, r.number)
        case "sf":
            return (r.gpus, r.number)
        case "srtf":
            return (r.left, r.number)
        case "srsf":
            return (r.left * r.gpus, r.number)
        case _:
            queue = sum(r.attained >= limit for limit in limits)
            return (queue, not r.running, r.number)


rows = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 8), st.integers(1, 400)), min_size=1, max_size=40
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60)
@given(jobs=rows)
def test_the_engine_equals_the_reference(policy: str, jobs: list[tuple[int, int, int]]) -> None:
    jobs = sorted(jobs)
    limits = (50, 600) if policy == "tiresias-las" else ()
    ends, stops = reference(jobs, 8, policy, limits)
    options = {"limits": "50,600"} if limits else {}
    sim = [submission(i, submit_s=s, gpus=g, duration_s=d) for i, (s, g, d) in enumerate(jobs)]
    result = Engine(sim, Cluster.counted(8), make(policy, options), FixedModel()).run()
    assert [outcome.end_s for outcome in result.outcomes] == ends
    assert sum(outcome.preemptions for outcome in result.outcomes) == stops


class Forgetful:
    """Asks the policy twice: with its memory, and as a master that was just restarted."""

    def __init__(self, name: str) -> None:
        self.policy = make(name)

    def allocate(self, view: View, memory: object) -> tuple[Plan, object]:
        fresh, _ = self.policy.allocate(
            View(view.now_s, view.cluster, view.jobs, view.free, None, view.rules), None
        )
        plan, memory = self.policy.allocate(view, memory)
        assert dict(plan.allocations) == dict(fresh.allocations)
        assert plan.next_decision_s == fresh.next_decision_s
        return plan, memory

    def explain(self, view: View, memory: object) -> list[object]:
        return []


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(jobs=rows)
def test_memory_is_only_an_index(policy: str, jobs: list[tuple[int, int, int]]) -> None:
    """A plan made with the memory equals the one made from the bare view."""
    sim = [
        submission(i, submit_s=s, gpus=g, duration_s=40 * d)
        for i, (s, g, d) in enumerate(sorted(jobs))
    ]
    result = Engine(sim, Cluster([(4, ""), (4, "")]), Forgetful(policy), FixedModel()).run()
    assert len(result.outcomes) == len(sim)
