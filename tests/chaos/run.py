"""One run: a cluster, clients, faults, and the judgement of what the clients were told.

A run that did not reach its load has failed, not passed: nothing was tried.
"""

import asyncio
import random
import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from tests.chaos.faults import Faults
from tests.chaos.history import Call, unexplained
from tests.chaos.load import Load, patient
from tests.faults import test_kills

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.loadgen.simulator.gpu.metrics import quantile
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord

CONNECTIONS: Final = 3
END_S: Final = 90.0
"""Seconds in which all programs have run, once the faults are over."""
LOAD_PART: Final = 0.8
"""The part of the rate that a run must reach between its faults to count."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`faults`, in turns, `times` in all, at `rate` submissions a second, of which `programs` have
    a program."""

    faults: tuple[str, ...]
    times: int
    rate: float
    programs: float
    seed: int
    trains: bool = False
    """Two jobs train meanwhile, one after another, each right to the bit."""


@dataclass
class Report:
    """A run, judged. `wrong`: what must not have happened; empty: it passed."""

    plan: Plan
    seconds: float = 0.0
    calls: int = 0
    acknowledged: int = 0
    left_open: int = 0
    ran: int = 0
    trained: int = 0
    """Jobs that trained, each to the bits of a replay without faults."""
    rate: float = 0.0
    """The median of submissions a second between two faults."""
    back_s: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Fault -> median, 99th percentile and longest time until a submission was taken again."""
    in_flight_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The same of the time from a fault until a submission was acknowledged that was in flight at
    it, and at no later one."""
    acknowledged_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The same of the time from any submission until it was acknowledged."""
    unanswered: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def spread(values_s: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum; zeros for nothing."""
    if not values_s:
        return 0.0, 0.0, 0.0
    in_order = sorted(values_s)
    return quantile(in_order, 0.5), quantile(in_order, 0.99), in_order[-1]


@asynccontextmanager
async def cluster(plan: Plan) -> AsyncIterator[EmbeddedCluster]:
    """Start a cluster whose services are started again however often they end, as fast as
    always."""
    options = ClusterOptions(
        controllers=1,
        aggregators=test_kills.AGGREGATORS if plan.trains else 2,
        cpu_share=0.15,
        restarts_max=100_000,
        profiler={"window_iterations": 20, "profile_iterations": 8},
    )
    async with EmbeddedCluster(options) as made:
        yield made


async def run(plan: Plan, folder: Path) -> Report:
    """Have programs write into `folder`, which is empty. Raises AssertionError where the cluster
    does not come back from a fault."""
    began_s, rng = time.monotonic(), random.Random(plan.seed)
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(cluster(plan))
        clients = [
            patient(await stack.enter_async_context(connect(made.url, f"chaos-{number}")))
            for number in range(CONNECTIONS)
        ]
        load = Load(clients, plan.rate, plan.programs, folder, rng)
        faults = Faults(made, load, rng)
        running = asyncio.ensure_future(load.run())
        try:
            async with asyncio.TaskGroup() as tasks:
                failing = tasks.create_task(faults.run(plan.faults, plan.times))
                training = [
                    tasks.create_task(test_kills.one_after_the_other(clients[0], name, failing))
                    for name in ("left", "right")
                    if plan.trains
                ]
        finally:
            load.end()
            await running
        report = Report(plan, trained=sum(each.result() for each in training))
        records = await _all_ended(load)
        report.wrong += _ended_badly(records)
        excused = {each.spec.id for each in records if asked_for(each)}
        _judge(report, load, faults, excused)
    report.seconds = time.monotonic() - began_s
    return report


async def _all_ended(load: Load) -> list[JobRecord]:
    """Return the records of all jobs, once none lives any more, or END_S are over."""
    until_s = time.monotonic() + END_S
    while True:
        records, _ = await load.clients[0].all_jobs()
        living = any(record.state not in TERMINAL_STATES for record in records.values())
        if not living or time.monotonic() > until_s:
            return list(records.values())
        await asyncio.sleep(0.2)


def _ended_badly(records: Sequence[JobRecord]) -> list[str]:
    return [
        f"{each.spec.id} is {each.state} at the end: {each.reason}"
        for each in records
        if each.state not in TERMINAL_STATES or (each.state == "failed" and not asked_for(each))
    ]


def asked_for(record: JobRecord) -> bool:
    """Say whether a job failed as an error did that a failpoint raised, and says so."""
    return record.state == "failed" and "failpoint" in record.reason


def _judge(report: Report, load: Load, faults: Faults, excused: set[str]) -> None:
    plan, taken = report.plan, {call.job for call in load.taken} - excused
    report.calls, report.acknowledged = len(load.calls), len(taken)
    report.left_open = sum(1 for call in load.calls if call.outcome == "open")
    report.unanswered = load.unanswered
    report.wrong += load.wrong
    report.rate = median(faults.rates)
    report.back_s = {kind: spread(values) for kind, values in faults.back_s.items()}
    report.in_flight_s = spread(_in_flight(load.taken, faults.at_s))
    report.acknowledged_s = spread([call.returned_s - call.called_s for call in load.taken])
    ran = load.ran()
    report.ran = len(ran)
    calls_told = [call for call in load.calls if call.job not in excused]
    for job, calls in unexplained(calls_told, load.models).items():
        report.wrong.append(f"no order explains what was told of {job}: {_told(calls)}")
    for job in sorted(taken):
        if job.startswith("program-") and ran.get(job, 0) != 1:
            report.wrong.append(f"{job} was acknowledged and ran {ran.get(job, 0)} times")
    report.wrong += [f"{job} ran {times} times" for job, times in ran.items() if times > 1]
    report.wrong += [f"{armed} was not passed: nothing is proved" for armed in faults.not_passed]
    if report.rate < LOAD_PART * plan.rate:
        report.wrong.append(
            f"the load was {report.rate:.0f} submissions a second, of {plan.rate:.0f}: nothing is "
            "proved; use a machine with less to do, or a lower rate"
        )


def _in_flight(taken: Sequence[Call], at_s: Sequence[float]) -> list[float]:
    """Return how long those submissions took, from the last fault on, that were in flight at it."""
    found = []
    for call in taken:
        last = bisect_right(at_s, call.returned_s) - 1
        if last >= 0 and at_s[last] > call.called_s:
            found.append(call.returned_s - at_s[last])
    return found


def _told(calls: Sequence[Call]) -> str:
    first_s = min(call.called_s for call in calls)
    return ", ".join(
        f"{call.kind} {call.outcome} {call.called_s - first_s:.3f}-{call.returned_s - first_s:.3f}"
        for call in sorted(calls, key=lambda call: call.called_s)
    )


def _seconds(values: Sequence[float]) -> str:
    return "".join(f"{value:7.2f}s" for value in values)


def lines(report: Report) -> list[str]:
    """Return the report as a person reads it."""
    plan = report.plan
    told = [
        f"{plan.times} faults in {report.seconds:.0f} s (seed {plan.seed}), {report.rate:.0f} "
        f"submissions a second between them, {report.calls:,} calls",
        f"{report.acknowledged:,} jobs acknowledged, {report.ran} programs ran, "
        f"{report.left_open} calls without an answer, {report.trained} jobs trained to the bit",
        f"{'FAULT':24}{'TIMES':>6}{'BACK p50':>10}{'p99':>8}{'MAX':>8}",
    ]
    counts = Counter(plan.faults[number % len(plan.faults)] for number in range(plan.times))
    for kind, values in report.back_s.items():
        told.append(f"{kind:24}{counts[kind]:6}  {_seconds(values)}")
    for what, values in (
        ("in flight at a fault", report.in_flight_s),
        ("all submissions", report.acknowledged_s),
    ):
        told.append(f"{what:24}{'':6}  {_seconds(values)}")
    told += [f"{times} x {why}" for why, times in sorted(report.unanswered.items())]
    told += [f"WRONG: {each}" for each in report.wrong[:20]]
    kinds = Counter(re.sub(r"[\d.]+", "N", each)[:80] for each in report.wrong[20:])
    told += [f"WRONG: {times} more like {kind!r}" for kind, times in kinds.most_common(10)]
    told.append(f"{len(report.wrong)} anomalies")
    return told
