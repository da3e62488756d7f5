"""Usage of tenants and jobs: counted at each stop, kept when jobs are forgotten, once and only once
whenever the master is killed."""

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import Harness, spec, submitted

from slackwater.cli.usage import first_day, told, usage_table
from slackwater.common.base.effects import (
    Answered,
    Effect,
    Persist,
    Recovered,
    Reply,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.console.outcome import Usage as UsageError
from slackwater.schemas.base import ClusterId, JobId, Message, Ok, Record, Refused
from slackwater.schemas.cluster import ClusterReport, PlacedJob
from slackwater.schemas.job_requests import (
    CancelJob,
    DeleteJob,
    PauseJob,
    RerunJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
)
from slackwater.schemas.usage import DAY_S, JOB_DAYS_MAX, DayUse, GetUsage, UsageList, UsageSums
from slackwater.services.master.config import MasterConfig
from slackwater.services.master.core import Master
from slackwater.services.master.ended import KEPT_S
from slackwater.services.master.keys import JobForgotten, Order, OrderKey, UsageStored
from slackwater.services.master.usage import Aggregation, Sharers, Usage, merged

from tests.unit.services.master.test_repeating import exited, failed  # isort: skip


def used(harness: Harness, **ask: Any) -> dict[tuple[str, str, int | None], UsageSums]:
    answer = harness.answer(GetUsage(**ask))
    assert isinstance(answer, UsageList)
    return {(row.tenant, row.job, row.day): row.sums for row in answer.rows}


def gpu_job(harness: GpuHarness, id: str, gpus: int, **fields: object) -> None:
    harness.submit(id, gpus, **fields)
    harness.confirm(f"start@n1/{id}" if gpus > 2 else f"start/{id}")


def test_a_job_s_gpu_hours_are_counted_while_it_runs_and_after_it() -> None:
    harness = GpuHarness()
    gpu_job(harness, "a", 2, tenant="vision", cores=3.0)
    harness.now_s += 1800.0
    (running,) = used(harness).values()
    assert (running.gpu_s, running.core_s) == (3600.0, 3.0 * 3600.0)
    assert (running.submitted, running.ended) == (1, 0)
    harness.ask(CancelJob(job="a"))
    harness.now_s += 500.0
    (ended,) = used(harness).values()
    assert (ended.gpu_s, ended.cancelled) == (3600.0, 1)
    assert used(harness, by="job") == {("vision", "a", None): ended}
    assert used(harness, tenant="speech") == {}


def test_each_day_has_its_part_of_an_attempt() -> None:
    harness = GpuHarness()
    harness.now_s = 10 * DAY_S - 601.0
    harness.hear()
    gpu_job(harness, "a", 1)
    harness.now_s = 10 * DAY_S + 1200.0
    harness.hear()
    harness.ask(CancelJob(job="a"))
    found = {day: sums for (_, _, day), sums in used(harness, by="day").items()}
    assert {day: sums.gpu_s for day, sums in found.items()} == {9: 600.0, 10: 1200.0}
    assert (found[9].submitted, found[9].ended) == (1, 0)
    assert (found[10].submitted, found[10].ended) == (0, 1)
    assert [*used(harness, by="day", since_day=10)] == [("", "", 10)]


def test_time_that_a_job_is_paused_counts_for_nothing() -> None:
    harness = GpuHarness()
    gpu_job(harness, "a", 1)
    harness.now_s += 100.0
    harness.hear()
    harness.ask(PauseJob(job="a"))
    harness.confirm("stop/a")
    harness.now_s += 1000.0
    harness.hear()
    harness.ask(ResumeJob(job="a"))
    harness.now_s += 20.0
    (sums,) = used(harness).values()
    assert sums.gpu_s == 120.0
    harness.restart()
    (sums,) = used(harness).values()
    assert sums.gpu_s == 120.0


def test_a_job_that_saves_before_it_ends_uses_its_gpus_meanwhile() -> None:
    """Red before: a program that took its 30 s of grace at each pause had them for nothing. What
    policies call its attained service is as it was."""
    harness = GpuHarness()
    gpu_job(harness, "a", 2, cores=3.0)
    harness.now_s += 100.0
    harness.hear()
    harness.ask(PauseJob(job="a"))
    attained = harness.job("a").gpu_s
    assert attained == 200.0
    harness.now_s += 10.0
    (sums,) = used(harness).values()
    assert (sums.gpu_s, sums.core_s) == (220.0, 660.0)
    harness.restart()
    harness.hear()
    harness.now_s += 20.0
    harness.confirm("stop/a")
    harness.now_s += 1000.0
    harness.restart()
    (sums,) = used(harness).values()
    assert (sums.gpu_s, sums.core_s) == (260.0, 780.0)
    assert harness.job("a").gpu_s == attained


@pytest.mark.parametrize("restarted", [False, True])
def test_gpus_that_a_job_waits_for_are_used_by_the_one_that_leaves_them(restarted: bool) -> None:
    """Node n1 is free of `a` before n2 is. Nobody is charged for n1 twice, or for n2 after it."""
    harness = GpuHarness(gpus=1, gpu_policy="sf")
    gpu_job(harness, "a", 2, tenant="vision")
    harness.confirm("start@n1/a")
    harness.confirm("start@n2/a")
    begun_s = harness.now_s
    harness.now_s += 99.0
    harness.hear()
    harness.submit("b", 1, tenant="speech")
    assert harness.job("a").state == "stopping"
    harness.now_s += 10.0
    before = used(harness)
    assert before["vision", "", None].gpu_s == 2 * (harness.now_s - begun_s)
    assert before["speech", "", None].gpu_s == 0.0
    harness.confirm("stop@n1/a")
    harness.tick(0.0)
    harness.now_s += 5.0
    if restarted:
        harness.restart()
        harness.hear()
        harness.confirm("stop@n1/a")
    harness.confirm("stop@n2/a")
    harness.confirm("start/b")
    harness.now_s += 50.0
    after = used(harness)
    assert after["vision", "", None].gpu_s == 2 * 110.0 + 5.0
    # A master that did not see when its GPUs were free takes it that they were at once.
    assert after["speech", "", None].gpu_s == (65.0 if restarted else 55.0)


def test_a_job_that_changes_its_size_is_charged_for_what_it_holds_until_it_has() -> None:
    """It holds two GPUs while it saves, and one from then on."""
    harness = GpuHarness(gpus=1)
    gpu_job(harness, "a", 2, gpus_min=1, gpus_max=2)
    harness.confirm("start@n1/a")
    harness.confirm("start@n2/a")
    harness.now_s += 100.0
    harness.hear()
    harness.ask(ScaleJob(job="a", workers=1))
    record = harness.job("a")
    assert (record.state, len(record.planned)) == ("stopping", 1)
    harness.now_s += 10.0
    harness.confirm("stop@n1/a")
    harness.confirm("stop@n2/a")
    assert harness.job("a").state == "starting"
    harness.now_s += 40.0
    (sums,) = used(harness).values()
    assert sums.gpu_s == 200.0 + 20.0 + 40.0


def test_a_slot_counts_as_a_core_and_a_job_run_by_hand_as_none() -> None:
    harness = Harness()
    submitted(harness, "a", workers=2)
    harness.node()
    harness.now_s += 10.0
    (sums,) = used(harness).values()
    assert (sums.gpu_s, sums.core_s) == (0.0, 20.0)
    for rank in (0, 1):
        harness.ask(exited("a", rank))
    (sums,) = used(harness).values()
    assert (sums.core_s, sums.completed) == (20.0, 1)


def test_runs_of_one_id_add_up_and_a_new_owner_has_its_own_account() -> None:
    harness = Harness()
    failed(harness, "a")
    harness.ask(RerunJob(job="a", run=1))
    harness.step(Answered(OrderKey(JobId("a"), Order("start")), Ok()))
    harness.ask(CancelJob(job="a"))
    harness.step(Answered(OrderKey(JobId("a"), Order("stop")), Ok()))
    (both,) = used(harness).values()
    assert (both.submitted, both.failed, both.cancelled) == (2, 1, 1)
    harness.ask(DeleteJob(job="a"))
    harness.ask(SubmitJob(spec=spec("a", tenant="other")))
    sums = {tenant: s for (tenant, _, _), s in used(harness).items()}
    assert sums[""] == both
    assert (sums["other"].submitted, sums["other"].ended) == (1, 0)


def test_forgotten_jobs_stay_in_their_tenants_sums() -> None:
    harness = Harness(jobs_kept_max=1)
    for number in range(5):
        harness.now_s += 1.0
        submitted(harness, f"j{number}", tenant="t")
        harness.ask(CancelJob(job=f"j{number}"))
    assert [*harness.stored["jobs"]] == ["j4"]
    for _ in range(2):
        (sums,) = used(harness, by="tenant").values()
        assert (sums.submitted, sums.cancelled) == (5, 5)
        assert [job for _, job, _ in used(harness, by="job")] == ["j4"]
        harness.restart()
    assert harness.core.state.usage.totals["t"].cancelled == 5


def test_a_job_that_is_being_forgotten_is_not_begun_again_before() -> None:
    harness = Harness(jobs_kept_max=1)
    harness.forgets = False
    for id in ("a", "b"):
        harness.now_s += 1.0
        failed(harness, id)
    answer = harness.answer(RerunJob(job="a", run=1))
    assert "is being forgotten" in getattr(answer, "reason", "")
    harness.step(TimerFired(UsageStored(JobId("a"))))
    assert "a" not in harness.stored["jobs"]
    harness.now_s += KEPT_S + 1.0
    harness.tick()
    assert isinstance(harness.answer(SubmitJob(spec=spec("a"))), Refused)
    harness.step(TimerFired(JobForgotten(JobId("a"))))
    submitted(harness, "a")
    assert harness.job("a").state == "pending"


def test_what_sharing_saves_is_measured_against_servers_of_its_own() -> None:
    """Two jobs share two aggregators: each has half of both, and would have had two servers."""
    harness = Harness()
    for id in ("a", "b"):
        submitted(harness, id)
    harness.node()
    harness.core.state.pool.share = lambda: 0.5  # type: ignore[method-assign]
    for _ in range(10):
        placed = {JobId(id): PlacedJob(at=(0, 1)) for id in ("a", "b")}
        for id in ("a", "b"):
            job = harness.core.state.jobs[JobId(id)]
            if job.record.cluster is None:
                harness.core.state.change(job, harness.now_s, cluster=ClusterId("c"))
        harness.see(
            ClusterReport(
                cluster=ClusterId("c"), free_cpu=0.0, aggregators=("a1", "a2"),  # type: ignore[arg-type]
                jobs=(), placed=placed, at_s=harness.now_s,
            )
        )  # fmt: skip
        harness.now_s += 1.0
    (sums,) = used(harness).values()
    assert sums.standalone_core_s == pytest.approx(2 * 10 * 2 * 0.5, rel=0.06)
    assert sums.aggregator_core_s == pytest.approx(10 * 2 * 0.5, rel=0.06)


def test_a_part_of_aggregators_is_the_mean_of_what_was_reported() -> None:
    part = Aggregation()
    assert part.means(5.0) == (0.0, 0.0)
    part.note(2.0, 0.0, 5.0)
    part.note(1.0, 0.0, 10.0)
    assert part.means(20.0) == (1.0, 0.75)
    sharers = Sharers()
    one, two = JobId("one"), JobId("two")
    assert sharers.part(one, ("a", "b")) == 2.0  # type: ignore[arg-type]
    assert sharers.part(two, ("b",)) == 0.5  # type: ignore[arg-type]
    assert sharers.part(one, ("a", "b")) == 1.5  # type: ignore[arg-type]
    sharers.drop(one)
    assert sharers.part(two, ("b",)) == 1.0  # type: ignore[arg-type]


def test_a_job_of_many_days_keeps_its_sums_in_bounded_room() -> None:
    days = [DayUse(day=day, sums=UsageSums(gpu_s=1.0)) for day in range(JOB_DAYS_MAX + 50)]
    kept = merged((), days)
    assert len(kept) == JOB_DAYS_MAX
    assert sum(each.sums.gpu_s for each in kept) == JOB_DAYS_MAX + 50


def test_months_that_are_long_over_are_dropped() -> None:
    usage = Usage(days_max=31)
    harness = Harness()
    failed(harness, "a")
    assert [key for key, _ in usage.forget(harness.job("a"))] == ["1970-01"]
    assert usage.outdated(20 * DAY_S) == []
    assert usage.outdated(100 * DAY_S) == ["1970-01"]
    assert usage.records == {}


# Kills --------------------------------------------------------------------------------------------


class Disk:
    """A master whose writes become durable one by one, in order within each bucket, and whose
    answers and timers wait for the writes before them, as its shell has it."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, Record]] = {"jobs": {}, "usage": {}, "ended": {}}
        self.epoch, self.now_s, self.token = 0, 100.0, 0
        self.acknowledged: list[Message] = []
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.core = Master(MasterConfig(jobs_kept_max=1))
        self.writes: dict[str, deque[tuple[int, Persist]]] = {each: deque() for each in self.stored}
        self.steps: deque[tuple[int, list[Effect]]] = deque()
        self.asked: dict[int, Message] = {}
        self.number = 0
        self.step(Recovered(self.epoch, {name: dict(kept) for name, kept in self.stored.items()}))

    def step(self, event: Any) -> None:
        self.number += 1
        effects = self.core.step(event, self.now_s)
        self.core.state.check_invariants()
        for each in effects:
            if isinstance(each, Persist):
                self.writes[each.bucket].append((self.number, each))
        self.steps.append((self.number, effects))

    def ask(self, message: Message) -> None:
        self.now_s += 1.0
        self.token += 1
        self.asked[self.token] = message
        self.step(Requested(self.token, message))

    def write(self, bucket: str) -> None:
        """Make the next write of the bucket durable, and carry out what waited for it."""
        if self.writes[bucket]:
            _, write = self.writes[bucket].popleft()
            if write.record is None:
                self.stored[bucket].pop(write.key, None)
            else:
                self.stored[bucket][write.key] = write.record
        left = [queue[0][0] for queue in self.writes.values() if queue]
        while self.steps and all(self.steps[0][0] < first for first in left):
            for each in self.steps.popleft()[1]:
                if isinstance(each, Reply):
                    self.acknowledged.append(self.asked[each.token])
                elif isinstance(each, StartTimer) and isinstance(
                    each.key, UsageStored | JobForgotten
                ):
                    self.step(TimerFired(each.key))
            left = [queue[0][0] for queue in self.writes.values() if queue]

    def flush(self) -> None:
        while any(self.writes.values()) or self.steps:
            for bucket in self.writes:
                self.write(bucket)


@given(seed=st.integers(0, 2**32), kills=st.floats(0.0, 0.2))
def test_no_kill_between_two_writes_counts_a_job_twice_or_not_at_all(
    seed: int, kills: float
) -> None:
    rng, disk = random.Random(seed), Disk()
    todo = [SubmitJob(spec=spec(f"j{n}", tenant="t")) for n in range(8)]
    wanted: list[Message] = [*todo, *(CancelJob(job=f"j{n}") for n in range(8))]
    for message in wanted:
        while message not in disk.acknowledged:
            disk.ask(message)
            for _ in range(rng.randrange(6)):
                disk.write(rng.choice((*disk.writes,)))
            if rng.random() < kills:
                disk.restart()
    disk.flush()
    disk.restart()
    disk.flush()
    assert len(disk.stored["jobs"]) == 1
    for message in todo:  # Asked again by one that did not hear the answer.
        disk.ask(message)
    disk.flush()
    assert len(disk.stored["jobs"]) == 1
    disk.ask(GetUsage())
    (answer,) = [e.message for e in disk.steps[-1][1] if isinstance(e, Reply)]
    assert isinstance(answer, UsageList)
    (row,) = answer.rows
    assert (row.sums.submitted, row.sums.cancelled) == (8, 8)


# The command --------------------------------------------------------------------------------------


def test_the_table_has_hours_parts_saved_and_a_total() -> None:
    harness = GpuHarness()
    for tenant in ("speech", "vision"):
        gpu_job(harness, tenant, 1, tenant=tenant)
    harness.now_s += 3599.0
    answer = harness.answer(GetUsage())
    assert isinstance(answer, UsageList)
    total = answer.rows[0].sums + answer.rows[1].sums
    lines = usage_table(answer.rows, total, "tenant", None)
    assert lines[0].split() == [
        "TENANT", "GPU-H", "CORE-H", "SERVER-H", "SHARED-H", "SAVED", "SUBMITTED", "ENDED",
    ]  # fmt: skip
    assert lines[2].split() == ["vision", "1.00", "0.00", "0.00", "0.00", "-", "1", "0"]
    assert lines[3].split()[:2] == ["total", "2.00"]
    assert told(answer.rows[1])["gpu_hours"] == pytest.approx(3599 / 3600)


def test_since_is_a_day_or_how_long_ago() -> None:
    assert first_day("", 0.0) == 0
    assert first_day("1970-01-11", 0.0) == 10
    assert first_day("7d", 10.5 * DAY_S) == 3
    with pytest.raises(UsageError, match="write a day, as 2026-11-02, or how long"):
        first_day("yesterday", 0.0)
