"""Logs of a job's processes, which the worker service of their machine sends in pieces."""

from typing import Annotated

import msgspec

from slackwater.schemas.base import IdText, Message, Rank, Seconds

PLACE_MAX = 2**62
TAIL_LINES_MAX = 1_000_000
Place = Annotated[int, msgspec.Meta(ge=0, le=PLACE_MAX)]
"""The position of a byte in all that a rank has printed since it was started."""


class ReadLog(Message, kw_only=True, frozen=True, tag="log.read"):
    """sw.v1.cmd.worker.<id>.log: what a rank printed, from `offset` on, or its last `tail` lines.

    Answered by LogPiece. With nothing there to be told, the answer waits for up to `wait_s`, until
    something is printed or the rank has ended.
    """

    job: IdText
    rank: Rank
    offset: Place | None = None
    tail: Annotated[int, msgspec.Meta(ge=0, le=TAIL_LINES_MAX)] = 0
    """Takes effect only without `offset`."""
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=3.0)] = 0.0


def no_log(node: str, asked: ReadLog) -> str:
    """Say why a node answers with no piece."""
    return f"{node} has no log of job {asked.job}, rank {asked.rank}"


class LogPiece(Message, kw_only=True, frozen=True, tag="log.piece"):
    """`data` is at `start`; the next piece is asked for at `start` plus its length. Where `start`
    is above the offset that was asked for, what was between them is not kept any longer."""

    job: IdText
    rank: Rank
    start: Place
    data: Annotated[bytes, msgspec.Meta(max_length=256 * 1024)] = b""
    begin: Place = 0
    """The first byte that is still kept."""
    end: Place = 0
    ended: bool = False
    """The rank has ended, and this piece is the last."""
    code: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """The rank's exit code, once it has ended; negative: the signal that killed it."""
    ended_s: Seconds = 0.0
