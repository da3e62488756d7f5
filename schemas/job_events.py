"""A job's life, as facts tell it."""

from typing import Annotated

import msgspec

from slackwater.schemas.base import (
    Attempt,
    ClusterId,
    JobId,
    Message,
    Name,
    Seconds,
    Text,
    cut_details,
    cut_texts,
)
from slackwater.schemas.gpus import NodeAllocation


class JobEvent(Message, kw_only=True, frozen=True, tag="job.event"):
    """sw.v1.evt.job.<id>.<state or fact>: the job's life, as operators and loadgen follow it."""

    job: JobId
    fact: Name
    at_s: Seconds
    cluster: ClusterId | None = None
    attempt: Attempt = 0
    """The attempt that it is in, or that comes next."""
    allocation: NodeAllocation = ()
    """GPUs, or slots, that it holds from now on; empty: nothing."""
    reason: Text = ""
    detail: Annotated[dict[Name, Text], msgspec.Meta(max_length=32)] = msgspec.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        cut_texts(self)
        cut_details(self)
