"""Training without a cluster: one worker, its buckets in its own memory, the aggregators' kernels.

Same regions, same fold, same order: parameters are, bit for bit, those of a job of one worker. The
program's own thread folds, when the last tensor of a bucket is pushed.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Final

from slackwater.agent.control import Progress
from slackwater.agent.region_access import Array, InPlace
from slackwater.agent.worker_bucket import Cell
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.domains.slots.folding import blame, check_hypers, commit, fold
from slackwater.common.domains.slots.frames import PushRefused
from slackwater.common.domains.slots.layout import bucket_tensors, plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.rules import Hyper
from slackwater.common.transport.gpu import copy_into
from slackwater.common.transport.region import Region
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import JobSpec, TensorSpec
from slackwater.schemas.placement import JobPlan

_log = logging.getLogger("slackwater.agent")
JOB: Final = "local"
"""The job's id in messages of errors; no cluster knows it."""


class Local:
    """Serves an Agent as a Session does, without a thread, a bus or a deadline."""

    def __init__(
        self, spec: JobSpec, tensors: tuple[TensorSpec, ...], initial: Mapping[str, Array]
    ) -> None:
        self.plan = JobPlan(
            job=JobId(spec.id),
            workers=1,
            gradient_dtype=spec.gradient_dtype,
            update=spec.update,
            consistency=spec.consistency,
            staleness=spec.staleness,
            layout_epoch=0,
            token="",
        )
        self.failure: SlackwaterError | None = None
        self.progress = Progress()
        self.cells: list[Cell] = []
        self._regions: list[SlotRegion] = []
        for layout in plan_buckets(tensors):
            cell = Cell(layout, bucket_tensors(layout, tensors), Hyper.of(spec.update))
            self._fill(cell, tensors, initial)
            self.cells.append(cell)

    def _fill(
        self, cell: Cell, tensors: tuple[TensorSpec, ...], initial: Mapping[str, Array]
    ) -> None:
        memory = _Memory(SlotRegion.nbytes_of(self.plan, cell.layout, tensors))
        region = SlotRegion.format(memory.view, self.plan, cell.layout, tensors, 0)
        values = cell.newest(initial)
        for (first, last), value in zip(cell.bounds, values, strict=True):
            copy_into(region.parameters(0)[first:last], value.reshape(-1))
        region.initialize(0)
        self._regions.append(region)
        slots = InPlace(memory, self.plan.job, cell.index, 0)
        cell.adopt(slots)
        cell.source, cell.version = slots, 0

    def open(self) -> None:
        """Return at once: there is nothing to wait for."""

    def ring(self, cell: Cell) -> None:
        """Apply the bucket's push, or refuse it."""
        region, slots = self._regions[cell.index], cell.slots
        assert isinstance(slots, InPlace)
        slots.mark(cell.iteration, cell.hyper)
        refusal = check_hypers(region)
        if refusal is None and not fold(region):
            refusal = blame(region)
        if refusal is None:
            cell.version = commit(region)
            return
        cell.was_refused = True
        cell.refused = PushRefused(
            handle=0,
            iteration=cell.iteration,
            job=self.plan.job,
            tensor=refusal.tensor,
            worker=0,
            why=refusal.why,
        )

    def wait(self, cells: Sequence[Cell], deadline_s: float) -> None:
        """Return at once: every push has been applied already."""
        assert all(cell.settled for cell in cells), "a push was neither applied nor refused"

    def close(self, finish: str | None) -> None:
        """Close. Views that the program holds stay valid; there is nobody to tell the result."""
        if finish:
            _log.info("trained alone; the result is %s", finish)


class _Memory:
    """A region as InPlace takes it from a channel: it goes when its last view does."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the region. Raises MemoryError."""
        region = Region.create(nbytes, JOB)
        self.nbytes = nbytes
        self.view: memoryview = region.buffer
        weakref.finalize(self, region.close)

    def close(self) -> None:
        """Do nothing: the last view frees the region."""
