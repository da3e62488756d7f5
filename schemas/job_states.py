"""The states of a job, and which of them may follow which.

    pending --> starting --> running --> completed | failed | cancelled
                  ^  |          |
                  |  v          v
                paused <---- stopping

A job that is `pending` has never held anything. `starting`: its allocation is stored, nobody else
is given it, and its processes are on their way. `stopping`: its processes have been told to save
and to end; what they hold is not free before the last of them has ended. `paused`: it holds
nothing and has work behind it. All but `pending` and `paused` hold their allocation. A job without
GPUs may go straight from `pending` to `running`, and any job that has not ended may end.
"""

from typing import Final, Literal

JobState = Literal[
    "pending", "starting", "running", "stopping", "paused", "completed", "failed", "cancelled"
]
TERMINAL_STATES: Final[frozenset[JobState]] = frozenset({"completed", "failed", "cancelled"})
HOLDING_STATES: Final[frozenset[JobState]] = frozenset({"starting", "running", "stopping"})
"""A job in one of these holds its allocation."""
WAITING_STATES: Final[frozenset[JobState]] = frozenset({"pending", "paused"})
"""A job in one of these may be given an allocation."""
STATE_SAID: Final[dict[JobState, str]] = {
    "pending": "is pending",
    "starting": "is starting",
    "running": "is running",
    "stopping": "is stopping",
    "paused": "is paused",
    "completed": "has completed",
    "failed": "has failed",
    "cancelled": "was cancelled",
}
"""Words for a job's state in the middle of a sentence."""


def _or_end(*states: JobState) -> frozenset[JobState]:
    return TERMINAL_STATES.union(states)


TRANSITIONS: Final[dict[JobState, frozenset[JobState]]] = {
    "pending": _or_end("starting", "running"),
    "starting": _or_end("running", "stopping", "paused"),
    "running": _or_end("stopping", "paused"),
    "stopping": _or_end("starting", "paused"),
    "paused": _or_end("starting", "running"),
    "completed": frozenset({"pending"}),
    "failed": frozenset({"pending"}),
    "cancelled": frozenset({"pending"}),
}
"""State -> the states that may follow it. To remain in a state is always possible; from an ended
state to `pending` leads a new run alone. `starting` or `running` to `paused`: its node was lost, or
refused it, so that no process of it is to be waited for."""
