"""Index the jobs' records by aggregator: updated with every change, read at every step.

Everything here follows from the records of the jobs (tests reckon it anew and compare). A record
that changes takes its old entries out and puts its new ones in, so that a step costs what has
changed and not what is there.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slackwater.schemas.base import AggregatorId, JobId
from slackwater.schemas.placement import JobPlacement

_NOWHERE: Final[frozenset[AggregatorId]] = frozenset()


class Whereabouts(NamedTuple):
    """Lists the aggregators that a record names."""

    record: JobPlacement
    homes: frozenset[AggregatorId]
    """Aggregators that hold the job's buckets, or will once they have moved."""
    involved: frozenset[AggregatorId]
    """Aggregators of `homes`, those that buckets leave, and the job's temporary ones."""

    @classmethod
    def of(cls, record: JobPlacement) -> "Whereabouts":
        places = {place.aggregator for place in record.places}
        targets = {place.aggregator for place in record.target}
        everywhere = places | targets | set(record.temporary)
        return cls(record, frozenset(targets or places), frozenset(everywhere))


@dataclass(slots=True)
class Sharing:
    """The jobs of one policy that share aggregators."""

    homes: Counter[AggregatorId] = field(default_factory=Counter)
    """How many of them are at home there."""
    used: Counter[AggregatorId] = field(default_factory=Counter)
    """The same, with those that may never leave where they were."""
    settled: list[JobId] = field(default_factory=list)
    """Jobs of the policy that count for a placement: they are on shared aggregators, or on their
    way there."""


class _Entry(NamedTuple):
    """A job as it was put in."""

    where: Whereabouts
    policy: str
    shares: bool
    used: frozenset[AggregatorId]
    settled: bool


class Index:
    def __init__(self) -> None:
        self.living: list[JobId] = []
        """Jobs that have not ended, in the order of their ids."""
        self.involved: Counter[AggregatorId] = Counter()
        """Aggregator -> jobs that have anything to do with it, ended ones too."""
        self.temporary: Counter[AggregatorId] = Counter()
        """Aggregator -> living jobs for whose profiling it is."""
        self.homes: Counter[AggregatorId] = Counter()
        """Aggregator -> living jobs that are at home there."""
        self.crowded: Counter[AggregatorId] = Counter()
        """Where a living job has lost speed."""
        self._users: dict[AggregatorId, set[JobId]] = {}
        self._sharing: dict[str, Sharing] = {}
        self._entries: dict[JobId, _Entry] = {}

    # Changes --------------------------------------------------------------------------------------

    def follow(self, where: Whereabouts, policy: str, *, shares: bool) -> None:
        """Note that the job's record is new or has changed. `shares`: whether jobs of its policy
        share."""
        record = where.record
        id = record.plan.job
        self.forget(id)
        self.involved.update(where.involved)
        living = record.phase != "released"
        shares = living and shares and not record.protected
        # One that is on its way to shared ones counts there: two decided within a second would
        # else each take the same room.
        counts = bool(record.places) and (bool(record.target) or not record.temporary)
        unprofiled = record.cause == "unprofiled"  # It may never leave where it is (idling.py).
        used = (where.involved if unprofiled else where.homes) if shares else _NOWHERE
        settled = living and not record.protected and counts
        self._entries[id] = _Entry(where, policy, shares, used, settled)
        if not living:
            return
        insort(self.living, id)
        self.temporary.update(record.temporary)
        self.homes.update(where.homes)
        self.crowded.update(record.crowded)
        for home in where.homes:
            self._users.setdefault(home, set()).add(id)
        sharing = self._sharing.setdefault(policy, Sharing())
        sharing.used.update(used)
        if shares:
            sharing.homes.update(where.homes)
        if settled:
            insort(sharing.settled, id)

    def forget(self, id: JobId) -> None:
        """Forget the job."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        where, record = entry.where, entry.where.record
        _less(self.involved, where.involved)
        if record.phase == "released":
            return
        del self.living[bisect_left(self.living, id)]
        _less(self.temporary, record.temporary)
        _less(self.homes, where.homes)
        _less(self.crowded, record.crowded)
        for home in where.homes:
            self._users[home].discard(id)
            if not self._users[home]:
                del self._users[home]
        sharing = self._sharing[entry.policy]
        _less(sharing.used, entry.used)
        if entry.shares:
            _less(sharing.homes, where.homes)
        if entry.settled:
            del sharing.settled[bisect_left(sharing.settled, id)]

    # Questions ------------------------------------------------------------------------------------

    def users(self, homes: Iterable[AggregatorId]) -> list[JobId]:
        """List living jobs that are at home on any of them, in the order of their ids."""
        return sorted(set().union(*(self._users.get(home, ()) for home in homes)))

    def policies(self) -> list[str]:
        """List the policies that place a living job, or did before."""
        return sorted(self._sharing)

    def settled(self, policy: str) -> list[JobId]:
        sharing = self._sharing.get(policy)
        return sharing.settled if sharing is not None else []

    def shared(self, policy: str) -> list[AggregatorId]:
        """List aggregators that hold only jobs which share by `policy`, in the order of their
        ids."""
        sharing = self._sharing.get(policy)
        if sharing is None:
            return []
        temporary, homes = self.temporary, self.homes
        shared_by = sharing.homes
        return sorted(
            id for id in sharing.used if id not in temporary and homes[id] == shared_by[id]
        )

    def everything(self) -> Mapping[str, object]:
        """Return everything, to compare it with what the records say."""
        return {
            "living": self.living,
            "involved": self.involved,
            "temporary": self.temporary,
            "homes": self.homes,
            "crowded": self.crowded,
            "users": self._users,
            "sharing": {name: each for name, each in self._sharing.items() if each != Sharing()},
        }


def _less(counts: Counter[AggregatorId], ids: Iterable[AggregatorId]) -> None:
    """Subtract, and delete the keys whose count becomes 0."""
    for id in ids:
        if counts[id] == 1:
            del counts[id]
        else:
            counts[id] -= 1
