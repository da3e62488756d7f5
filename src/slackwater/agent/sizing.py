"""How many workers count in an elastic job's iterations: rank 0's decision.

Another number counts from an iteration on of which rank 0 has pushed nothing yet. Rank 0 writes so
into every bucket's region (common/domains/slots/sizes.py) as soon as the version before is there,
so that those who join begin with that iteration together with everybody else, and at the latest
with its push. So no version is waited for twice, and none is lost.

In a job of virtual ranks it counts one iteration later still, and is written before rank 0's push
of the iteration before: whoever has that version knows whose gradients the next one needs of it.
"""

from slackwater.common.domains.slots.sizes import Size, Sizes
from slackwater.schemas.placement import JobPlan


def size_at(
    plan: JobPlan | None, found: Sizes | None, sizing: "Sizing | None", iteration: int
) -> Size:
    """Return how many workers count in an iteration. `found`: what a region says; `sizing`: what
    rank 0 decided. Each worker of an asynchronous job counts its own iterations: the newest size
    counts, and no number of gradients is common to all."""
    if plan is None or found is None or not plan.active:
        return Size(1, (plan.active or plan.workers) if plan is not None else 0, 0)
    if plan.consistency != "synchronous":
        return Size(1, found.newest.workers, 0)
    return sizing.at(iteration) if sizing is not None else found.at(iteration)


class Sizing:
    """Sizes that rank 0 found in regions, or decided. The program's thread decides, the Agent's own
    reads."""

    def __init__(self, workers: int, least: int = 0, *, ahead: bool = False) -> None:
        """`workers`: the number that the process was started with; `ahead`: others must know of a
        new number by the version before it."""
        self._ahead = int(ahead)
        self._unpushed = 1
        """No process of this rank can have pushed this iteration, if others must know ahead."""
        self.wanted = workers
        """Set by whoever hears the master; counts from the next boundary on."""
        self.least = least
        """Workers of the present ones that must go on counting, whatever is wanted: what they hold
        is not moved yet."""
        self.opened = False
        """The process has all buckets: it decides from now on."""
        self._known: tuple[Size, ...] = ()
        self.applied: Size | None = None
        """The newest one of which an iteration has been applied."""

    @property
    def newest(self) -> Size:
        return self._known[-1]

    @property
    def target(self) -> int:
        """Return how many are to count: those that are wanted, and those that may not leave."""
        return max(self.wanted, min(self.least, self.newest.workers))

    def at(self, iteration: int) -> Size:
        """Return the size that counts in the iteration."""
        held = [size for size in self._known if size.since <= iteration]
        return held[-1] if held else self._known[0]

    def found(self, sizes: Sizes, version: int, pushed: int, *, bare: bool) -> None:
        """Take in what a region says that was attached; `pushed`: this rank's word in it. At the
        start of a process, a push that waits there for ranks which are not started again counts
        for those that are."""
        newest = sizes.newest
        self._unpushed = max(self._unpushed, version + 2)
        if bare and not self._known:
            newest = Size(1, self.wanted, 0)
        if not self._known or newest.since > self.newest.since:
            self._add(newest)
        standing = not self.opened and not bare and pushed == version + 1
        if standing and self.at(pushed).workers > self.wanted:
            self._add(self.at(pushed).then(pushed, self.wanted))

    def written_with(self, iteration: int) -> Size:
        """Return the size that must be in a region before the push of the iteration is."""
        return self.newest if self._ahead else self.at(iteration)

    @property
    def announced(self) -> int:
        """The iteration before whose push the newest size must be in a region."""
        return self.newest.since - self._ahead

    def decide(self, since: int) -> bool:
        """From the iteration `since` on, let as many count as are wanted. False: they do."""
        newest, wanted = self.newest, self.target
        if newest.workers == wanted or (self._ahead and newest.since > since):
            return False  # A change that is under way counts first.
        if self._ahead:
            since = max(since, self._unpushed) + 1
        since = max(since, newest.since)
        self._add(self.at(since).then(since, wanted))
        return True

    def reached(self, iteration: int) -> bool:
        """Note that the iteration has been applied; tell once whether it is the first that it knows
        of the newest size."""
        newest = self.newest
        if newest == self.applied or newest.since > iteration:
            return False
        self.applied = newest
        return True

    def _add(self, size: Size) -> None:
        self._known = (*(each for each in self._known if each.since < size.since), size)[-3:]
