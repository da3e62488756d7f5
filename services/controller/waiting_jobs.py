"""Jobs that wait for an aggregator: first come, first served, and without requests in vain.

A new job asks the master once. Refused, it stands in line and asks no more by itself. What may
change the answer wakes the line: an aggregator that is given back, comes or is emptied, one that
jobs begin to share, and now and then time alone, as a message may be lost. Then the jobs are tried
in the order in which they came, one request at a time. One that is refused stands in front of all
that need as many or more; those that need fewer are tried still. So a line of any length costs one
request for each number that somebody needs.
"""

from collections import OrderedDict
from collections.abc import Iterator
from math import inf
from typing import Final

from slackwater.schemas.base import AggregatorId, JobId, Refused

TRIED_AT_ONCE: Final = 8
"""Jobs that one step tries; the others are tried in the next, after what has come meanwhile."""
FIRST_LOOK_S: Final = 1.0


class Line:
    """`look_s`: the longest time between two looks at whether it is any better now."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._wait_s = FIRST_LOOK_S
        self._jobs: dict[JobId, None] = {}
        self._round: OrderedDict[JobId, None] = OrderedDict()
        self._short = 0
        self._why: Refused | None = None
        self._openings: frozenset[AggregatorId] = frozenset()
        self.next_s = inf
        """The time at which the line wakes without a cause."""
        self.asked: JobId | None = None
        """The job that was tried last, and asked the master."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._jobs)

    @property
    def serving(self) -> bool:
        """Say whether a job of the line is still to be tried."""
        return bool(self._round)

    def join(self, job: JobId, now_s: float) -> None:
        """Join the end of the line; a job that is in it keeps its place."""
        self._jobs.setdefault(job)
        self.next_s = now_s + self._wait_s

    def leave(self, job: JobId) -> None:
        self._jobs.pop(job, None)
        if not self._jobs:
            self._round.clear()
            self.next_s = inf

    def wake(self) -> None:
        """Try all jobs again: something has changed."""
        self._short, self._why = 0, None
        self._wait_s = FIRST_LOOK_S
        self._round = OrderedDict(self._jobs)

    def again(self, job: JobId) -> None:
        """Try the job again: it needs less than before."""
        self._round.setdefault(job)

    def look(self, openings: frozenset[AggregatorId], now_s: float) -> None:
        """Look once a tick whether to wake the line. `openings`: aggregators where a job could go
        without a new one."""
        if openings - self._openings:
            self.wake()
        elif now_s >= self.next_s:
            wait_s = min(2.0 * self._wait_s, self._look_s)
            self.wake()
            self._wait_s = wait_s
        self._openings = openings

    def note_refusal(self, need: int, why: Refused) -> None:
        """Remember that the master has no `need` aggregators now."""
        if not self._short or need < self._short:
            self._short, self._why = need, why

    def known(self, need: int) -> Refused | None:
        """Return the master's refusal if it has refused as few since the line was woken; None: ask
        it."""
        return self._why if self._short and need >= self._short else None

    def next(self) -> JobId:
        """Take the next job to try, while `serving`."""
        return self._round.popitem(last=False)[0]
