"""The failpoints that a cluster under load passes, and the unit that passes each."""

from collections.abc import Iterator
from typing import Final

from slackwater.common.base import failpoints

UNITS: Final = {
    "master": "master-m1",
    "controller": "controller-c1",
    "profiler": "profiler-p1",
    "worker": "worker-w1",
    "aggregator": "aggregator-a1",
}
OF_WRITERS: Final = ("persist.", "put.", "witness.")
WRITERS: Final = ("master", "controller")
"""Services that have buckets of their own; the others pass no point of OF_WRITERS."""
ONCE: Final = (
    "epoch.", "recover.", "lease.", "drain.", "release.", "measure.", "host.", "copy.",
)  # fmt: skip
"""Points that a life passes once; others are tried at the second time."""
ELSEWHERE: Final = {
    "aggregator.copy.": "a drain: tests/faults/test_kills.py, tests/integration/aggregator",
    "aggregator.checkpoint.": "a checkpoint: tests/faults/test_saved_jobs.py",
    "aggregator.request.": "a migration: tests/integration/aggregator",
    "aggregator.publish.": "a migration",
    "profiler.request.": "it sends no command",
    "profiler.reply.": "nobody asks it, but for its health",
    "worker.publish.": "it tells no fact",
}
"""Points that this load does not lead to: what does."""


def reached() -> Iterator[tuple[str, str]]:
    """Yield (unit, failpoint) of all that are passed here."""
    for name in failpoints.names():
        service, _, point = name.partition(".")
        if service not in UNITS or any(name.startswith(each) for each in ELSEWHERE):
            continue
        if point.startswith(OF_WRITERS) and service not in WRITERS:
            continue
        yield UNITS[service], name


def hit(name: str) -> int:
    """Return the time of passing at which something is to happen."""
    return 1 if name.partition(".")[2].startswith(ONCE) else 2


def faults() -> Iterator[str]:
    """Yield each failpoint with each action, as tests/chaos/faults.py takes it."""
    for unit, name in reached():
        for action in actions(name):
            yield f"point:{unit}:{name}={action}@{hit(name)}"


def actions(name: str) -> Iterator[str]:
    """Yield what is tried at a point."""
    yield "kill"
    if name.endswith(("drain.before", "release.before")):
        return  # Else it ends in good order, and is not started again.
    yield "delay(0.5)"
    if failpoints.failure(name) is not None:
        yield "error"
