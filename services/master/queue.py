"""The jobs that wait for slots of worker nodes, in the order of their submission, by what they ask.

Nobody overtakes the first that some node could hold, unless that one waits for its tenant's part.
So a step looks at the first of each group (same slots asked, same tenant) and never at all that
wait.
"""

from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import JobRecord


class Group(NamedTuple):
    asked: int
    """Slots."""
    tenant: str


class Queued:
    """Use: `add` and `discard` as records change; `first` as nodes do."""

    def __init__(self) -> None:
        self._groups: dict[JobId, Group] = {}
        """Those that wait."""
        self._order: dict[Group, list[tuple[float, JobId]]] = {}
        """Heaps by (submission, id); those that left are still in them."""
        self.told: dict[Group, str] = {}
        """What its jobs were last told that they wait for."""
        self.untold: list[JobId] = []
        """Lately added: not told yet."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, id: JobId) -> bool:
        return id in self._groups

    def add(self, record: JobRecord) -> None:
        id, group = JobId(record.spec.id), Group(record.spec.workers, record.spec.tenant)
        self._groups[id] = group
        heappush(self._order.setdefault(group, []), (record.submitted_s, id))
        self.untold.append(id)

    def discard(self, id: JobId) -> None:
        self._groups.pop(id, None)

    def first(self, largest: int, closed: Collection[str] = ()) -> JobId | None:
        """Of those that ask for at most `largest` slots, tenants in `closed` left out."""
        heads = [
            self._order[group][0]
            for group in self.groups()
            if group.asked <= largest and group.tenant not in closed
        ]
        return min(heads)[1] if heads else None

    def groups(self) -> list[Group]:
        """In which somebody waits."""
        for group in list(self._order):
            order = self._order[group]
            while order and order[0][1] not in self._groups:
                heappop(order)
            if not order:
                del self._order[group]
                self.told.pop(group, None)
        return sorted(self._order)

    def members(self, group: Group) -> Iterator[JobId]:
        for _, id in sorted(self._order.get(group, ())):
            if id in self._groups:
                yield id
