"""The seam between a queue-ordered policy and the walk down its queues."""

from typing import Any, Protocol

from slackwater.services.master.scheduling.policies.queue_index import Key
from slackwater.services.master.scheduling.view import JobView, View


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
