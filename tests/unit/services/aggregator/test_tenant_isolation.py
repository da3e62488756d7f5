"""A tenant that asks an aggregator for more than it was profiled to, beside one that does not: the
live executor under virtual time. Without a plan the others lose speed, with one they keep it."""

import asyncio
from dataclasses import dataclass, field
from itertools import cycle
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.services.aggregator.test_executor import Entry

from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.services.aggregator.executor import Executor, Outcome, Task

SHARE = 0.1
LIMIT = 0.1
SLACK = LIMIT / (1.0 - LIMIT)
UNTIL_S = 60.0
Rule = Literal["arrival", "cyclic", "deadline"]


@dataclass
class Job:
    """Computes, pushes every bucket, and begins anew when all are updated. The seconds of computing
    of its iterations are taken in turns."""

    id: str
    computes_s: tuple[float, ...]
    slots_s: tuple[float, ...]
    profiled_s: float
    """The iteration that it was admitted with."""
    position: float = 0.0
    """The part of all its layers that it has passed."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    left: int = 0
    iterations_s: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Return the part of its profiled speed that it loses, on average."""
        return 1.0 - self.profiled_s / (sum(self.iterations_s) / len(self.iterations_s))

    def tasks(self) -> list[Task]:
        made = []
        for bucket, slot_s in enumerate(self.slots_s):
            slots: Any = SimpleNamespace(
                task_cpu_ns=round(slot_s * SHARE * 1e9),
                cpu_s=slot_s * SHARE,
                geometry=SimpleNamespace(parameter_bytes=1 << 30, elements=1),
                kernels=None,
            )
            entry: Any = Entry(self.id, bucket)
            made.append(Task(entry, slots))
        return made


async def kernel(work: Any, *arguments: Any) -> Outcome:
    return Outcome(1, arguments[0].slots.cpu_s)


async def trains(job: Job, executor: Executor, clock: Any, begin_s: float) -> None:
    for compute_s in cycle(job.computes_s):
        if (now_s := clock.now_s()) >= begin_s + UNTIL_S:
            return
        await clock.sleep_until(now_s + compute_s)
        job.left = len(job.slots_s)
        job.ended.clear()
        for task in job.tasks():
            executor.submit(task)
        await job.ended.wait()
        job.iterations_s.append(clock.now_s() - now_s)


def plan(rule: Rule, executor: Executor, jobs: list[Job]) -> None:
    """Tell the rule what the controller does: each job's profiled iteration."""
    paces = {job.id: job.profiled_s for job in jobs}
    if rule == "cyclic":
        executor.turns.plan(max(paces.values()), SLACK, paces)
    elif rule == "deadline":
        for job in jobs:
            for bucket in range(len(job.slots_s)):
                executor.turns.deadlines.plan((job.id, bucket), job.position, SLACK)
        executor.turns.plan(0.0, SLACK, paces)


def share_an_aggregator(rule: Rule, *jobs: Job) -> dict[str, float]:
    """Slot time that each had, as a part of the whole time."""
    by_id = {job.id: job for job in jobs}

    def told(task: Task, outcome: Outcome) -> None:
        job = by_id[task.bucket.key[0]]
        job.left -= 1
        if job.left == 0:
            job.ended.set()

    async def main() -> dict[str, float]:
        clock = SimWorld(1).clock
        begin_s = clock.now_s()
        executor = Executor(0, clock, SHARE, kernel, told)
        plan(rule, executor, list(jobs))
        running = asyncio.ensure_future(executor.run())
        training = [asyncio.ensure_future(trains(job, executor, clock, begin_s)) for job in jobs]
        await clock.sleep_until(begin_s + UNTIL_S)
        for task in (running, *training):
            task.cancel()
        return {each.job: each.slot_s / UNTIL_S for each in executor.accounts()}

    return run_simulated(main())


def good() -> Job:
    """A fifth of the aggregator."""
    return Job("good", (0.8,), slots_s=(0.2,), profiled_s=1.0)


def bad(*computes_s: float) -> Job:
    """Was profiled to use about half of it, computing for half a second. By deadline both are
    admitted: 0.2 s are due within 0.31 s, 0.68 s within 0.81."""
    return Job("bad", computes_s, slots_s=(0.12,) * 4, profiled_s=1.0, position=0.7)


@pytest.mark.parametrize("rule", ["cyclic", "deadline"])
def test_who_pushes_more_often_than_profiled_costs_the_others_at_most_their_limit(
    rule: Rule,
) -> None:
    mine, other = good(), bad(0.0)
    used = share_an_aggregator(rule, mine, other)
    assert mine.loss <= LIMIT
    assert used["good"] >= 0.2 * (1.0 - LIMIT)
    assert used["bad"] <= 1.0 - used["good"] + 0.02  # Throttled to the rest.
    assert other.loss < 0.0  # Throttled, not stopped: it is faster than its profile.


hurries = st.lists(st.floats(0.0, 0.52), min_size=1, max_size=8)
anything = st.lists(st.one_of(st.floats(0.0, 0.52), st.floats(0.52, 5.0)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(hurries)
def test_in_cycles_no_way_to_push_more_often_costs_the_others_more_than_their_limit(
    computes_s: list[float],
) -> None:
    """Bursts, any pace, any mixture. One that is slower than its profile, in step with the other
    and always just before it, is feedback's matter: the paper's slots have no instants."""
    mine = good()
    share_an_aggregator("cyclic", mine, bad(*computes_s))
    assert mine.loss <= LIMIT


@settings(max_examples=100, deadline=None)
@given(anything)
def test_by_deadline_nothing_that_another_tenant_does_costs_more_than_the_limit(
    computes_s: list[float],
) -> None:
    mine = good()
    share_an_aggregator("deadline", mine, bad(*computes_s))
    assert mine.loss <= LIMIT


def test_without_a_plan_the_same_tenant_breaks_the_limit_of_the_others() -> None:
    """The control."""
    mine = good()
    share_an_aggregator("arrival", mine, bad(0.0))
    assert mine.loss > LIMIT


@pytest.mark.parametrize("rule", ["arrival", "cyclic", "deadline"])
def test_tenants_that_keep_to_their_profiles_keep_their_speed(rule: Rule) -> None:
    mine, other = good(), bad(0.52)
    share_an_aggregator(rule, mine, other)
    if rule != "arrival":
        assert mine.loss <= LIMIT
        assert other.loss <= LIMIT
