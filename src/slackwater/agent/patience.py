"""A wait for other ranks, and what is learned of them meanwhile.

After a moment the Agent reads in the bucket's region whose push is missing, and asks the master
where those ranks are, once a second. A rank that has ended will never push: the wait ends, and says
so. One that is silent is named, and one that is being started again is given its time.
"""

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from slackwater.agent.control import Control
from slackwater.agent.worker_bucket import Waiter, WorkerBucket
from slackwater.common.base.errors import Rejected, Retryable, SlackwaterError
from slackwater.common.domains.slots.virtual import by_process
from slackwater.schemas.job_requests import MissingRanks
from slackwater.schemas.placement import JobPlan

_log = logging.getLogger("slackwater.agent")
ASK_AFTER_S: Final = 2.0
ASK_EVERY_S: Final = 1.0
WARN_AFTER_S: Final = 30.0


def missing(plan: JobPlan, rank: int, iteration: int, pushed: Sequence[int]) -> dict[int, int]:
    """The ranks without whose push this one does not go on after `iteration`, and the newest that
    each has pushed."""
    if plan.consistency == "asynchronous":
        return {}
    needed = iteration - (plan.staleness if plan.consistency == "stale-synchronous" else 0)
    return {other: word for other, word in enumerate(pushed) if word < needed and other != rank}


class Patience:
    """Ends one rank's waits that have become hopeless. `start` runs a coroutine in the Agent's
    thread; `fail` ends all waits."""

    def __init__(
        self,
        who: str,
        rank: int,
        start: Callable[[Coroutine[Any, Any, None]], None],
        fail: Callable[[SlackwaterError], None],
    ) -> None:
        self._who, self._rank, self._start, self._fail = who, rank, start, fail
        self._asking = False
        self.told: MissingRanks | None = None
        """The last answer about the ranks that this wait, or the one before, is for."""

    @property
    def reason(self) -> str:
        """A clause for the end of a sentence; empty: nothing is known."""
        return f": {self.told.reason}" if self.told is not None else ""

    @property
    def _restarting(self) -> bool:
        return self.told is not None and self.told.restarting

    def sleep(
        self,
        waiter: Waiter,
        buckets: Sequence[WorkerBucket],
        deadline_s: float,
        plan: JobPlan | None,
        control: Control | None,
    ) -> WorkerBucket | None:
        """Wait in the program's thread until all buckets have settled, or waits have failed: None.
        After `deadline_s` return the first bucket that has not. The time of a restart does not
        count."""
        warned, self.told = False, None
        began_s, pause_s = time.monotonic(), ASK_AFTER_S
        until_s = began_s + deadline_s
        while (left_s := until_s - time.monotonic()) > 0.0:
            if waiter.sleep(min(left_s, pause_s)):
                return None
            pause_s, now_s = ASK_EVERY_S, time.monotonic()
            if self._restarting:
                until_s = now_s + deadline_s
            if self.reason and now_s - began_s > WARN_AFTER_S and not warned:
                warned = True
                _log.warning("%s%s", self._who, self.reason)
            late = next((bucket for bucket in buckets if not bucket.settled), None)
            if late and plan and control and not self._asking:
                self._asking = True
                self._start(self._ask(late, now_s - began_s, plan, control))
        return next((bucket for bucket in buckets if not bucket.settled), None)

    async def _ask(
        self, bucket: WorkerBucket, waited_s: float, plan: JobPlan, control: Control
    ) -> None:
        try:
            slots, iteration = bucket.slots, bucket.iteration
            if slots is None or bucket.settled:
                return
            pushed = await slots.all_pushed()
            if plan.virtual:
                pushed = by_process(pushed, slots.sizes.at(iteration).workers)
            elif plan.active:
                pushed = pushed[: slots.sizes.newest.workers]
            ranks = missing(plan, self._rank, iteration, pushed)
            if not ranks:
                self.told = None
                return
            self.told = await control.missing(iteration, waited_s, ranks)
        except (Retryable, Rejected) as error:  # The wait goes on, without names.
            _log.info("%s: whom it waits for is not known: %s", self._who, error)
            return
        finally:
            self._asking = False
        if self.told.final and not bucket.settled:
            self._fail(Rejected(f"{self._who}: {self.told.reason}"))
