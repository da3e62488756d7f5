"""An Agent whose tensors are tables: each push adds to them by itself, and reads see the newest.

The job is asynchronous, its rule SGD with rate 1: what is pushed is the update with the other sign,
and float32 adds it exactly as it is. An iteration of this rank is a batch of updates of all tables.
Its number tells a batch that is pushed again after a kill from the next one, in each bucket by
itself (common/domains/slots/consistency.py).
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from slackwater.agent.client import Agent
from slackwater.agent.identity import JOB
from slackwater.agent.local import Local
from slackwater.agent.session import Session
from slackwater.agent.snapshot import Snapshot
from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.base import limits
from slackwater.common.base.errors import DeadlineExceeded
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.job_requests import Meeting
from slackwater.schemas.jobs import FROM_VARIABLE, UpdateRule
from slackwater.schemas.progress import ProgramProgress

_log = logging.getLogger("slackwater.agent")
ADDING: Final = UpdateRule(name="sgd", learning_rate=1.0, weight_decay=0.0)
"""The rule by which a push of -x adds x."""


class TableAgent(Agent):
    """`tables`: name -> the values that the job begins with, if this is rank 0."""

    def __init__(self, tables: Mapping[str, Floats], **options: Any) -> None:
        """Raises what Agent raises. `options`: Agent's."""
        has_job = options.get("job") or os.environ.get(JOB)
        super().__init__(
            tensors=tables,
            update=ADDING,
            consistency="asynchronous" if has_job else None,
            **options,
        )
        self._telling: Future[Meeting] | None = None
        self._zeros = {name: np.zeros_like(values) for name, values in tables.items()}
        self._level()

    def _level(self) -> None:
        """Push batches without updates where buckets have counted less of this rank than others
        have: those whose memory was lost, and in which a checkpoint or another worker's copy
        stands. They may lack one more: that which a kill interrupted is completed by whoever knows
        it."""
        newest = max(bucket.iteration for bucket in self._buckets) - 1
        behind = [bucket for bucket in self._buckets if bucket.iteration < newest]
        for bucket in behind:
            _log.warning(
                "job %s, rank %d: %d batches are lost in %s, with an aggregator's memory; a "
                "checkpoint's values or another host's stand in",
                self.job, self.rank, newest - bucket.iteration, bucket.names,
            )  # fmt: skip
            while bucket.iteration < newest:
                for position, spec in enumerate(bucket.tensors):
                    bucket.put(position, np.zeros(spec.shape, np.float32))
                self._session.ring(bucket)
                self._settle((bucket,))
        if behind:
            self._begin()

    def add(self, updates: Mapping[str, Floats]) -> int:
        """Add to the tables that are named, as this rank's next batch, and return its number once
        it is applied. Called again after a kill in its midst, it is completed. Raises what `push`
        and `wait` raise."""
        for name, zeros in self._zeros.items():
            update = updates.get(name)
            self.push(name, zeros if update is None else np.negative(update))
        return self.wait()

    def newest(self, name: str) -> Floats:
        """Return a table's present values, as an array of the caller's: all batches included that
        had been applied, whoever added them. Raises what `add` raises."""
        if not all(self._look(bucket) for bucket in self._buckets_of(name)):
            self.add({})  # Its answer has what was applied before it, wherever the bucket is.
        return np.array(self.pull(name))

    def _look(self, bucket: WorkerBucket) -> bool:
        """Copy a mapped bucket's newest values. False: it is not mapped here, or may have gone
        elsewhere."""
        source, session = bucket.source, self._session
        if isinstance(session, Local):
            return True
        if not isinstance(source, Snapshot) or source is not bucket.slots:
            return False
        try:
            owner = session._core.aggregator_of(bucket.index)
            here = session._core.attached(bucket.index)
            return here and source.look_again(bucket.version, owner)
        except DeadlineExceeded:  # Others' updates came too fast.
            return False

    @property
    def settled(self) -> bool:
        """Say whether nothing that was pushed is outstanding: another batch may begin."""
        return all(bucket.settled and not bucket.begun for bucket in self._buckets)

    @property
    def begins(self) -> bool | None:
        """Say whether nobody has added to the tables in this run of the job; None: the job began
        with a checkpoint, and may have been trained since."""
        if self.untouched:
            return True
        if FROM_VARIABLE not in os.environ:
            return False
        session = self._session
        first = isinstance(session, Session) and session.attempt == session.restarts == 0
        return True if first else None

    @property
    def placement(self) -> int:
        """The number under which the tables are placed: one more with each run of the job."""
        return self._session.plan.layout_epoch if self._session.plan is not None else 0

    # The number of workers ------------------------------------------------------------------------

    @property
    def wanted(self) -> int | None:
        """In rank 0 of a job whose number of workers may change: how many are to count."""
        sizing = self._session.sizing if isinstance(self._session, Session) else None
        return None if sizing is None else sizing.wanted

    def _session_of(self, *arguments: Any) -> Session | Local:
        session = super()._session_of(*arguments)
        if isinstance(session, Session):
            session.least = WORKERS_MAX  # `keep` says who may leave.
        return session

    def keep(self, least: int) -> None:
        """Let so many of the present ranks go on counting, whatever is wanted, until this is called
        again; before it was, all of them."""
        sizing = self._session.sizing if isinstance(self._session, Session) else None
        if sizing is not None:
            sizing.least = least

    @property
    def size_is_due(self) -> bool:
        """Say whether another number of workers is to count after the next batch of rank 0: it
        pushes one, empty perhaps."""
        sizing = self._session.sizing if isinstance(self._session, Session) else None
        if sizing is None:
            return False
        return sizing.target != sizing.newest.workers or sizing.newest != sizing.applied

    # Where the driver is --------------------------------------------------------------------------

    def meet(self) -> Meeting:
        """Ask where the driver listens. Raises Retryable, Rejected, TimeoutError."""
        return self._meeting().result(limits.REQUEST_TIMEOUT_S * 2)

    def meet_here(self, address: str, secret: str, progress: ProgramProgress) -> None:
        """Tell, in rank 0, where the driver listens, and how far it is: soon, unless the master is
        away. Whoever calls says it again now and then."""
        if self._telling is not None and not self._telling.done():
            return  # It is on its way.
        if self._telling is not None and (error := self._telling.exception()) is not None:
            _log.info("job %s: the master was not told where the driver is: %s", self.job, error)
        self._telling = self._meeting(address, secret, progress)

    def _meeting(
        self, address: str = "", secret: str = "", progress: ProgramProgress | None = None
    ) -> "Future[Meeting]":
        session = self._session
        assert isinstance(session, Session)
        assert session._control is not None
        asking = session._control.meet(address, secret, progress)
        return asyncio.run_coroutine_threadsafe(asking, session._loop)
