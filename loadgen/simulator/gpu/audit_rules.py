"""The auditor's part about the operator's rules, from the event log alone.

- **GPU types**: a job lies on one type, and on one that it can run on.
- **Minimum run time**: nobody is preempted or resized before it is over.
- **Quotas**: where tenants may not borrow, none ever holds more than its own. What an owner is
  owed where they may, a log cannot tell: gangs, fragments and protected jobs decide it.
- **Priorities**: nobody starts while a job of higher priority that could have taken the very same
  place waits: one of equal size, GPU types and tenant. Jobs of other sizes, of several sizes and
  those that share GPUs are left out: whether they would fit is the policy's to say.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from slackwater.loadgen.simulator.gpu.eventlog import EventLog, LoggedJob

_SLACK_S = 1e-6


class Held(NamedTuple):
    """One segment as the log tells it."""

    start_s: float
    end_s: float
    ready_s: float
    places: tuple[tuple[int, int], ...]
    group: str
    before: float
    after: float
    why: str

    @property
    def gpus(self) -> int:
        return sum(gpus for _, gpus in self.places)


def check_rules(log: EventLog, held: dict[int, list[Held]]) -> Iterator[str]:
    """Say what is wrong, one sentence each."""
    yield from _check_types(log, held)
    yield from _check_minimum(log, held)
    if log.slackwater.quotas and not log.slackwater.borrowing:
        yield from _check_quotas(log, held)
    if len({job.priority for job in log.slackwater.jobs}) > 1:
        yield from _check_priorities(log, held)


def _check_types(log: EventLog, held: dict[int, list[Held]]) -> Iterator[str]:
    nodes = log.slackwater.nodes
    for number, segments in held.items():
        job = log.slackwater.jobs[number]
        for h in segments:
            kinds = {nodes[node][1] for node, _ in h.places if 0 <= node < len(nodes)}
            if len(kinds) > 1:
                yield f"job {job.id} lies on GPUs of {sorted(kinds)} at {h.start_s} s"
            elif job.gpu_types and not kinds <= {*job.gpu_types}:
                yield (
                    f"job {job.id} lies on GPUs of {sorted(kinds)} at {h.start_s} s; it can run on "
                    f"{list(job.gpu_types)}"
                )


def _check_minimum(log: EventLog, held: dict[int, list[Held]]) -> Iterator[str]:
    least_s = log.slackwater.min_run_s
    for number, segments in held.items():
        for h in segments:
            if h.why in ("preempted", "resized") and h.end_s - h.start_s < least_s - _SLACK_S:
                yield (
                    f"job {log.slackwater.jobs[number].id} is {h.why} at {h.end_s} s, "
                    f"{h.end_s - h.start_s} s after its start; {least_s} s are protected"
                )


def _check_quotas(log: EventLog, held: dict[int, list[Held]]) -> Iterator[str]:
    jobs, quotas = log.slackwater.jobs, log.slackwater.quotas
    steps = sorted(
        (at_s, sign * h.gpus, jobs[number].tenant)
        for number, segments in held.items()
        for h in segments
        for at_s, sign in ((h.start_s, 1), (h.end_s, -1))
    )
    holds: Counter[str] = Counter()
    for at_s, together in groupby(steps, key=lambda step: step[0]):
        gained = Counter[str]()
        for _, gpus, tenant in together:
            gained[tenant] += gpus
        holds.update(gained)
        for tenant, gpus in sorted(gained.items()):
            if gpus > 0 and holds[tenant] > quotas.get(tenant, 0):
                yield (
                    f"tenant {tenant!r} holds {holds[tenant]} GPUs at {at_s} s; its quota is "
                    f"{quotas.get(tenant, 0)}"
                )


class _Demand(NamedTuple):
    gpus: int
    gpu_types: tuple[str, ...]
    tenant: str


def _demand(job: LoggedJob) -> _Demand | None:
    """The place it needs; None: it may need several, so that nothing can be said."""
    if not job.gpus_min == job.gpus == job.gpus_max:
        return None
    return _Demand(job.gpus, job.gpu_types, job.tenant)


def _check_priorities(log: EventLog, held: dict[int, list[Held]]) -> Iterator[str]:
    # At one instant, jobs that begin to wait come before jobs that stop waiting.
    steps: list[tuple[float, int, int, bool]] = []
    for number, segments in held.items():
        if _demand(log.slackwater.jobs[number]) is None or any(h.group for h in segments):
            continue
        steps.append((log.slackwater.jobs[number].submit_s, 0, number, False))
        last_s = None
        for h in segments:
            steps.append((h.start_s, 1, number, h.start_s != last_s))
            last_s = h.end_s
            if h.why != "completed":
                steps.append((h.end_s, 0, number, False))
    steps.sort()
    waiting: dict[_Demand, set[int]] = {}
    for at_s, together in groupby(steps, key=lambda step: step[0]):
        started = []
        for _, kind, number, fresh in together:
            demand = _demand(log.slackwater.jobs[number])
            assert demand is not None
            waits = waiting.setdefault(demand, set())
            if kind == 0:
                waits.add(number)
            else:
                waits.discard(number)
                started += [(number, demand)] if fresh else []
        for number, demand in started:
            job = log.slackwater.jobs[number]
            first = max(
                (log.slackwater.jobs[other] for other in waiting[demand]),
                key=lambda other: other.priority, default=job,
            )  # fmt: skip
            if first.priority > job.priority:
                yield (
                    f"job {job.id} of priority {job.priority} starts at {at_s} s while job "
                    f"{first.id} of priority {first.priority}, as large, waits"
                )
