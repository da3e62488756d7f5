"""Training without a cluster: one worker, its buckets in its own memory, the aggregators' kernels.

Same regions, same fold, same order: parameters are, bit for bit, those of a job of one worker. The
program's own thread folds, when the last tensor of a bucket is pushed.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Final

from slackwater.agent.control import Progress
from slackwater.agent.initial import Initial
from slackwater.agent.region_access import InPlace
from slackwater.agent.virtual_slots import VirtualInPlace
from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.base.errors import SlackwaterError
from slackwater.common.domains.slots.folding import blame, check_hypers, commit, fold
from slackwater.common.domains.slots.frames import PushRefused
from slackwater.common.domains.slots.layout import bucket_plan, bucket_tensors, plan_buckets
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.domains.slots.sizes import Size
from slackwater.common.transport.gpu import copy_into
from slackwater.common.transport.region import Region
from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.placement import JobPlan
from slackwater.schemas.tensors import TensorSpec

_log = logging.getLogger("slackwater.agent")
JOB: Final = "local"
"""The job's id in messages of errors; no cluster knows it."""


class Local:
    """Serves an Agent as a Session does, without a thread, a bus or a deadline."""

    def __init__(self, spec: JobSpec, tensors: tuple[TensorSpec, ...], initial: Initial) -> None:
        self.plan = JobPlan(
            job=JobId(spec.id),
            workers=spec.virtual_ranks or 1,
            active=1 if spec.virtual_ranks else 0,
            virtual=spec.virtual_ranks > 0,
            gradient_dtype=spec.gradient_dtype,
            update=spec.update,
            consistency=spec.consistency,
            staleness=spec.staleness,
            layout_epoch=0,
            token="",
        )
        self.failure: SlackwaterError | None = None
        self.progress = Progress()
        self.buckets: list[WorkerBucket] = []
        self._regions: list[SlotRegion] = []
        for layout in plan_buckets(tensors):
            own = bucket_tensors(layout, tensors)
            update = bucket_plan(self.plan, own).update
            bucket = WorkerBucket(layout, own, update, dtype=spec.gradient_dtype)
            self._fill(bucket, initial)
            self.buckets.append(bucket)

    def _fill(self, bucket: WorkerBucket, initial: Initial) -> None:
        tensors = bucket.tensors
        memory = _Memory(SlotRegion.nbytes_of(self.plan, bucket.layout, tensors))
        region = SlotRegion.format(memory.view, self.plan, bucket.layout, tensors, 0)
        values = bucket.newest(initial)
        for (first, last), value in zip(bucket.bounds, values, strict=True):
            copy_into(region.parameters(0)[first:last], value.reshape(-1))
        states, updates = bucket.first_states(initial, 0)
        for index, parts in enumerate(states[: region.geometry.states]):
            for (first, last), part in zip(bucket.bounds, parts, strict=True):
                copy_into(region.state(0, index)[first:last], part.reshape(-1))
        region.initialize(0, updates)
        self._regions.append(region)
        kind = VirtualInPlace if self.plan.virtual else InPlace
        slots = kind(memory, self.plan.job, bucket.index, 0)
        bucket.adopt(slots)
        bucket.source, bucket.version = slots, 0

    def size(self, iteration: int) -> Size:
        """Say that one worker counts, always."""
        return Size(1, 1, 0)

    def on_boundary(self, iteration: int) -> None:
        """Do nothing: nobody comes or goes."""

    def open(self, within_s: float) -> None:
        """Return at once: there is nothing to wait for."""

    def ring(self, bucket: WorkerBucket) -> None:
        """Apply the bucket's push, or refuse it."""
        region, slots = self._regions[bucket.index], bucket.slots
        assert isinstance(slots, InPlace)
        slots.mark(bucket.iteration, bucket.hyper)
        refusal = check_hypers(region)
        if refusal is None and not fold(region):
            refusal = blame(region)
        if refusal is None:
            bucket.version = commit(region)
            return
        bucket.was_refused = True
        bucket.refused = PushRefused(
            handle=0,
            iteration=bucket.iteration,
            job=self.plan.job,
            tensor=refusal.tensor,
            worker=0,
            why=refusal.why,
        )

    def wait(self, buckets: Sequence[WorkerBucket], deadline_s: float) -> None:
        """Return at once: every push has been applied already."""
        assert all(bucket.settled for bucket in buckets), "a push was neither applied nor refused"

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
