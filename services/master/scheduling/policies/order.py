"""The seam between a queue-ordered policy and those that walk its queues and explain them."""

from collections.abc import Mapping
from typing import Any, Protocol

from slackwater.schemas.base import JobId
from slackwater.services.master.scheduling.policies.queue_index import Key, Level, Queues
from slackwater.services.master.scheduling.view import Allocation, JobView, Policy, View


class Order(Protocol):
    """An order over jobs, as the walk needs to know it. `QueuePolicy` explains the members."""

    strict: bool
    running_first: bool
    keys_move: bool

    def key_now(self, job: JobView, now_s: float, notes: Any) -> Key:
        """A running job's key at this instant."""
        ...

    def protects(self, view: View) -> bool:
        """Say whether any running job can be protected: the walk is shorter where none is."""
        ...

    def protected_until_s(self, job: JobView, view: View) -> float:
        """When a running job may be preempted again."""
        ...


class Explained(Order, Policy, Protocol):
    """An order whose waiting jobs can be told why they wait."""

    def fresh_notes(self) -> Any: ...

    def update(self, view: View, memory: Any) -> Queues:
        """Bring the queues up to the view."""
        ...

    def place(self, job: JobView, now_s: float, notes: Any) -> tuple[Level, Key, float]: ...

    def wants_consolidation(self, job: JobView, notes: Any) -> str: ...

    def next_s(
        self,
        view: View,
        queues: Queues,
        allocations: Mapping[JobId, Allocation],
        protected_end_s: float,
    ) -> float:
        """When to decide again while jobs wait."""
        ...
