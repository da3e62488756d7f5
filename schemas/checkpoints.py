"""Checkpoints of what aggregators keep of a job: a person's order, and how it is carried out.

The controller has every bucket copied in memory at one version, then written (SCAR's checkpoint
coordinator: Qiao 2021, section 5.4; services/controller/checkpoints.py).
"""

from typing import Annotated, Final, Literal

import msgspec

from slackwater.schemas.base import (
    BUCKETS_MAX,
    FINITE_MAX,
    AggregatorId,
    Count,
    IdText,
    JobId,
    Message,
    Seconds,
    Text,
)
from slackwater.schemas.placement import Indices, Layouts, Tensors

CheckpointPhase = Literal["looking", "copying", "writing", "done", "failed"]
CopiedVersion = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
BINS: Final = 64
"""Bins of a histogram of distances."""
Versions = Annotated[tuple[Count, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
"""Parallel to the buckets that a message names."""


class CheckpointJob(Message, kw_only=True, frozen=True, tag="checkpoint.job"):
    """To the controller of the job: save its buckets in `folder`, which its aggregators see. The
    same `request` again asks how far it is."""

    job: IdText
    request: IdText
    folder: Text


class MarkJob(Message, kw_only=True, frozen=True, tag="checkpoint.mark"):
    """The job's own program, which holds still, asks its controller to save its tables as a mark of
    this name, a folder in its `save_to`. The same `mark` again asks how far it is. Answered by
    CheckpointProgress."""

    job: IdText
    mark: IdText


class CheckpointProgress(Message, kw_only=True, frozen=True, tag="checkpoint.progress"):
    """The answer."""

    job: JobId
    request: IdText
    phase: CheckpointPhase
    iteration: Count
    """The version that is copied; 0 while it is looked for."""
    buckets: Count
    written: Count
    """How many of the buckets are durable."""
    nbytes: Count = 0
    """Bytes of the files that are."""
    took_s: Seconds = 0.0
    reason: Text = ""
    """Why it failed."""


class CopyBuckets(Message, kw_only=True, frozen=True, tag="bucket.copy"):
    """Controller to aggregator: copy these buckets in memory once they are at `version`. A newer
    `attempt`, or another request, takes the place of the one before."""

    job: IdText
    request: IdText
    attempt: Count
    buckets: Indices
    version: Count | None
    """None: any, and each at another, of a job whose updates are not synchronous."""
    look: bool = False
    """Only tell which versions there are."""
    distances: bool = False
    """Tell how far the copies are from what was saved last."""


class BucketsCopied(Message, kw_only=True, frozen=True, tag="bucket.copied"):
    """The answer."""

    aggregator: AggregatorId
    attempt: Count
    now: Versions
    """The version that each bucket has."""
    copied: Annotated[tuple[CopiedVersion, ...], msgspec.Meta(max_length=BUCKETS_MAX)]
    """The version of each bucket's copy; -1: there is none yet."""
    distances: Annotated[tuple[Count, ...], msgspec.Meta(max_length=BINS)] = ()
    """How many pieces of the copies are at which distance, by its binary logarithm
    (common/domains/slots/saved_pieces.py); empty: it was not asked for, or not all are copied."""
    moved: Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)] | None = None
    """The norm of all of them; None: it is not known."""


class WriteBuckets(Message, kw_only=True, frozen=True, tag="bucket.write"):
    """Controller to aggregator: write the copies of this attempt into the folder, and let them go.
    Repeated until all are written."""

    job: IdText
    request: IdText
    attempt: Count
    layouts: Layouts
    tensors: Tensors
    """The job's whole list: parts are told apart by their place in it."""
    parts: Annotated[int, msgspec.Meta(ge=1, le=BUCKETS_MAX)]
    """Number of the job's buckets, each a part."""
    iteration: Count
    folder: Text
    prune: bool = False
    """Remove what is older than the sets that are kept."""
    remember: bool = False
    """Keep the parameters that are written in memory, too: later distances are from them."""
    above: Annotated[int, msgspec.Meta(ge=-1, le=BINS)] = -1
    """Write an update, of the pieces in bins above this one; -1: write all, a set."""
    share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """And this part of those in the bin itself, the farthest first."""
    rounded: bool = False
    """Write an update's numbers as bfloat16."""


class BucketsWritten(Message, kw_only=True, frozen=True, tag="bucket.written"):
    """The answer: what is durable, and what stands against the rest, if anything."""

    aggregator: AggregatorId
    attempt: Count
    written: Indices
    lacking: Indices = ()
    """Buckets of which no copy of this attempt is here."""
    nbytes: Count = 0
    reason: Text = ""
