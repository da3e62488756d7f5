"""Lay out records and facts as the page reads them: small JSON values with short names. Pure.

The page is given rows that seldom change and, apart from them, figures that change each second.
Times are seconds since 1970.
"""

from collections.abc import Mapping
from typing import Any, Final

from slackwater.common.domains.facts.lives import Life
from slackwater.common.domains.facts.sentences import ROUTINE
from slackwater.console.names import EMULATED
from slackwater.schemas.cluster import AggregatorInfo, NodeInfo
from slackwater.schemas.gpus import held
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.job_states import HOLDING_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.memory import DeviceHeartbeat, SlabdHeartbeat
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.scheduling import PolicyInfo
from slackwater.schemas.tenants import TenantInfo
from slackwater.schemas.terminals import command_of
from slackwater.schemas.usage import UsageSums

Row = dict[str, Any]
REASON_CHARS_MAX: Final = 300


def job(record: JobRecord, progress: JobProgress | None) -> Row:
    """Describe a job; its figures are in `going`."""
    spec = record.spec
    holds = record.state in HOLDING_STATES
    total = progress.iterations if progress is not None else 0
    if progress is not None and progress.program is not None:
        total = progress.program.iterations
    return {
        "state": record.state,
        "held": record.held,
        "tenant": spec.tenant,
        "model": spec.model,
        "program": program(record),
        "workers": record.workers or spec.workers,
        "servers": spec.servers,
        "gpus": spec.gpus,
        "has": held(record.allocation) if holds else 0,
        "nodes": [list(each) for each in record.allocation] if holds else [],
        "aggregators": sorted(progress.aggregators) if progress is not None else [],
        "priority": spec.priority,
        "loss_limit": spec.loss_limit,
        "submitted_s": record.submitted_s,
        "started_s": record.started_s,
        "finished_s": record.finished_s,
        "reason": record.reason[:REASON_CHARS_MAX],
        "iterations": total,
        "run": record.run,
        "preemptions": record.preemptions,
        "restarts": sum(record.restarts.values()),
    }


def program(record: JobRecord) -> str:
    """Name what a job runs, as far as lists of jobs tell it."""
    words = command_of(record.spec.program)
    if not words:
        return ""
    return "emulated" if EMULATED in words else " ".join(words)


def going(progress: JobProgress | None) -> list[Any]:
    """Return [iteration, iterations a second, seconds left, loss of speed, moves]; None where it is
    not known."""
    if progress is None:
        return [None, None, None, None, 0]
    of = progress.program or progress
    return [
        of.iteration,
        rounded(of.speed),
        rounded(progress.eta_s),
        rounded(progress.loss),
        progress.moves,
    ]


def life(told: Life) -> Row:
    """Describe when a job held what, for the charts of all jobs."""
    return {
        "servers": told.servers or 1,
        "gpus": told.gpus,
        "stretches": [
            [each.state, rounded(each.from_s), rounded(each.to_s), each.held]
            for each in told.stretches
        ],
        "served": [[rounded(a), rounded(b)] for a, b in told.served]
        + ([[rounded(told.placed_s), None]] if told.placed_s is not None else []),
    }


def job_page(info: JobInfo, told: Life | None, events: list[Row]) -> Row:
    """Describe a job on a page of its own: what `job` says, and its history. `events`: as `event`
    describes them."""
    progress = info.progress
    return {
        "job": job(info.job, progress),
        "going": going(progress),
        "life": None if told is None else history(told),
        "ranks": [
            [each.rank, each.iteration, rounded(each.speed), rounded(each.heard_s)]
            for each in (progress.ranks if progress is not None else ())
        ],
        "measured": progress.program.measured if progress and progress.program else {},
        "tuning": [
            {
                "at_s": rounded(each.at_s), "gpus": each.gpus, "batch": each.batch,
                "efficiency": rounded(each.efficiency), "epochs": rounded(each.progress_epochs),
            }
            for each in info.history
        ],
        "results": dict(sorted(info.job.results.items(), key=lambda item: int(item[0]))),
        "hang": None if info.hang is None else info.hang.reason,
        "events": events,
    }  # fmt: skip


def history(told: Life) -> Row:
    """Describe a job's life in full."""
    return life(told) | {
        "details": [
            [each.reason[:REASON_CHARS_MAX], [list(place) for place in each.allocation]]
            for each in told.stretches
        ],
        "moves": [
            [rounded(m.from_s), rounded(m.ended_s), list(m.sources), list(m.targets), m.cause,
             m.done]
            for m in told.moves
        ],
        "marks": [[rounded(at_s), fact] for at_s, fact in told.marks],
        "alone_s": told.alone_s,
        "windows": [[rounded(at_s), each_s] for at_s, each_s in told.windows.points],
        "speeds": [[rounded(at_s), rounded(speed)] for at_s, speed in told.speeds()],
    }  # fmt: skip


def event(at_s: float, text: str, noun: str, fact: str, about: str) -> Row:
    """Describe a fact. `about`: the job that it is about; empty: none."""
    return {
        "at_s": rounded(at_s), "text": text, "job": about, "routine": fact in ROUTINE,
        "kind": noun, "fact": fact,
    }  # fmt: skip


def node(info: NodeInfo) -> Row:
    beat = info.heartbeat
    types = sorted({gpu.type for gpu in beat.gpus})
    return {
        "alive": info.alive,
        "cordoned": beat.cordoned,
        "slots": beat.slots,
        "slots_used": info.slots_used,
        "gpus": len(beat.gpus),
        "gpus_used": len(info.gpus_used),
        "gpu_types": types,
        "faults": [f"GPU {gpu.index}: {gpu.fault}" for gpu in beat.gpus if gpu.fault],
        "cores": beat.cores,
        "memory_bytes": beat.memory_bytes,
        "rack": beat.rack,
        "jobs": info.jobs,
    }


def aggregator(info: AggregatorInfo, before: Mapping[str, Any] | None) -> Row:
    """Describe an aggregator; its rates are since the row `before`."""
    record, beat = info.record, info.heartbeat
    found: Row = {
        "alive": info.alive,
        "cluster": record.cluster,
        "temporary_for": record.temporary_for,
        "since_s": rounded(record.since_s),
        "drain": info.drain,
    }
    if beat is None:
        return found
    busy, moved = rates(before, beat.at_s, beat.busy_s, float(beat.bytes_in + beat.bytes_out))
    return found | {
        "node": beat.node,
        "jobs": beat.jobs,
        "buckets": beat.buckets,
        "held_bytes": beat.held_bytes,
        "memory_bytes": beat.memory_bytes,
        "cpu_share": beat.cpu_share,
        "busy": busy,
        "moved_bytes_s": moved,
        "at_s": beat.at_s,
        "busy_s": beat.busy_s,
        "moved_bytes": beat.bytes_in + beat.bytes_out,
    }


def rates(
    before: Mapping[str, Any] | None, at_s: float, busy_s: float, moved_bytes: float
) -> tuple[float | None, float | None]:
    """Return the part of the time that it was busy, and bytes a second, between two heartbeats;
    what was known before, between none."""
    if before is None or "at_s" not in before:
        return None, None
    passed_s = at_s - before["at_s"]
    if passed_s <= 0:
        return before["busy"], before["moved_bytes_s"]
    busy, moved = busy_s - before["busy_s"], moved_bytes - before["moved_bytes"]
    if busy < 0 or moved < 0:  # It was started anew.
        return None, None
    return round(min(1.0, busy / passed_s), 4), round(moved / passed_s)


def lender(beat: SlabdHeartbeat) -> Row:
    return {
        "node": beat.node,
        "total_bytes": beat.total_bytes,
        "used_bytes": beat.used_bytes,
        "headroom_bytes": beat.headroom_bytes,
        "slab_bytes": beat.slab_bytes,
        "free_slabs": beat.free_slabs,
        "lent_slabs": beat.lent_slabs,
        "devices": beat.devices,
        "lending": beat.lending,
        "pressure": rounded(beat.pressure),
    }


def device(beat: DeviceHeartbeat) -> Row:
    return {
        "node": beat.node,
        "state": beat.state,
        "reason": beat.reason,
        "size_bytes": beat.size_bytes,
        "resilience": beat.resilience,
        "spans": beat.spans,
        "mapped_spans": beat.mapped_spans,
        "lenders": beat.lenders,
        "activity": rounded(beat.activity),
        "read_pages": beat.read_pages,
        "read_remote_pages": beat.read_remote_pages,
        "latency": [[each.cause, each.p50_us, each.p99_us] for each in beat.latency],
    }


def tenant(info: TenantInfo | None, used: UsageSums | None) -> Row:
    """Describe a tenant: its limits and present use, and what it used in the last days."""
    found: Row = {}
    if info is not None:
        found = {
            "running": info.running, "waiting": info.waiting, "cpu": rounded(info.cpu),
            "pool_cpu": rounded(info.pool_cpu), "cpu_fraction": info.cpu_fraction,
            "loss": rounded(info.loss) if info.measured else None, "beyond": info.beyond,
        }  # fmt: skip
    if used is not None:
        found |= {
            "gpu_h": rounded(used.gpu_s / 3600),
            "core_h": rounded(used.core_s / 3600),
            "server_h": rounded(used.standalone_core_s / 3600),
            "shared_h": rounded(used.aggregator_core_s / 3600),
            "submitted": used.submitted,
            "ended": used.ended,
        }
    return found


def policy(info: PolicyInfo) -> Row:
    return {
        "policy": info.policy,
        "settings": dict(info.settings),
        "gpus": info.gpus,
        "gpus_used": info.gpus_used,
        "running": info.running,
        "waiting": info.waiting,
    }


def rounded(value: float | None) -> float | None:
    """Round to what a page can show."""
    return None if value is None else round(value, 3)
