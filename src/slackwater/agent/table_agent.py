"""An Agent whose tensors are tables: each push adds to them by itself, and reads see the newest.

The job is asynchronous, its rule SGD with rate 1: what is pushed is the update with the other sign,
and float32 adds it exactly as it is. A table may have a rule of its own, and then has a group of
its own. An iteration of this rank is a batch of updates of all tables. Its number tells a batch
that is pushed again after a kill from the next one, in each bucket by itself
(common/domains/slots/consistency.py).
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np

from slackwater.agent.client import Agent
from slackwater.agent.control import MARK_BUDGET_S, Control
from slackwater.agent.identity import JOB
from slackwater.agent.local import Local
from slackwater.agent.permits import ComputePermit, lent
from slackwater.agent.region_access import InPlace
from slackwater.agent.session import Session
from slackwater.agent.snapshot import Snapshot, StagedSnapshot
from slackwater.agent.table_rows import RowNumbers, RowUpdates, SparseTable, placed
from slackwater.agent.worker_bucket import TableKind, WorkerBucket
from slackwater.common.base import limits
from slackwater.common.base.errors import AccessRefused, DeadlineExceeded, Retryable, Unavailable
from slackwater.common.domains.slots.rows import NO_ROWS, Numbers
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.checkpoints import CheckpointProgress
from slackwater.schemas.job_requests import Meeting
from slackwater.schemas.jobs import FROM_VARIABLE
from slackwater.schemas.progress import ProgramProgress
from slackwater.schemas.tensors import UpdateRule

_log = logging.getLogger("slackwater.agent")
MARK_WAIT_S: Final = MARK_BUDGET_S + limits.REQUEST_TIMEOUT_S
_Answer = TypeVar("_Answer")
ADDING: Final = UpdateRule(name="sgd", learning_rate=1.0, weight_decay=0.0)
"""The rule by which a push of -x adds x."""


class TableAgent(Agent):
    """`tables`: name -> the values that the job begins with, if this is rank 0."""

    def __init__(
        self,
        tables: Mapping[str, Floats],
        kinds: Mapping[str, TableKind] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        """Raises what Agent raises. `kinds`: of sparse tables, whose rows are added to and read by
        number, and of those that have an update rule of their own; `options`: Agent's."""
        self._tables = kinds
        ruled = (name for name, kind in kinds.items() if kind.update is not None)
        groups = {name: number for number, name in enumerate(ruled, 1)}
        sparse = {name for name, kind in kinds.items() if kind.sparse}
        spread = {name: placed(values) for name, values in tables.items() if name in sparse}
        has_job = options.get("job") or os.environ.get(JOB)
        super().__init__(
            tensors={**tables, **spread},
            groups=groups,
            update=ADDING,
            consistency="asynchronous" if has_job else None,
            **options,
        )
        if (permits := self._session.progress.permits) is not None:
            permits.compute.between_waits = False  # It is taken for tasks.
        self._telling: Future[Meeting] | None = None
        self._using: tuple[int, Future[None]] | None = None
        """Workers that were asked for, and the answer."""
        self.meanwhile: Callable[[Callable[[], bool]], None] = lambda _: None
        """Called while a read waits for a network, with what says whether it is there."""
        self._zeros = {
            name: np.zeros_like(values) for name, values in tables.items() if name not in sparse
        }
        self._by_rows = {
            spec.name: SparseTable(
                spec, [each for each in self._buckets if each.tensors[0].name == spec.name]
            )
            for spec in self._specs
            if spec.sparse
        }
        if isinstance(self._session, Session):
            for bucket in self._buckets:
                bucket.reads_later = not bucket.sparse
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
                bucket.choose_hyper(self.job, {})
                if bucket.sparse:
                    bucket.put_rows(NO_ROWS, _no_values(bucket))
                else:
                    for position, spec in enumerate(bucket.tensors):
                        bucket.put(position, np.zeros(spec.shape, np.float32))
                self._session.ring(bucket)
                self._settle((bucket,))
                self._bring()
        if behind:
            self._begin()

    def add(
        self,
        updates: Mapping[str, Floats | RowUpdates],
        hypers: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> int:
        """Add to the tables that are named, as this rank's next batch, and return its number once
        it is applied. Called again after a kill in its midst, it is completed. Raises what `push`
        and `wait` raise. RowUpdates are for sparse tables, which take nothing else. `hypers`: a
        table's hyper-parameters of this batch, where they are not those of its rule; of those that
        are not sparse."""
        self._bring()
        for name, zeros in self._zeros.items():
            update = updates.get(name)
            assert not isinstance(update, RowUpdates), name
            pushed = zeros if update is None else np.negative(update)
            self.push(name, pushed, **hypers.get(name, {}))
        for name, table in self._by_rows.items():
            update = updates.get(name)
            if update is None:
                self._push_rows((block, NO_ROWS, _no_values(block)) for block in table.blocks)
            else:
                assert isinstance(update, RowUpdates), name
                self._push_rows(table.parts(update))
        return self.wait()

    def _bring(self) -> None:
        """Wait for what the last push led to, where no read has brought it: until it is here, the
        push stands in its slot, and is applied again where an aggregator loses its memory."""
        late = [
            each for each in self._buckets if each.reads_later and each.version < each.iteration
        ]
        session = self._session
        for bucket in late:
            assert isinstance(session, Session)
            bucket.reads_later = False
            session._call(partial(session._transfers.want, bucket))
            try:
                self._settle((bucket,))
            finally:
                bucket.reads_later = True

    def _push_rows(self, parts: Iterable[tuple[WorkerBucket, Numbers, Floats]]) -> None:
        """Push to each of a table's blocks, as `Agent.push` does to a tensor's buckets."""
        for bucket, numbers, values in parts:
            if self._is_counted(bucket, 0):
                self._standing.discard((bucket.index, 0))
                continue
            if not bucket.settled or bucket.refused is not None:
                self._settle((bucket,))
            bucket.choose_hyper(self.job, {})
            bucket.put_rows(numbers, values)
            self._session.progress.bytes_pushed += values.nbytes
            bucket.pushed_s = time.monotonic()
            self._session.ring(bucket)

    def rows(self, name: str, rows: RowNumbers) -> Floats:
        """Return present rows of a sparse table, [n, width], as an array of the caller's: each with
        all batches that had been applied, whoever added them. Raises what `add` raises."""
        return self._by_rows[name].read(rows, self._read_rows)

    def _read_rows(self, bucket: WorkerBucket, rows: RowNumbers, out: Floats) -> None:
        while not self._try_rows(bucket, rows, out):
            self.add({})  # Its answer comes from wherever the bucket is.

    def _try_rows(self, bucket: WorkerBucket, rows: RowNumbers, out: Floats) -> bool:
        """Read rows where the bucket is. False: it is being moved, or was lost."""
        session, slots = self._session, bucket.slots
        if isinstance(session, Local):
            assert isinstance(slots, InPlace)
            slots.read_rows(rows, out)
            return True
        core = session._core
        if not core.attached(bucket.index):
            return False
        owner = core.aggregator_of(bucket.index)
        if isinstance(slots, Snapshot):
            slots.read_rows(rows, out)
            return slots.is_of(owner)
        assert isinstance(slots, StagedSnapshot)
        return self._read_afar(bucket, slots.read_rows(rows, out, owner))

    def _read_afar(self, bucket: WorkerBucket, reading: Coroutine[Any, Any, bool]) -> bool:
        """Wait for a read over a network. False: the bucket is being moved, or was lost."""
        session = self._session
        assert isinstance(session, Session)
        asked = asyncio.run_coroutine_threadsafe(reading, session._loop)
        try:
            with lent(session.progress.permits):
                self.meanwhile(asked.done)
                return asked.result(self._deadline_s)
        except TimeoutError as error:
            asked.cancel()
            raise DeadlineExceeded(
                f"job {self.job}: {bucket.names} was not read within {self._deadline_s:g} s; are "
                "its aggregator and the network up?"
            ) from error
        except (Unavailable, AccessRefused) as error:
            _log.info("job %s, bucket %d was not read: %s", self.job, bucket.index, error)
            return False

    def newest(self, name: str) -> Floats:
        """Return a table's present values, as an array of the caller's: all batches included that
        had been applied, whoever added them. Raises what `add` raises."""
        if name in self._by_rows:
            return self.rows(name, np.arange(self._by_rows[name].shape[0]))
        if not all(self._look(bucket) for bucket in self._buckets_of(name)):
            self.add({})  # Its answer has what was applied before it, wherever the bucket is.
            self._bring()
        return np.array(self.pull(name))

    def _look(self, bucket: WorkerBucket) -> bool:
        """Copy a bucket's newest values. False: it may have gone elsewhere."""
        source, session = bucket.source, self._session
        if isinstance(session, Local):
            return True
        if source is not bucket.slots or not session._core.attached(bucket.index):
            return False
        if bucket.reads_later and session._core.version_of(bucket.index) < bucket.acknowledged:
            return False  # Its memory was lost: the last push is being applied again.
        owner = session._core.aggregator_of(bucket.index)
        if isinstance(source, StagedSnapshot):
            newest = session._transfers.read_newest(bucket, source, owner)
            return self._read_afar(bucket, newest)
        assert isinstance(source, Snapshot)
        try:
            return source.look_again(bucket.version, owner)
        except DeadlineExceeded:  # Others' updates came too fast.
            return False

    @property
    def servers(self) -> int:
        """Return the number of aggregators that hold the tables."""
        session = self._session
        if isinstance(session, Local):
            return 1
        core = session._core
        return len({core.aggregator_of(bucket.index) for bucket in self._buckets})

    @property
    def permit(self) -> ComputePermit | None:
        """The permit to compute, of a job that takes turns."""
        permits = self._session.progress.permits
        return permits.compute if permits is not None else None

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

    def use(self, hosts: int) -> bool:
        """Ask for another number of workers on the program's behalf. Says whether the master has
        it, or never will; until then it is called again now and then."""
        if self._using is None or self._using[0] != hosts:
            self._using = hosts, self._order(lambda control: control.use(hosts))
        if not (asked := self._using[1]).done():
            return False
        self._using = None
        if (error := asked.exception()) is not None:
            _log.warning("job %s: %d hosts were asked for: %s", self.job, hosts, error)
        return not isinstance(error, Retryable)

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

    # Marks ----------------------------------------------------------------------------------------

    def save_mark(self, name: str) -> CheckpointProgress:
        """Have the tables saved as a mark of the job, while nobody adds to them; called again, say
        how far that is. Raises Retryable, Rejected, TimeoutError."""
        return self._order(lambda control: control.mark(name)).result(MARK_WAIT_S)

    def keep_mark(self, name: str) -> None:
        """Let the job go back to this mark after a loss. Raises Retryable, Rejected,
        TimeoutError."""
        self._order(lambda control: control.keep_mark(name)).result(MARK_WAIT_S)

    def _order(self, order: Callable[[Control], Coroutine[Any, Any, _Answer]]) -> "Future[_Answer]":
        """Send an order to the services, from the session's own loop."""
        session = self._session
        assert isinstance(session, Session)
        assert session._control is not None
        return asyncio.run_coroutine_threadsafe(order(session._control), session._loop)

    def _meeting(
        self, address: str = "", secret: str = "", progress: ProgramProgress | None = None
    ) -> "Future[Meeting]":
        return self._order(lambda control: control.meet(address, secret, progress))


def _no_values(bucket: WorkerBucket) -> Floats:
    return np.empty((0, bucket.tensors[0].shape[-1]), np.float32)
