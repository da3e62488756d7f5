"""The interval at which a job is saved that leaves it to its controller (Qiao 2021, 5.3 and 5.4;
common/domains/models/rework.py).

Saving often costs time, and so does what is trained again after a failure. How much that is follows
from how fast training contracts, which the distances between what was saved tell, and from the part
of the parameters that one aggregator has. Pure. Nothing of it is durable: a job begins with the
shortest interval, and does again after a restart of the controller.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Final

from slackwater.common.domains.models.rework import (
    MOVES_MIN,
    SLOWEST,
    Move,
    best_interval,
    contraction_of,
)

MOST_S: Final = 3600.0
STEP_MAX: Final = 2.0
"""The interval becomes at most so many times longer or shorter at once."""
MOVES_MAX: Final = 8
TELL_AT: Final = 1.25
"""Times longer or shorter than was told before."""


@dataclass(slots=True)
class SaveInterval:
    every_s: float | None = None
    """None: it is not known yet."""
    contraction: float | None = None
    """Estimated from the newest saves; None: they do not tell, as where aggregators have no room to
    remember what they saved. Then all of what is lost counts as to be trained again."""
    losses: int = 0
    """How often an aggregator lost buckets of the job."""
    _moves: deque[Move] = field(default_factory=lambda: deque(maxlen=MOVES_MAX))
    _stretches: int = 0
    """Saves that went on from the one before."""
    _first_s: float = inf
    _newest: tuple[int, float] | None = None
    """Iteration of the newest save, and when it began."""
    _told_s: float = 0.0

    def saved(
        self,
        iteration: int,
        begun_s: float,
        took_s: float,
        moved: float | None,
        aggregators: int,
        mtbf_s: float,
        least_s: float,
    ) -> bool:
        """Learn from a save of all, and choose the next interval. `moved`: the norm of what changed
        since the one before; None: not known. `aggregators`: how many have a part of it; `mtbf_s`:
        seconds in which one of them loses its memory once. Says whether people are to be told."""
        self._first_s = min(self._first_s, begun_s)
        newest, self._newest = self._newest, (iteration, begun_s)
        if newest is None or iteration <= newest[0] or begun_s <= newest[1]:
            return False
        self._stretches += 1
        if moved is not None:
            self._moves.append(Move(newest[0], iteration, moved))
        self.contraction = contraction_of(list(self._moves))
        if self._stretches < MOVES_MIN:
            return False
        wanted = best_interval(
            self.contraction or SLOWEST,
            iteration_s=(begun_s - newest[1]) / (iteration - newest[0]),
            checkpoint_s=max(took_s, 1e-3),
            failures_per_s=self.failures_per_s(begun_s, aggregators, mtbf_s),
            lost=1.0 / aggregators,
        ).period_s
        before = self.every_s or least_s
        wanted = min(max(wanted, before / STEP_MAX), before * STEP_MAX)
        self.every_s = now = min(max(wanted, least_s), max(MOST_S, least_s))
        told = max(now, self._told_s) >= TELL_AT * min(now, self._told_s)
        if told:
            self._told_s = now
        return told

    def failures_per_s(self, now_s: float, aggregators: int, mtbf_s: float) -> float:
        """Return how often the job is to expect a loss: one in the time given, before anything was
        seen, and what was."""
        watched_s = max(0.0, now_s - self._first_s)
        return (1 + self.losses) / (mtbf_s / aggregators + watched_s)

    @property
    def described(self) -> str:
        """Say by what it was chosen."""
        if self.contraction is None:
            how = "it is not known by what an iteration contracts"
        else:
            how = f"an iteration contracts by {self.contraction:.6g}"
        return f"saved every {self.every_s:.3g} s: {how}"
