"""One checkpoint of a job's buckets, on its way: what was learned, and what to ask next. Pure.

    looking --versions known--> copying --all copied--> writing --all durable--> done
    looking, copying --nothing changed since the last--> done
    copying, writing --a bucket moved--> looking
    looking, copying, writing --given up--> failed

All buckets of a synchronous job are copied at one version, while they go on. Where it stands still
that is the version of the oldest bucket (the others still have it, in their other buffers). Where
it trains, the version is gone by the time that it is asked for: so one is named that is still to
come, each time twice as far ahead. Buckets of other jobs are copied as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from slackwater.common.base.transitions import Story
from slackwater.common.domains.slots.saved_pieces import threshold
from slackwater.schemas.checkpoints import CheckpointPhase
from slackwater.services.controller.save_interval import SaveInterval

TRANSITIONS: Final[dict[CheckpointPhase, frozenset[CheckpointPhase]]] = {
    "looking": frozenset({"copying", "done", "failed"}),
    "copying": frozenset({"writing", "looking", "done", "failed"}),
    "writing": frozenset({"done", "looking", "failed"}),
    "done": frozenset(),
    "failed": frozenset(),
}
ATTEMPTS_MAX: Final = 64
AHEAD_MAX: Final = 4096
STALLED_S: Final = 2.0
"""Seconds without a new version after which a job is taken to stand still."""
BETWEEN_S: Final = 10.0
"""Seconds after which one is given up that stands still in the middle of an iteration."""


@dataclass(slots=True)
class Saving:
    """How far a job is that is saved now and then."""

    due_s: float = 0.0
    number: int = 0
    updates: int | None = None
    """Updates since all was saved; None: it was not, in this controller's life."""
    versions: dict[int, int] = field(default_factory=dict)
    """The version of each bucket that was saved last."""
    failure: str = ""
    """Why the last one failed."""
    interval: SaveInterval = field(default_factory=SaveInterval)
    """Chosen for a job that leaves it to its controller."""


@dataclass(slots=True)
class Checkpoint:
    """`buckets`: how many the job has; `synchronous`: all are copied at one version."""

    request: str
    folder: str
    buckets: int
    synchronous: bool
    begun_s: float
    life: int = 0
    """The controller's epoch: what an earlier one ordered under the same name is another order."""
    automatic: bool = False
    """One of those that a job is saved by now and then."""
    mark: bool = False
    """One of those that a program takes now and then, to go back to."""
    fraction: float = 1.0
    """The part of the pieces that is written, those that changed most; 1: all."""
    rounded: bool = False
    """Numbers of a part are written as bfloat16, of twice as many pieces."""
    before: dict[int, int] = field(default_factory=dict)
    """The versions that the last one of the job saved."""
    phase: CheckpointPhase = "looking"
    attempts: int = 1
    version: int | None = None
    """The version to copy; None: not known yet, or each as it is."""
    iteration: int = 0
    """The name that the files get."""
    now: dict[int, int] = field(default_factory=dict)
    """The newest version of each bucket, as it was heard."""
    copied: dict[int, int] = field(default_factory=dict)
    """Bucket -> the version of its copy."""
    written: set[int] = field(default_factory=set)
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes that each aggregator has written."""
    reason: str = ""
    ended_s: float = 0.0
    unchanged: bool = False
    """It is done, as nothing changed since the last one."""
    above: int = -1
    """The bin above which pieces are written; -1: all are."""
    share: float = 0.0
    measured: bool = False
    """It is told how far the copies are from what was saved last."""
    distances: dict[str, Sequence[int]] = field(default_factory=dict)
    """Aggregator -> its histogram of distances."""
    moved: dict[str, float] = field(default_factory=dict)
    """Aggregator -> the norm of what changed in its buckets, where it is known."""
    heard: set[str] = field(default_factory=set)
    """Aggregators that have answered in this attempt."""
    story: Story = field(default_factory=Story, repr=False)
    _ahead: int = 1
    _newest: int = -1
    _grown_s: float = 0.0

    def __post_init__(self) -> None:
        self.story.begin(self.phase, "it is asked for")

    def _become(self, new: CheckpointPhase, why: str) -> None:
        self.story.move(f"checkpoint {self.request}", self.phase, new, why, TRANSITIONS)
        self.phase = new

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed")

    def fail(self, reason: str, now_s: float) -> None:
        if not self.over:
            self._become("failed", reason)
            self.reason, self.ended_s = reason, now_s

    def begin_anew(self, why: str, now_s: float) -> None:
        """Look for another version: a bucket moved, or its aggregator was restarted. What was
        written of this one is of no use, unless all of it was."""
        if self.phase == "looking" or self.over:
            return
        self._next_attempt(now_s)
        if not self.over:
            self._become("looking", why)
            self.version = None

    def _next_attempt(self, now_s: float) -> None:
        if self.attempts >= ATTEMPTS_MAX:
            self.fail(f"no version could be copied in {self.attempts} attempts", now_s)
            return
        self.attempts += 1
        self.heard.clear()
        self.copied.clear()
        self.written.clear()
        self.nbytes.clear()
        self.distances.clear()
        self.moved.clear()

    @property
    def attempt(self) -> int:
        """The name of this attempt, which no other order of the job had."""
        return self.life * (ATTEMPTS_MAX + 1) + self.attempts

    @property
    def partial(self) -> bool:
        return self.fraction < 1.0

    def _end_unchanged(self, now_s: float) -> None:
        self._become("done", "nothing changed since the last one")
        self.unchanged, self.ended_s = True, now_s

    # Copies ---------------------------------------------------------------------------------------

    def told(
        self,
        aggregator: str,
        buckets: Sequence[int],
        now: Sequence[int],
        copied: Sequence[int],
        distances: Sequence[int] = (),
        moved: float | None = None,
    ) -> None:
        """Take an aggregator's answer, in `looking` or `copying`."""
        self.heard.add(aggregator)
        if moved is not None:
            self.moved[aggregator] = moved
        if distances:
            self.distances[aggregator] = distances
        self.now.update(zip(buckets, now, strict=True))
        self.copied |= {b: at for b, at in zip(buckets, copied, strict=True) if at >= 0}

    def decide(self, now_s: float) -> bool:
        """After all aggregators have answered: go on. Returns whether they are to be asked again at
        once; else a little later."""
        newest, oldest = max(self.now.values()), min(self.now.values())
        if newest > self._newest:
            self._newest, self._grown_s = newest, now_s
        if self.phase == "looking":
            if self.now == self.before:
                self._end_unchanged(now_s)
                return False
            self._become("copying", f"versions {oldest} to {newest} are there")
            self.version = oldest if self.synchronous and not self.partial else None
            self.heard.clear()
            return True
        if len(self.copied) == self.buckets:
            self.iteration = max(self.copied.values())
            if self.partial:
                pieces = [sum(bins) for bins in zip(*self.distances.values(), strict=True)]
                if not sum(pieces[1:]):
                    self._end_unchanged(now_s)
                    return False
                fraction = min(1.0, 2.0 * self.fraction) if self.rounded else self.fraction
                self.above, self.share = threshold(pieces, fraction)
            self._become("writing", f"all buckets are copied at version {self.iteration}")
            return True
        if self.version is None:
            return False
        stalled = now_s - self._grown_s >= STALLED_S
        if now_s - self._grown_s >= BETWEEN_S and newest > oldest == self.version:
            self.fail(
                f"the job stands still between versions {oldest} and {newest}, and not all buckets "
                f"have {oldest} any more; let it train on, and try again",
                now_s,
            )
            return False
        if newest > self.version + 1 or (stalled and oldest != self.version):
            self._next_attempt(now_s)
            if not self.over:
                self._ahead = min(2 * self._ahead, AHEAD_MAX)
                self.version = oldest if stalled else newest + self._ahead
            return not self.over
        self.heard.clear()
        return False

    # Files ----------------------------------------------------------------------------------------

    def wrote(self, aggregator: str, written: Sequence[int], nbytes: int, now_s: float) -> bool:
        """Take an aggregator's answer, in `writing`. Returns whether all is durable now."""
        self.written |= set(written)
        self.nbytes[aggregator] = nbytes
        if len(self.written) < self.buckets:
            return False
        self._become("done", "all is durable")
        self.ended_s = now_s
        return True
