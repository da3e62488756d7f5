"""The shell of a node's permits and memory shares: hears processes of jobs, and tells them when to
begin, and how much memory they may use.

They are asked for over the service's own socket, not the bus: a subtask may be a millisecond.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

import msgspec
import structlog

from slackwater.common.base.errors import DecodeRejected
from slackwater.common.bus.relay import frame
from slackwater.common.native.link import Link, link_of
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import TURNS_MAX, PermitUse
from slackwater.schemas.relay import (
    MemoryAsk,
    MemoryShare,
    PermitAsk,
    PermitEnd,
    PermitGranted,
)
from slackwater.services.worker.config import WorkerConfig
from slackwater.services.worker.memory_shares import MemoryShares
from slackwater.services.worker.permits import Grant, Late, Permits

_log = structlog.get_logger()
LATE_EVERY_S: Final = 60.0
"""Seconds between two lines of the log about one job's late permits."""


def permit_server(config: WorkerConfig) -> "PermitServer":
    """Make the server of a node. Raises ConfigRejected for an interface that is not there."""
    here = (f"{config.address}:0",) if config.address else ()
    link = link_of(config.network_interface, config.network_bytes_s, here)
    permits = Permits(config.computing, config.moving, secondary=link is not None)
    return PermitServer(permits, link, MemoryShares(config.share_memory))


class PermitServer:
    """`link`: the node's, if it is known how much it carries."""

    def __init__(
        self,
        permits: Permits,
        link: Link | None,
        shares: MemoryShares,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.permits, self.shares, self.now_s = permits, shares, now_s
        self._primary = frame(PermitGranted())
        interface, budget = (link.interface.name, link.budget_bytes_s) if link else ("", 0)
        self._secondary = frame(
            PermitGranted(secondary=True, interface=interface, budget_bytes_s=budget)
        )
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._lanes = count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._told_s: dict[str, float] = {}

    def open(self, job: str, writer: asyncio.StreamWriter) -> int:
        """Return the lane of a connection of the job's."""
        lane = next(self._lanes)
        self._writers[lane] = writer
        self.permits.opened(lane, job)
        return lane

    def heard(self, lane: int, message: PermitAsk | PermitEnd) -> None:
        """Raises DecodeRejected for a second subtask beside the first."""
        now_s = self.now_s()
        if isinstance(message, PermitEnd):
            self._tell(self.permits.ended(lane, now_s))
            return
        granted = self.permits.asked(lane, message.kind, now_s)
        if granted is None:
            raise DecodeRejected("a permit was asked for beside another one; end that first")
        self._tell(granted)

    def asked_memory(self, lane: int, job: str, asked_bytes: int) -> None:
        """Take down what the job asked for. Raises DecodeRejected where that is nothing."""
        if not asked_bytes:
            raise DecodeRejected("it asks for a share of memory, and its job asked for none")
        self.shares.joined(lane, job, asked_bytes, self.now_s())

    def share(self, lane: int, message: MemoryAsk) -> None:
        """Tell a process its limit."""
        before = self.shares.moves
        limit_bytes = self.shares.asked(lane, message, self.now_s())
        if self.shares.moves > before and (moved := self.shares.last) is not None:
            giver, taker = self.shares.job_of(moved.giver), self.shares.job_of(moved.taker)
            _log.info("memory.moves", giver=giver, taker=taker, bytes=moved.nbytes)
        self._writers[lane].write(frame(MemoryShare(limit_bytes=limit_bytes)))

    def close(self, lane: int) -> None:
        """Its connection is lost."""
        now_s = self.now_s()
        self._writers.pop(lane, None)
        self.shares.left(lane, now_s)
        self._tell(self.permits.closed(lane, now_s))

    def turns(self, node: NodeId) -> tuple[PermitUse, ...]:
        """Return what each job has had, for the service's heartbeat."""
        found: dict[str, PermitUse] = {}
        for (job, kind), usage in self.permits.usage.items():
            known = found.setdefault(job, PermitUse(job=JobId(job), node=node))
            held = {"computed_s": known.computed_s, "moved_s": known.moved_s}
            held["computed_s" if kind == "compute" else "moved_s"] += usage.held_s
            memory_bytes, stalled_s = self.shares.limits(job)
            found[job] = msgspec.structs.replace(
                known, **held, waited_s=known.waited_s + usage.waited_s,
                late=known.late + usage.late, memory_bytes=memory_bytes, stalled_s=stalled_s,
            )  # fmt: skip
        return tuple(found.values())[:TURNS_MAX]

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self, granted: Iterable[Grant]) -> None:
        for grant in granted:
            if (writer := self._writers.get(grant.lane)) is not None:
                writer.write(self._secondary if grant.secondary else self._primary)
        self._set_timer()

    def _set_timer(self) -> None:
        """Look again when the next holder is late. A timer that comes too early does no harm."""
        due_s = self.permits.due_s
        if due_s is None or due_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        after_s = max(0.0, due_s - self.now_s())
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _tell_late(self, late: Late) -> None:
        """Say once in a while that a job does not give its permit back."""
        now_s = self.now_s()
        if now_s - self._told_s.get(late.job, float("-inf")) < LATE_EVERY_S:
            return
        self._told_s = {job: at for job, at in self._told_s.items() if now_s - at < LATE_EVERY_S}
        self._told_s[late.job] = now_s
        _log.warning("permit.late", job=late.job, kind=late.kind, held_s=round(late.held_s, 3))

    def _look(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        granted, late = self.permits.look(self.now_s())
        for each in late:
            self._tell_late(each)
        self._tell(granted)
