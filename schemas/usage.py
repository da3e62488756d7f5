"""The use that tenants and jobs made of a cluster: GPU hours, core hours, what sharing saved."""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    COUNT_MAX,
    FINITE_MAX,
    Count,
    JobId,
    MaybeId,
    Message,
    Record,
    Seconds,
    bound,
)
from slackwater.schemas.tenants import Tenant

UnitSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)]
"""GPUs or cores times seconds."""
Day = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
"""Days since 1970, in UTC."""
DayText = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,7}\Z")]
"""A `Day` in digits: many readers of msgpack take text alone for keys."""
DAY_S: Final = 86_400
JOB_DAYS_MAX: Final = 400
"""Entries of one job; those before are put together into the oldest."""
ROWS_MAX: Final = 10_000
UsedBy = Literal["tenant", "job", "day"]


class UsageSums(Record, kw_only=True, frozen=True, array_like=True):
    """Sums over some time and some jobs. Further fields are added at the end only."""

    gpu_s: UnitSeconds = 0.0
    """GPUs held, times seconds."""
    core_s: UnitSeconds = 0.0
    """Cores that the jobs' processes asked for, times seconds; a slot counts as one core."""
    standalone_core_s: UnitSeconds = 0.0
    """Cores that parameter servers of the jobs' own would have held, times seconds."""
    aggregator_core_s: UnitSeconds = 0.0
    """Cores of their parts of aggregators: one that n jobs share counts as 1/n for each."""
    submitted: Count = 0
    completed: Count = 0
    failed: Count = 0
    cancelled: Count = 0

    def __post_init__(self) -> None:
        bound(self, "gpu_s", "core_s", "standalone_core_s", "aggregator_core_s")
        bound(self, "submitted", "completed", "failed", "cancelled", most=COUNT_MAX)

    def __add__(self, other: "UsageSums") -> "UsageSums":
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        names = self.__struct_fields__
        return UsageSums(**{n: a + b for n, a, b in zip(names, mine, theirs, strict=True)})

    @property
    def saved_core_s(self) -> float:
        """Return the core seconds that sharing saved; below 0: it cost some."""
        return self.standalone_core_s - self.aggregator_core_s

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled


class DayUse(Record, kw_only=True, frozen=True, array_like=True):
    """The use of one job on one day, on the account of one tenant."""

    day: Day
    tenant: Tenant = ""
    sums: UsageSums = msgspec.field(default_factory=UsageSums)


class UsageRecord(Record, kw_only=True, frozen=True):
    """The master's durable record of jobs that it has forgotten: one key of the bucket `usage` for
    each tenant and month."""

    tenant: Tenant
    days: Annotated[dict[DayText, UsageSums], msgspec.Meta(max_length=31)] = msgspec.field(
        default_factory=dict
    )
    counted: Annotated[dict[JobId, Seconds], msgspec.Meta(max_length=1000)] = msgspec.field(
        default_factory=dict
    )
    """Jobs that are in these sums and whose own records may still be there -> when they ended: they
    are not counted once more."""
    epoch: Count = 0


class GetUsage(Message, kw_only=True, frozen=True, tag="usage.get"):
    """Ask for the use of whole days, running jobs counted up to now. Answered by UsageList."""

    by: UsedBy = "tenant"
    tenant: Tenant | None = None
    """None: all tenants."""
    since_day: Day = 0
    """The first day that counts."""
    offset: Count = 0
    """Rows that were listed before."""


class UsageRow(Record, kw_only=True, frozen=True):
    """One tenant, one job or one tenant's day."""

    tenant: Tenant
    job: MaybeId = ""
    day: Day | None = None
    sums: UsageSums


class UsageList(Message, kw_only=True, frozen=True, tag="usage.list"):
    rows: Annotated[tuple[UsageRow, ...], msgspec.Meta(max_length=ROWS_MAX)]
    total: Count = 0
    """Rows on all pages."""
