"""Say where a rank stands that does not go on: its worker service is asked, people are told."""

from typing import Annotated, Final

import msgspec

from slackwater.schemas.base import (
    FINITE_MAX,
    WORKERS_MAX,
    Count,
    IdText,
    Message,
    Name,
    NodeId,
    Rank,
    Record,
    Seconds,
    Text,
)

STACK_CHARS_MAX: Final = 8192
Stack = Annotated[str, msgspec.Meta(max_length=STACK_CHARS_MAX)]


class RankLook(Record, kw_only=True, frozen=True):
    """A look at a rank's processes."""

    state: Name = ""
    """The program's state as the kernel says it: R runs, S sleeps, D waits for a device, T was
    stopped by a signal; empty: it is not there."""
    cores: Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)] = 0.0
    """Cores that all its processes keep busy."""
    stack: Stack = ""
    """The stacks of all its Python threads, the newest first, as faulthandler writes them."""
    cpu_s: Annotated[float, msgspec.Meta(ge=0.0, le=FINITE_MAX)] = 0.0
    """CPU time that those of its processes that live have taken."""
    log_bytes: Count = 0
    """Bytes that it has printed."""
    why: Text = ""
    """Says what kept the service from reading a stack."""


class LookAtRank(Message, kw_only=True, frozen=True, tag="worker.look"):
    """Master to worker service: where does the rank's program stand? Answered by RankLooked within
    two seconds, or Refused."""

    job: IdText
    rank: Rank


class RankLooked(Message, kw_only=True, frozen=True, tag="worker.looked"):
    job: IdText
    rank: Rank
    look: RankLook


class HangingRank(Record, kw_only=True, frozen=True):
    """A rank that holds its job up."""

    rank: Rank
    node: NodeId
    look: RankLook


class Hang(Record, kw_only=True, frozen=True):
    """A job none of whose ranks goes on."""

    since_s: Seconds
    """When the last iteration ended that was reported."""
    reason: Text
    ranks: Annotated[tuple[HangingRank, ...], msgspec.Meta(max_length=WORKERS_MAX)] = ()
    """The ranks that hold the others up."""
