"""The live executor under virtual time: who has the slot, when, by the plan; what is charged."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from slackwater.common.base import limits
from slackwater.common.base.clock import LiveClock
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.schemas.base import JobId
from slackwater.services.aggregator import executor as executor_module
from slackwater.services.aggregator.executor import Executor, KernelThread, Outcome, Task
from slackwater.services.aggregator.fold_threads import Team

SHARE = 0.1


@dataclass(eq=False)
class Entry:
    """A bucket as an executor sees it."""

    job: str
    index: int = 0
    phase: str = "folding"

    @property
    def key(self) -> tuple[JobId, int]:
        return JobId(self.job), self.index


class Slot:
    """An executor whose kernels take the CPU time that the test says; `ended` in order."""

    def __init__(
        self, cpu_share: float = SHARE, charge_ns_per_byte: float = 0.0, **cpu_s: float
    ) -> None:
        self.clock = SimWorld(1).clock
        self.begun_s = self.clock.now_s()
        self.cpu_s = cpu_s
        self.ended: list[tuple[str, float]] = []
        self.executed: list[Task] = []
        self.told_of: list[tuple[Task, int]] = []
        """Each with the number of its execution."""
        self.executor = Executor(
            0,
            self.clock,
            cpu_share,
            self.kernel,
            self.told,
            charge_ns_per_byte=charge_ns_per_byte,
        )

    async def kernel(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if work.__name__ != "execute":  # A share of whole cores: all that is ready.
            return work(*arguments)
        self.executed.append(arguments[0])
        return Outcome(len(self.executed), arguments[0].slots.cpu_s)

    def told(self, task: Task, outcome: Outcome) -> None:
        self.told_of.append((task, outcome.version))
        self.ended.append((task.bucket.key[0], round(self.clock.now_s() - self.begun_s, 3)))

    def task(self, job: str) -> Task:
        slots: Any = SimpleNamespace(
            task_cpu_ns=round(self.cpu_s[job] * 1e9),
            cpu_s=self.cpu_s[job],
            geometry=SimpleNamespace(parameter_bytes=1 << 30, elements=1),
            active=2,
            kernels=None,
        )
        bucket: Any = Entry(job)
        return Task(bucket, slots)

    async def at(self, after_s: float, *jobs: str) -> None:
        """Their last pushes come then."""
        await self.clock.sleep_until(self.begun_s + after_s)
        for job in jobs:
            self.executor.submit(self.task(job))

    def plan(self, cycle_s: float, **every_s: float) -> None:
        self.executor.turns.plan(cycle_s, 0.1, every_s)


def simulated(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        await test()

    def run() -> None:
        run_simulated(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@simulated
async def test_a_late_request_gives_way_to_a_scheduled_one_and_has_the_rest() -> None:
    """Cycle 10. a was expected at 11: at 16.2 its next one is nearer. b, expected at 18, finds the
    slot free after a chunk, and a has the rest after it."""
    slot = Slot(a=0.4, b=0.2)
    running = asyncio.ensure_future(slot.executor.run())
    slot.plan(10.0, a=10.0, b=10.0)
    await slot.at(1.0, "a")
    await slot.at(8.0, "b")
    await slot.at(16.2, "a")
    await slot.at(18.0, "b")
    await slot.at(40.0)
    assert slot.ended == [("a", 5.0), ("b", 10.0), ("b", 20.003), ("a", 22.2)]
    running.cancel()


@simulated
async def test_nobody_is_woken_within_a_slot_that_nobody_asks_for() -> None:
    """4 s of slot time in deadline order: what comes meanwhile and is less urgent changes nothing
    either."""
    slot = Slot(large=0.4, later=0.1, urgent=0.01)
    looked = 0
    cut = slot.executor._schedule.cut

    def counted(now_s: float) -> Any:
        nonlocal looked
        looked += 1
        return cut(now_s)

    slot.executor._schedule.cut = counted  # type: ignore[method-assign]
    running = asyncio.ensure_future(slot.executor.run())
    for job, position in (("large", 0.5), ("later", 0.9), ("urgent", 0.0)):
        slot.executor.turns.deadlines.plan((job, 0), position, 0.1)
    slot.plan(0.0, large=10.0, later=10.0, urgent=10.0)
    await slot.at(1.0, "large")
    await slot.at(2.0, "later")
    await slot.at(4.9)
    assert looked == 1
    await slot.at(20.0)
    assert slot.ended == [("large", 5.0), ("later", 6.0)]
    assert looked == 2
    running.cancel()


@simulated
async def test_without_a_plan_they_run_as_they_come() -> None:
    slot = Slot(a=0.4, b=0.4)
    running = asyncio.ensure_future(slot.executor.run())
    await slot.at(1.0, "a", "b", "a")
    await slot.at(40.0)
    assert slot.ended == [("a", 5.0), ("b", 9.0), ("a", 13.0)]
    running.cancel()


@simulated
async def test_the_earliest_deadline_has_the_slot_after_a_chunk_at_most() -> None:
    slot = Slot(large=0.4, urgent=0.01)
    running = asyncio.ensure_future(slot.executor.run())
    slot.executor.turns.deadlines.plan(("large", 0), 0.9, 0.1)
    slot.executor.turns.deadlines.plan(("urgent", 0), 0.0, 0.1)
    slot.plan(0.0, large=10.0, urgent=10.0)
    await slot.at(1.0, "large")
    await slot.at(2.0, "urgent")
    await slot.at(20.0)
    assert [job for job, _ in slot.ended] == ["urgent", "large"]
    assert slot.ended[0][1] == pytest.approx(2.1, abs=0.02), "its own slot and a chunk"
    assert slot.ended[1][1] == pytest.approx(5.1, abs=0.02)
    running.cancel()


@simulated
async def test_a_bucket_that_comes_anew_is_folded_though_its_former_fold_was_interrupted() -> None:
    """It was dropped in the middle of its slot; what it comes back as is another bucket."""
    slot = Slot(large=0.4)
    running = asyncio.ensure_future(slot.executor.run())
    slot.executor.turns.deadlines.plan(("large", 0), 0.9, 0.1, 10.0)
    await slot.at(1.0, "large")
    await slot.at(1.5)
    former = slot.executed[0].bucket
    former.phase = "gone"
    slot.executor.forget(former.key)
    slot.executor.turns.deadlines.plan(former.key, 0.0, 0.1, 10.0)  # Due before the former one.
    await slot.at(2.0, "large")
    await slot.at(20.0)
    first, second = slot.executed
    assert first.bucket is former
    assert slot.told_of == [(second, 2), (first, 1)]
    running.cancel()


@simulated
async def test_of_what_was_dropped_in_its_slot_only_the_time_is_remembered() -> None:
    slot = Slot(a=0.4, b=0.1)
    running = asyncio.ensure_future(slot.executor.run())
    tasks = [slot.task(job) for job in "ab"]
    for task in tasks:
        slot.executor.submit(task)
    tasks[0].bucket.phase = "gone"
    slot.executor.forget(tasks[0].bucket.key)
    await slot.at(10.0)
    assert [job for job, _ in slot.ended] == ["a", "b"]
    assert [each.job for each in slot.executor.observed()] == ["b"]
    assert [each.job for each in slot.executor.accounts()] == ["a", "b"]
    running.cancel()


@simulated
async def test_each_job_s_time_is_accounted_once() -> None:
    """Both times are right: the measured one, and the one that the slot was charged: CPU time /
    share."""
    slot = Slot(a=0.4, b=0.1)
    running = asyncio.ensure_future(slot.executor.run())
    await slot.at(1.0, "a", "b", "a")
    await slot.at(20.0)
    spent = {each.job: (each.cpu_s, each.slot_s) for each in slot.executor.accounts()}
    assert spent == {"a": pytest.approx((0.8, 8.0)), "b": pytest.approx((0.1, 1.0))}
    assert slot.executor.accounts() == ()
    running.cancel()


@simulated
async def test_what_a_task_costs_by_now_is_told_and_goes_with_its_region() -> None:
    """Its profile came with the region; the updates have become cheaper since."""
    slot = Slot(a=0.004)
    running = asyncio.ensure_future(slot.executor.run())
    task = slot.task("a")
    task.slots.cpu_s = 0.002  # type: ignore[misc]
    for turn in range(limits.CALIBRATION_EXECUTIONS):
        assert task.slots.task_cpu_ns == 4_000_000
        slot.executor.submit(task)
        await slot.at(0.1 * turn + 0.09)
    assert task.slots.task_cpu_ns == 2_000_000
    (cost,) = slot.executor.observed()
    assert cost.cpu_s == 0.002
    running.cancel()


CHARGE_NS = 0.025
CHARGED_S = 4 * (1 << 30) * CHARGE_NS / 1e9
"""The charge of one of the test's tasks: two workers and the update."""


@simulated
async def test_what_a_busy_machine_adds_to_a_fold_changes_no_slot_that_is_charged_by_bytes() -> (
    None
):
    """Folds take between a tenth and three times of what they are charged."""
    random, slot = Random(7), Slot(charge_ns_per_byte=CHARGE_NS, a=0.0)
    running = asyncio.ensure_future(slot.executor.run())
    taken_s = [CHARGED_S * random.uniform(0.1, 3.0) for _ in range(3 * limits.PROFILE_EXECUTIONS)]
    for turn, each_s in enumerate(taken_s):
        slot.cpu_s["a"] = each_s
        await slot.at(2.0 * turn, "a")
    await slot.at(2.0 * len(taken_s))
    duty_s = CHARGED_S / SHARE
    assert slot.ended == [("a", round(2.0 * turn + duty_s, 3)) for turn in range(len(taken_s))]
    assert slot.executor.busy_s == pytest.approx(len(taken_s) * duty_s)
    (spent,) = slot.executor.accounts()
    assert spent.slot_s == pytest.approx(len(taken_s) * duty_s)
    assert spent.cpu_s == pytest.approx(sum(taken_s))
    (cost,) = slot.executor.observed()
    assert cost.cpu_s == pytest.approx(CHARGED_S)
    assert min(taken_s) <= cost.real_cpu_s <= sorted(taken_s)[len(taken_s) // 2]
    running.cancel()


@simulated
async def test_a_machine_too_slow_for_its_charge_is_counted_and_told() -> None:
    slot = Slot(charge_ns_per_byte=CHARGE_NS, fast=CHARGED_S * 0.9, slow=CHARGED_S * 1.1)
    running = asyncio.ensure_future(slot.executor.run())
    for turn in range(5):
        await slot.at(4.0 * turn, "fast", "slow")
    await slot.at(30.0)
    assert (slot.executor.executions, slot.executor.undercharged) == (10, 5)
    told = {each.job: each for each in slot.executor.observed()}
    assert (told[JobId("fast")].undercharged, told[JobId("slow")].undercharged) == (0, 5)
    assert told[JobId("slow")].real_cpu_s == pytest.approx(CHARGED_S * 1.1)
    assert told[JobId("slow")].cpu_s == pytest.approx(CHARGED_S)
    running.cancel()


@simulated
async def test_a_slot_of_whole_cores_takes_the_most_urgent_first_and_late_ones_last() -> None:
    slot = Slot(cpu_share=1.0, a=4.0, b=4.0, large=1.0, urgent=1.0)
    order: list[str] = []
    slot.executor._execute_one = lambda task, team: order.append(  # type: ignore[method-assign]
        task.bucket.key[0]
    )
    slot.executor.turns.deadlines.plan(("large", 0), 0.9, 0.1)
    slot.executor.turns.deadlines.plan(("urgent", 0), 0.0, 0.1)
    slot.plan(0.0, large=10.0, urgent=10.0)
    slot.plan(10.0, a=10.0, b=10.0)
    running = asyncio.ensure_future(slot.executor.run())
    await slot.at(0.5, "large", "urgent")
    await slot.at(1.0, "a")
    await slot.at(8.0, "b")
    await slot.at(18.0, "a", "b")
    await slot.at(20.1)
    assert order == ["urgent", "large", "a", "b", "b", "a"]
    running.cancel()


async def test_of_several_ready_tasks_each_thread_takes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the last one is everybody's. Each of the first two waits until the other has begun."""
    together = threading.Barrier(2)
    shared: list[bool] = []

    def kernel(slots: Any, owner: int, team: Any = None, alone: int | None = None) -> Outcome:
        shared.append(team is not None)
        if len(shared) <= 2:
            together.wait(30.0)
        return Outcome(1, 0.001)

    monkeypatch.setattr(executor_module, "execute", kernel)
    ended: list[Task] = []
    thread, team = KernelThread(), Team(1)
    executor = Executor(0, LiveClock(), 2.0, thread, lambda task, outcome: ended.append(task), team)
    running = asyncio.ensure_future(executor.run())
    geometry = SimpleNamespace(parameter_bytes=2 << 20, elements=1 << 19)
    slots: Any = SimpleNamespace(task_cpu_ns=0, geometry=geometry, active=2, kernels=None)
    bucket: Any = Entry("a")
    first, second = (Task(bucket, slots) for _ in range(2))
    executor.submit(first)
    executor.submit(second)
    async with asyncio.timeout(30.0):
        while len(ended) < 2:  # noqa: ASYNC110 (told by another thread)
            await asyncio.sleep(0.001)
        while not shared[-1]:  # The other thread may still be on its way back.
            begun = len(ended)
            executor.submit(Task(bucket, slots))
            while len(ended) == begun:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert shared[:2] == [False, False]
    running.cancel()
    thread.close()
    team.close()
