"""Count what tenants and jobs used at each stop of an attempt; keep it when jobs are forgotten.

Pure. A job's use is part of its record, by day, so that it is stored in the very write that says
that the attempt stopped: no crash counts it twice or drops it. It goes on to the sums of its tenant
only when the record is to be forgotten: the sums are stored first, with a mark that names the job,
and the record is deleted once they are durable. A master that is killed in between finds both, and
the mark keeps it from adding the job once more.

Jobs that run are added when somebody asks, up to that instant.

A job's aggregation counts by its part of aggregators: one that n jobs share counts as 1/n for each.
The part is the mean of what controllers reported during the attempt; a master that was started in
its course takes the mean of what it heard itself.
"""

from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.gpus import held
from slackwater.schemas.job_states import HOLDING_STATES, TERMINAL_STATES, JobState
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.usage import DAY_S, JOB_DAYS_MAX, DayUse, GetUsage, UsageRecord, UsageRow
from slackwater.schemas.usage import UsageSums as Sums
from slackwater.services.master.gangs import processes

USAGE_BUCKET: Final = "usage"
FORGOTTEN_AT_ONCE: Final = 100
"""Jobs that are on their way to their tenants' sums."""
NOTHING: Final = Sums()
_FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Aggregation:
    """One job's part of aggregators since its attempt began, as it is reported."""

    from_s: float = -1.0
    last_s: float = 0.0
    part: float = 0.0
    area: float = 0.0
    """Parts times seconds."""
    placed_s: float = 0.0

    def note(self, part: float, since_s: float, now_s: float) -> None:
        """`since_s`: when the attempt began, as far as this master was there."""
        if self.from_s < 0.0:
            self.from_s = self.last_s = since_s
        self._go_on(now_s)
        self.part = part

    def means(self, now_s: float) -> tuple[float, float]:
        """Return the mean part, and the share of the time in which it had any."""
        self._go_on(now_s)
        lasted_s = self.last_s - self.from_s
        return (self.area / lasted_s, self.placed_s / lasted_s) if lasted_s > 0.0 else (0.0, 0.0)

    def _go_on(self, now_s: float) -> None:
        lasted_s = max(0.0, now_s - self.last_s)
        self.area += self.part * lasted_s
        self.placed_s += lasted_s if self.part > 0.0 else 0.0
        self.last_s += lasted_s


class Sharers:
    """How many jobs each aggregator serves, by the controllers' reports."""

    def __init__(self) -> None:
        self._at: dict[JobId, tuple[AggregatorId, ...]] = {}
        self._jobs: Counter[AggregatorId] = Counter()

    def part(self, job: JobId, aggregators: tuple[AggregatorId, ...]) -> float:
        """Take where the job is; return its part of aggregators."""
        if self._at.get(job) != aggregators:
            self.drop(job)
            self._at[job] = aggregators
            self._jobs.update(aggregators)
        return self.part_of(job)

    def part_of(self, job: JobId) -> float:
        """Return its part of aggregators; 0: it is not known where it is."""
        return sum(1.0 / self._jobs[each] for each in self._at.get(job, ()))

    def drop(self, job: JobId) -> None:
        for each in self._at.pop(job, ()):
            self._jobs[each] -= 1
            if not self._jobs[each]:
                del self._jobs[each]


def lasted(
    record: JobRecord, aggregation: Aggregation, core_share: float, now_s: float, from_s: float
) -> list[DayUse]:
    """Return what the attempt that the record is in used until now, and the record does not say
    yet, by day. `from_s`: it had nothing before. A job that was told to stop uses what it holds
    until the last of its processes has ended."""
    since_s, stops = record.since_s or record.started_s, record.state == "stopping"
    # That a stopping job is to go on after all does not change what it holds.
    since_s = max(from_s, record.used_s, 0.0 if stops and record.used_s else since_s)
    if record.state not in HOLDING_STATES or now_s <= since_s or since_s <= 0.0:
        return []
    spec, number = record.spec, held(record.allocation)
    cores = processes(record) * spec.cores if spec.gpus else number * (spec.cores or 1.0)
    if stops and spec.gpus:  # Some of its nodes may be free of it already.
        left = sum(map(len, record.gpu_ids.values()))
        number, cores = left, cores * left / max(1, number)
    part, placed = aggregation.means(now_s)
    found, day = [], int(since_s // DAY_S)
    while (begun_s := max(since_s, day * DAY_S)) < now_s:
        here_s = min(now_s, (day + 1) * DAY_S) - begun_s
        sums = Sums(
            gpu_s=number * here_s if spec.gpus else 0.0,
            core_s=cores * here_s if number else 0.0,
            standalone_core_s=spec.servers * core_share * placed * here_s,
            aggregator_core_s=part * core_share * here_s,
        )
        found.append(DayUse(day=day, tenant=spec.tenant, sums=sums))
        day += 1
    return found


def counted(record: JobRecord, final: JobState | None, now_s: float) -> list[DayUse]:
    """Return the job itself, as one that was submitted, and that ended if it did."""
    tenant, submitted = record.spec.tenant, Sums(submitted=1)
    found = [DayUse(day=_day(record.submitted_s), tenant=tenant, sums=submitted)]
    if final is not None:
        found.append(DayUse(day=_day(now_s), tenant=tenant, sums=Sums(**{final: 1})))
    return found


def merged(usage: Sequence[DayUse], more: Iterable[DayUse]) -> tuple[DayUse, ...]:
    """Add to a job's use; by day, the oldest first."""
    sums = {(each.day, each.tenant): each.sums for each in usage}
    for each in more:
        sums[each.day, each.tenant] = sums.get((each.day, each.tenant), NOTHING) + each.sums
    while len(sums) > JOB_DAYS_MAX:
        first = min(sums)
        then = min((key for key in sums if key > first and key[1] == first[1]), default=min(
            key for key in sums if key > first
        ))  # fmt: skip
        sums[then] += sums.pop(first)
    return tuple(
        DayUse(day=day, tenant=tenant, sums=sums[day, tenant]) for day, tenant in sorted(sums)
    )


def to_now(record: JobRecord, running: Iterable[DayUse], now_s: float) -> tuple[DayUse, ...]:
    """Return all that the job has used until now. `running`: what its record does not say yet."""
    if record.state in TERMINAL_STATES:
        return record.usage
    return merged(record.usage, [*running, *counted(record, None, now_s)])


@dataclass(slots=True)
class Usage:
    """The sums of jobs that were forgotten, and totals of each tenant for metrics."""

    days_max: int
    records: dict[str, UsageRecord] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    """Keys of damaged records, which stay as they are."""
    totals: dict[str, Sums] = field(default_factory=dict)
    """Tenant -> all that ended or stopped, kept days only at a restart."""
    _marks: set[tuple[JobId, float]] = field(default_factory=set)
    """Jobs that a former master put into the sums, and when they ended."""
    forgetting: set[JobId] = field(default_factory=set)
    """Jobs that are in the sums, and whose records are still to be deleted."""
    _swept: int = -1

    def recover(self, records: dict[str, Any]) -> None:
        """Take what a former master stored."""
        self.records = {key: r for key, r in records.items() if isinstance(r, UsageRecord)}
        for record in self.records.values():
            self._marks |= record.counted.items()
            for sums in record.days.values():
                self._total(record.tenant, sums)

    def has(self, record: JobRecord) -> bool:
        """Say whether a former master put the job into the sums already."""
        mark = JobId(record.spec.id), record.finished_s
        return record.state in TERMINAL_STATES and mark in self._marks

    def note(self, more: Iterable[DayUse]) -> None:
        """Add to the totals what was stored with a job's record."""
        for each in more:
            self._total(each.tenant, each.sums)

    def forget(self, record: JobRecord) -> Iterator[tuple[str, UsageRecord]]:
        """Put the job's use into its tenants' sums; yields keys and records to store."""
        id = JobId(record.spec.id)
        self.forgetting.add(id)
        by_key: dict[str, list[DayUse]] = {}
        for each in record.usage:
            by_key.setdefault(self._key(each), []).append(each)
        for key, uses in by_key.items():
            kept = self.records.get(key) or UsageRecord(tenant=uses[0].tenant)
            days = dict(kept.days)
            for each in uses:
                day = str(each.day)
                days[day] = days.get(day, NOTHING) + each.sums
            marks = {job: s for job, s in kept.counted.items() if job in self.forgetting}
            marks[id] = record.finished_s
            self.records[key] = UsageRecord(tenant=kept.tenant, days=days, counted=marks)
            yield key, self.records[key]

    def outdated(self, now_s: float) -> list[str]:
        """Drop months that are over for longer than `days_max`; returns their keys, once a day."""
        today = _day(now_s)
        if today == self._swept:
            return []
        self._swept = today
        old = [
            key for key, r in self.records.items() if max(map(int, r.days)) < today - self.days_max
        ]
        for key in old:
            del self.records[key]
        return old

    def _total(self, tenant: str, sums: Sums) -> None:
        self.totals[tenant] = self.totals.get(tenant, NOTHING) + sums

    def _key(self, use: DayUse) -> str:
        month = f"{_FIRST + timedelta(days=use.day):%Y-%m}"
        tenant = urlsafe_b64encode(use.tenant.encode()).decode().rstrip("=")
        key = f"{month}.{tenant}" if tenant else month
        return f"{key}.again" if key in self.unreadable else key


def rows(
    usage: Usage, used: Iterable[tuple[JobRecord, tuple[DayUse, ...]]], ask: GetUsage
) -> list[UsageRow]:
    """List what was asked for, by tenant, job and day. `used`: the jobs that are known, each with
    all that it used until now. Jobs that were forgotten are in the rows of tenants and days."""
    sums: dict[tuple[str, str, int], Sums] = {}

    def add(tenant: str, job: str, day: int, more: Sums) -> None:
        if day < ask.since_day or ask.tenant not in (None, tenant):
            return
        key = (tenant, job if ask.by == "job" else "", day if ask.by == "day" else 0)
        sums[key] = sums.get(key, NOTHING) + more

    for record in usage.records.values() if ask.by != "job" else ():
        for day, more in record.days.items():
            add(record.tenant, "", int(day), more)
    for job, uses in used:
        for each in uses:
            add(each.tenant, job.spec.id, each.day, each.sums)
    return [
        UsageRow(tenant=tenant, job=job, day=day if ask.by == "day" else None, sums=sums[key])
        for key in sorted(sums, key=lambda key: (key[2], key[0], key[1]))
        for tenant, job, day in (key,)
    ]


def _day(at_s: float) -> int:
    return int(at_s // DAY_S)
