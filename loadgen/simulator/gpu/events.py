"""The engine's events: (instant, kind, number, generation), on one heap.

Kinds are numbered in the order in which those of one instant happen. `number` is a job's, or a
node's index; an event of a run whose generation is over is stale.
"""

from typing import Final

RUN: Final = 0
"""A run has something to do of its own: its end, or a phase."""
LOST: Final = 1
BACK: Final = 2
"""A node fails; it is repaired, or provisioned."""
ARRIVAL: Final = 3
WAKE: Final = 4
"""The policy asked to be woken."""

Heap = list[tuple[float, int, int, int]]
