"""The optimiser's states of a job, read from its regions by one of its workers.

Between a version that this worker has waited for and its next push a region stands still, so that
its buffers can be read in place or from afar without a word to anybody. A bucket that moves
meanwhile has the same bytes where it comes to: then it is read again, there.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any, Final, NamedTuple

import numpy as np

from slackwater.agent.initial import States
from slackwater.agent.on_device import StagedOnDevice
from slackwater.agent.region_access import InPlace, Staged
from slackwater.agent.snapshot import Snapshots
from slackwater.agent.worker_bucket import WorkerBucket
from slackwater.common.base.errors import AccessRefused, DeadlineExceeded, Rejected, Unavailable
from slackwater.common.domains.slots.rules import Floats
from slackwater.schemas.tensors import TensorSpec

_AGAIN_S: Final = 0.05
Found = tuple[int, list[Floats]]
"""How many updates a bucket's states have had, and each of them, flat."""
Run = Callable[[Any], "Future[Any]"]
"""Runs a coroutine in the Agent's thread."""


class TensorState(NamedTuple):
    """A tensor's states, copied, and how many updates they have had."""

    states: States
    updates: int


def read_states(
    specs: Sequence[TensorSpec],
    buckets: Sequence[WorkerBucket],
    run: Run | None,
    deadline_s: float,
) -> dict[str, TensorState]:
    """Return each tensor's states as of the version that the program has waited for; of a job that
    is not synchronous, as of its newest. Raises Rejected, DeadlineExceeded."""
    ends_s = time.monotonic() + deadline_s
    pieces: dict[str, list[States]] = {spec.name: [] for spec in specs}
    updates: dict[str, int] = {}
    for bucket in buckets:
        age, flat = _read(bucket, run, ends_s)
        for spec, (first, end) in zip(bucket.tensors, bucket.bounds, strict=True):
            pieces[spec.name].append(tuple(state[first:end] for state in flat))
            updates[spec.name] = max(age, updates.get(spec.name, 0))
    return {
        spec.name: TensorState(
            tuple(
                _joined(parts).reshape(spec.shape) for parts in zip(*pieces[spec.name], strict=True)
            ),
            updates[spec.name],
        )
        for spec in specs
    }


def _joined(parts: Sequence[Floats]) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read(bucket: WorkerBucket, run: Run | None, ends_s: float) -> Found:
    while True:
        found, why = _look(bucket, run, max(0.0, ends_s - time.monotonic()))
        if found is not None:
            return found
        if time.monotonic() > ends_s:
            raise DeadlineExceeded(
                f"the optimiser's states of bucket {bucket.index} ({bucket.names}) at version "
                f"{bucket.version} could not be read: {why}"
            )
        time.sleep(_AGAIN_S)


def _look(bucket: WorkerBucket, run: Run | None, within_s: float) -> tuple[Found | None, str]:
    """Return the bucket's states, or why they cannot be read now. Raises Rejected."""
    version = None if isinstance(bucket.staging, Snapshots) else bucket.version
    why = "other updates came meanwhile"
    with bucket.lock:  # A region that the bucket left is closed once another is adopted.
        slots = bucket.slots
        if isinstance(slots, InPlace):
            return slots.states(version), why
    if not isinstance(slots, Staged) or isinstance(slots, StagedOnDevice) or run is None:
        raise Rejected(
            "the optimiser's states are not read by an Agent with a device; give it none"
        )
    reading = run(slots.states(version))
    try:
        return reading.result(within_s), why
    except (Unavailable, AccessRefused) as error:
        return None, str(error)
    except Late:
        reading.cancel()
        return None, "the read did not end"
