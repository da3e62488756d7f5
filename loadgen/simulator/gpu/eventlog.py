"""The event log of a run: one file that Perfetto draws and the auditor re-checks.

Chrome's trace-event JSON: machines are processes, a job's segment is a slice on each of its
machines, failed machines and submissions are marks, allocated GPUs and active jobs are counters.
Under the key `slackwater` (which trace viewers skip) lie the facts the auditor needs and a viewer
does not: the machines, the jobs as submitted and as ended, the outages.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import msgspec

from slackwater.common.base.errors import Rejected
from slackwater.loadgen.simulator.gpu.outcome import Result, Segment
from slackwater.services.master.scheduling.view import NO_RULES, Rules

SCHEMA = 1
_MICRO = 1_000_000


class LoggedJob(msgspec.Struct, omit_defaults=True):
    id: str
    submit_s: float
    end_s: float
    gpus: int
    gpus_min: int
    gpus_max: int
    gpu_s: float
    work_total: float
    restarts: int
    preemptions: int
    failures: int
    tenant: str = ""
    """Noted where there are quotas."""
    priority: int = 0
    gpu_types: tuple[str, ...] = ()
    """The types that it can run on, where there are several; empty: any."""


class Facts(msgspec.Struct, omit_defaults=True):
    schema: int
    policy: str
    job_model: str
    exact: bool
    """Progress is running time times the share of the GPUs asked for: the auditor can redo it."""
    nodes: list[tuple[int, str]]
    outages: list[tuple[int, float, float | None]]
    jobs: list[LoggedJob]
    quotas: dict[str, int] = {}
    """Tenant -> GPUs; with `borrowing`, what it is guaranteed, else all that it may hold."""
    borrowing: bool = True
    min_run_s: float = 0


class EventLog(msgspec.Struct, rename={"trace_events": "traceEvents", "unit": "displayTimeUnit"}):
    unit: str
    slackwater: Facts
    trace_events: list[dict[str, Any]]


def event_log(
    result: Result,
    policy: str,
    job_model: str,
    nodes: Sequence[tuple[int, str]],
    exact: bool,
    rules: Rules = NO_RULES,
) -> EventLog:
    several = len({kind for _, kind in nodes}) > 1
    facts = Facts(
        SCHEMA, policy, job_model, exact, list(nodes),
        [(node, a, None if b == float("inf") else b) for node, a, b in result.outages],
        [
            LoggedJob(
                o.job.spec.id, o.job.submit_s, o.end_s, o.job.spec.gpus, *o.job.spec.gpu_bounds,
                o.gpu_s, o.work_total, o.restarts, o.preemptions, o.failures,
                o.job.spec.tenant if rules.quotas else "", o.job.spec.priority,
                tuple(sorted(o.job.spec.gpu_types)) if several else (),
            )
            for o in result.outcomes
        ],
        dict(rules.quotas), rules.borrowing or not rules.quotas, rules.min_run_s or 0,
    )  # fmt: skip
    events = [_name(0, "cluster")]
    events += [_name(i + 1, f"n{i} ({f'{g} GPUs {t}'.strip()})") for i, (g, t) in enumerate(nodes)]
    events += _slices(result)
    events += _marks(result)
    events += _counters(result.segments)
    return EventLog("ms", facts, events)


def write(log: EventLog, path: Path) -> None:
    path.write_bytes(msgspec.json.encode(log))


def read(path: Path) -> EventLog:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EventLog)
    except OSError as error:
        raise Rejected(f"{path}: expected a readable event log ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"{path} is not an event log of loadgen simulate: {error}") from error


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _slices(result: Result) -> list[dict[str, Any]]:
    """Each on the lowest free lane of its machine, so that slices of a lane never overlap."""
    events: list[dict[str, Any]] = []
    lanes = _Lanes()
    for s in sorted(result.segments, key=lambda s: (s.start_s, s.number, s.end_s)):
        job = result.outcomes[s.number].job
        for node, gpus in s.allocation:
            events.append(
                {
                    "ph": "X", "name": job.spec.id, "cat": s.why, "pid": node + 1,
                    "tid": lanes.take(node, s.start_s, s.end_s),
                    "ts": round(s.start_s * _MICRO), "dur": round((s.end_s - s.start_s) * _MICRO),
                    "args": {
                        "job": s.number, "gpus": gpus, "group": s.group, "start_s": s.start_s,
                        "end_s": s.end_s, "ready_s": s.ready_s, "work_before": s.work_before,
                        "work_after": s.work_after, "why": s.why,
                    },
                }
            )  # fmt: skip
    return events


class _Lanes:
    def __init__(self) -> None:
        self._busy: dict[int, list[tuple[float, int]]] = {}
        self._free: dict[int, list[int]] = {}
        self._count: dict[int, int] = {}

    def take(self, node: int, start_s: float, end_s: float) -> int:
        busy = self._busy.setdefault(node, [])
        free = self._free.setdefault(node, [])
        while busy and busy[0][0] <= start_s:
            heappush(free, heappop(busy)[1])
        if not free:
            self._count[node] = self._count.get(node, 0) + 1
            heappush(free, self._count[node])
        lane = heappop(free)
        heappush(busy, (end_s, lane))
        return lane


def _marks(result: Result) -> list[dict[str, Any]]:
    marks = [("submitted " + o.job.spec.id, o.job.submit_s) for o in result.outcomes]
    marks += [("completed " + o.job.spec.id, o.end_s) for o in result.outcomes]
    for node, lost_s, back_s in result.outages:
        marks.append((f"lost n{node}", lost_s))
        if back_s < float("inf"):
            marks.append((f"back n{node}", back_s))
    return [
        {"ph": "i", "s": "p", "name": name, "pid": 0, "tid": 0, "ts": round(at_s * _MICRO)}
        for name, at_s in sorted(marks, key=lambda mark: (mark[1], mark[0]))
    ]


def _counters(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    steps: dict[float, list[int]] = {}
    for s in segments:
        gpus = sum(count for _, count in s.allocation)
        for at_s, sign in ((s.start_s, 1), (s.end_s, -1)):
            step = steps.setdefault(at_s, [0, 0])
            step[0] += sign * gpus
            step[1] += sign
    gpus_held = running = 0
    events = []
    for at_s in sorted(steps):
        gpus_held += steps[at_s][0]
        running += steps[at_s][1]
        events.append(
            {
                "ph": "C", "name": "held", "pid": 0, "tid": 0, "ts": round(at_s * _MICRO),
                "args": {"GPUs asked of by running jobs": gpus_held, "running jobs": running},
            }
        )  # fmt: skip
    return events
