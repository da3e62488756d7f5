"""Early folds: parts of a bucket's next version folded before every push is whole. Pure, but
`fold_ahead`.

Slots that are written from afar fill from their beginning. What every worker has written can be
folded while the rest is on its way: into the other buffers, so that nothing counts before the
commit. What was folded is worth nothing once a slot may hold another gradient than it did, because
its worker attached anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slackwater.common.base.failpoints import failpoint
from slackwater.common.domains.slots.gradient_squares import FoldSquares
from slackwater.common.domains.slots.region import SlotRegion


@dataclass(slots=True, eq=False)
class Ahead:
    """Elements [0, done) of `version`. The event loop writes `upto` and `over`, the kernel's thread
    all else."""

    version: int
    upto: int = 0
    """Elements that may be folded."""
    done: int = 0
    clean: bool = True
    """All was finite."""
    step: object = None
    """The scalars that it was folded with."""
    squares: FoldSquares | None = None
    """The squares of its gradients, where they are wanted."""
    cpu_s: float = 0.0
    over: bool = False
    """No more of it: the fold itself has begun, or it is void."""
    queued: bool = False


class Parts:
    """The parts of one bucket: how far each rank's slot is, and what was made of it."""

    def __init__(self, workers: int, elements: int) -> None:
        self.at_work = 0
        """How many the executor has. While it has one the region must stay."""
        self._elements = elements
        self._there = [0] * workers
        self._ahead: Ahead | None = None

    @property
    def begun(self) -> bool:
        """Say whether something of the next version may be folded, or is just being."""
        return self._ahead is not None or self.at_work > 0

    def arrived(self, rank: int, elements: int) -> None:
        """Note that the rank's first `elements` elements have arrived."""
        self._there[rank] = elements

    def ready(self, version: int, pushed: Sequence[int]) -> Ahead | None:
        """Return the part of `version` to fold, if that is more than before. `pushed`: the words of
        the ranks that count."""
        upto = min(
            self._elements if word == version else there
            for word, there in zip(pushed, self._there, strict=False)
        )
        ahead = self._ahead
        if upto == 0 or (ahead is not None and upto <= ahead.upto):
            return None
        if ahead is None:
            ahead = self._ahead = Ahead(version)
        ahead.upto = upto
        return ahead

    def take(self) -> Ahead | None:
        """Return what was folded ahead, and stop: the fold begins, or the bucket leaves."""
        ahead = self._ahead
        self._there = [0] * len(self._there)
        self._void()
        return ahead

    def forget(self, rank: int) -> None:
        """Forget the rank's arrived elements: its slot may hold another gradient from now on."""
        if self._there[rank]:
            self._there[rank] = 0
            self._void()

    def _void(self) -> None:
        if self._ahead is not None:
            self._ahead.over = True
            self._ahead = None


def fold_ahead(slots: SlotRegion, ahead: Ahead) -> bool:
    """A chunk, in the kernel's thread; whether there is more to do."""
    from slackwater.common.domains.slots import folding  # numba: loaded by `warm` before any push.

    lo = ahead.done
    hi = min(ahead.upto, lo + folding.CHUNK_ELEMENTS)
    if ahead.over or lo >= hi:
        return False
    failpoint("aggregator.fold.mid")
    if lo == 0:
        ahead.squares = folding.squares_of(slots)
    clean, step = folding.fold_span(slots, lo, hi, ahead.squares)
    if step is not ahead.step:  # The first chunk, or a worker changed its mind: begin again.
        ahead.done, ahead.clean, ahead.step = 0, True, step
        if lo:
            return True
    ahead.clean &= clean
    ahead.done = hi
    return ahead.upto > hi


def done_by(slots: SlotRegion, ahead: Ahead | None) -> int:
    """How many elements the fold of the region's next version need not fold again."""
    from slackwater.common.domains.slots import folding

    if ahead is None or not ahead.clean or ahead.version != slots.version + 1:
        return 0
    return ahead.done if ahead.step is folding.step_of(slots) else 0
