"""Status of a device for operators and the slab map's bucket, read from its live parts."""

import os
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from slackwater.common.base.background import Background
from slackwater.memory.control.core import DeviceCore
from slackwater.memory.control.lenders import Lenders
from slackwater.memory.pages.device import Device
from slackwater.memory.pages.latency import infos
from slackwater.memory.pages.stall import Stall
from slackwater.memory.pages.table import counters
from slackwater.memory.prefetch.readahead import ReadAhead
from slackwater.memory.service import control_service
from slackwater.memory.service.options import DeviceOptions
from slackwater.memory.store import PAGE_BYTES
from slackwater.schemas.base import NodeId
from slackwater.schemas.memory import (
    DeviceHeartbeat,
    DeviceMap,
    DeviceRecord,
    DeviceState,
    SpanInfo,
    SpanRecord,
)

_REASON_MAX: Final = 400


@dataclass(slots=True, kw_only=True)
class DeviceStatus:
    """Read a device's parts; change nothing."""

    options: DeviceOptions
    node: str
    slab_bytes: int
    part_spans: int
    """Spans of one part of the slab map."""
    core: DeviceCore
    device: Device
    lenders: Lenders
    ahead: ReadAhead
    stall: Stall
    background: Background
    stopping: bool = False

    def records(self) -> dict[int, DeviceRecord]:
        """Return the slab map's parts by number; the first always, others if they have a slab."""
        parts: dict[int, list[SpanRecord]] = {0: []}
        for span in self.core.spans.span_records():
            parts.setdefault(span.span // self.part_spans, []).append(span)
        return {
            part: DeviceRecord(
                device=self.core.settings.id,
                node=NodeId(self.node),
                size_bytes=self.options.size_bytes,
                slab_bytes=self.slab_bytes,
                resilience=self.options.resilience,
                spans=tuple(spans),
            )
            for part, spans in parts.items()
        }

    def map(self, first: int = 0) -> DeviceMap:
        found = sorted({*self.core.spans.in_use(), *self._active()})
        left = found[bisect_left(found, first) :]
        spans = left[: self.part_spans]
        return DeviceMap(
            device=self.core.settings.id,
            size_bytes=self.options.size_bytes,
            span_bytes=self.device.resilience.span_pages(self.slab_bytes) * PAGE_BYTES,
            spans=tuple(
                SpanInfo(
                    span=span,
                    state=self.core.spans.state(span),
                    members=self.core.spans.records(span),
                    activity=round(float(self.core.activity[span]), 3),
                    remote_pages=self.device.present_pages(span),
                )
                for span in spans
            ),
            following=left[len(spans)] if len(left) > len(spans) else 0,
        )

    def _active(self) -> list[int]:
        """Spans without a slab that somebody uses."""
        active: list[int] = (self.core.activity > 0.5).nonzero()[0].tolist()
        return active

    def heartbeat(self, now_s: float) -> DeviceHeartbeat:
        seen = counters(self.device.table)
        state, reason = self._condition()
        lenders = {member.lender for member in self.core.spans.all() if member.counts}
        over_channels = self.device.remote_read_pages - self.device.remote_ahead_pages
        over_channels += seen["read_lane_pages"]
        hits = seen["prefetch_hit_pages"]
        near = seen["read_mapped_pages"] + seen["read_held_pages"] + hits
        return DeviceHeartbeat(
            service=control_service.SERVICE,
            id=self.options.id,
            incarnation=0,
            at_s=now_s,
            node=NodeId(self.node),
            resilience=self.options.resilience,
            size_bytes=self.options.size_bytes,
            spans=self.core.settings.spans,
            mapped_spans=self.device.mapped_spans,
            lenders=len(lenders),
            read_pages=seen["read_pages"],
            read_remote_pages=seen["read_mapped_pages"] + hits + over_channels,
            read_waited_pages=max(0, seen["read_pages"] - near),
            prefetched_pages=seen["prefetched_pages"],
            prefetch_hit_pages=hits,
            prefetch_late_pages=self.ahead.late_pages,
            written_pages=seen["written_pages"],
            written_remote_pages=seen["written_mapped_pages"]
            + seen["written_lane_pages"]
            + self.device.remote_written_pages,
            slabs_evicted=self.core.departed["evict"],
            slabs_lost=self.core.departed["lost"],
            refilled_pages=self.lenders.refiller.refilled_pages,
            regenerated_pages=self.lenders.regenerator.regenerated_pages,
            repaired_fragments=self.device.resilience.erasures,
            lost_pages=self.device.resilience.lost_pages,
            backup_waiting_pages=self.device.backup_waiting_pages,
            activity=round(float(self.core.activity.sum()), 3),
            latency=infos(self.device.latency.recent(now_s)),
            export=str(self.options.socket or ""),
            state=state,
            reason=reason[:_REASON_MAX],
        )

    def _condition(self) -> tuple[DeviceState, str]:
        """The state and its reason: what is worst comes first."""
        if (failure := self.background.failure) is not None:
            return "failed", str(failure)
        if failed := self.device.backup.failed:
            return "degraded", f"backup file: {os.strerror(failed)}"
        if reason := self.stall.reason:
            return "stuck", reason
        return ("stopping", "") if self.stopping else ("serving", "")
