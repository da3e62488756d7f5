"""An auditor who trusts nobody: re-checks a run from its event log alone.

It shares no code with the engine or the policies. From the slices it rebuilds who held what when,
and checks, at every instant:

- **capacity**: no machine gives more GPUs than it has, none while it is down; GPUs of a group are
  counted once, and its members hold exactly the same ones;
- **gangs**: a job holds GPUs on all its machines at the same time, between its minimum and its
  maximum, and is in one place at a time;
- **conservation of work**: progress only grows while GPUs are held and ready, falls only when a
  machine is lost, carries over from segment to segment, and ends at the job's whole work; where the
  job model is exact, it is redone to the second;
- **jobs in = jobs out**: every submitted job ends, after its submission, once;
- **the operator's rules** (see `audit_rules`): GPU types, minimum run time, quotas, priorities.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from slackwater.common.base import limits
from slackwater.loadgen.simulator.gpu.audit_rules import Held, check_rules
from slackwater.loadgen.simulator.gpu.eventlog import EventLog, LoggedJob
from slackwater.loadgen.traces.record import TraceJob

_SLACK = 1e-6


def audit(log: EventLog, trace: Iterable[TraceJob] | None = None) -> list[str]:
    """Return the violations, one sentence each (a bounded number); empty if all is well."""
    findings: list[str] = []
    held = _segments(log, findings)
    for number, job in enumerate(log.slackwater.jobs):
        findings += _check_job(job, held.get(number, []), log.slackwater.exact)
    findings += _check_capacity(log, held)
    findings += check_rules(log, held)
    if trace is not None:
        findings += _check_against(log, trace)
    return findings[: limits.AUDIT_FINDINGS_MAX]


def _segments(log: EventLog, findings: list[str]) -> dict[int, list[Held]]:
    """The slices of each job, those of one segment together, in time order."""
    parts: dict[tuple[int, float, float], list[dict[str, Any]]] = {}
    for event in log.trace_events:
        if event["ph"] == "X":
            args = event["args"]
            key = (args["job"], args["start_s"], args["end_s"])
            parts.setdefault(key, []).append({**args, "node": event["pid"] - 1})
    held: dict[int, list[Held]] = {}
    for (number, start_s, end_s), slices in sorted(parts.items()):
        first = slices[0]
        if len({(s["group"], s["work_before"], s["work_after"]) for s in slices}) > 1:
            findings.append(f"job {number} at {start_s} s: its machines disagree about one segment")
        places = tuple(sorted((s["node"], s["gpus"]) for s in slices))
        held.setdefault(number, []).append(
            Held(
                start_s, end_s, first["ready_s"], places, first["group"], first["work_before"],
                first["work_after"], first["why"],
            )
        )  # fmt: skip
    return held


def _check_job(job: LoggedJob, held: list[Held], exact: bool) -> list[str]:
    findings: list[str] = []

    def wrong(text: str) -> None:
        findings.append(f"job {job.id}: {text}")

    if not held:
        return [f"job {job.id} was submitted and never held a GPU"]
    if held[0].start_s < job.submit_s:
        wrong(f"starts at {held[0].start_s} s, before its submission at {job.submit_s} s")
    if held[-1].end_s != job.end_s or [h.why for h in held].count("completed") != 1:
        wrong(f"ends at {job.end_s} s, but its segments do not end there with one completion")
    if held[0].before != 0:
        wrong(f"starts with {held[0].before} of its work done")
    if abs(held[-1].after - job.work_total) > _SLACK * max(1, job.work_total):
        wrong(f"ends with {held[-1].after} of {job.work_total} done")
    for a, b in pairwise(held):
        if b.start_s < a.end_s:
            wrong(f"is in two places at {b.start_s} s")
        if abs(b.before - a.after) > _SLACK * max(1, a.after):
            wrong(f"goes on with {b.before} at {b.start_s} s, but had {a.after}")
    for h in held:
        if not job.gpus_min <= h.gpus <= job.gpus_max:
            wrong(f"holds {h.gpus} GPUs at {h.start_s} s; its gang is {job.gpus_min}..")
        if h.after < h.before and h.why != "node-lost":
            wrong(f"loses work in the segment from {h.start_s} s, though no machine was lost")
        if exact:
            findings += _check_exact(job, h)
    service = sum(h.gpus * (h.end_s - h.start_s) for h in held)
    if abs(service - job.gpu_s) > _SLACK * max(1, service):
        wrong(f"held {service} GPU-seconds, but {job.gpu_s} are in its account")
    return findings


def _check_exact(job: LoggedJob, h: Held) -> list[str]:
    """Undisturbed jobs: progress is time ready times the share of the GPUs asked for."""
    gained = h.after - h.before
    most = max(0, h.end_s - max(h.ready_s, h.start_s)) * h.gpus / job.gpus
    short = most - gained
    allowed = h.gpus / job.gpus if h.why == "completed" else _SLACK * max(1, most)
    if h.why == "node-lost":
        allowed = most + h.before
    if not -_SLACK * max(1, most) <= short <= allowed:
        return [
            f"job {job.id}: gained {gained} in the segment from {h.start_s} to {h.end_s} s, "
            f"which has room for {most}"
        ]
    return []


def _check_capacity(log: EventLog, held: dict[int, list[Held]]) -> list[str]:
    nodes = log.slackwater.nodes
    room = [gpus for gpus, _ in nodes]
    # At an instant, first what ends, then machines that come back, then machines that are lost,
    # then what starts.
    steps: list[tuple[float, int, int, str, Held | None]] = []
    for number, segments in held.items():
        for h in segments:
            steps.append((h.end_s, 0, number, h.group, h))
            steps.append((h.start_s, 3, number, h.group, h))
    for node, lost_s, back_s in log.slackwater.outages:
        steps.append((lost_s, 2, node, "", None))
        if back_s is not None:
            steps.append((back_s, 1, node, "", None))
    steps.sort(key=lambda step: step[:4])
    findings: list[str] = []
    groups: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {}
    for at_s, kind, number, group, segment in steps:
        if segment is None:
            room[number] += nodes[number][0] * (1 if kind == 1 else -1)
            continue
        places = segment.places
        sign = 1 if kind == 0 else -1
        members = groups.setdefault(group, {}) if group else {}
        if kind == 0:
            members.pop(number, None)
        elif any(others != places for others in members.values()):
            findings.append(f"group {group} at {at_s} s: job {number} holds other GPUs than it")
        if not members:
            for node, gpus in places:
                if not 0 <= node < len(nodes):
                    findings.append(f"job {number} at {at_s} s is on machine {node}, unknown")
                    continue
                room[node] += sign * gpus
                if room[node] < 0:
                    findings.append(
                        f"machine {node} is over its capacity by {-room[node]} GPUs at {at_s} s "
                        f"(job {number} starts)"
                    )
        if kind == 3 and group:
            members[number] = places
    return findings


def _check_against(log: EventLog, trace: Iterable[TraceJob]) -> list[str]:
    """Jobs in = jobs out, by name and size."""
    logged = {job.id: job for job in log.slackwater.jobs}
    findings = []
    count = 0
    for row in trace:
        count += 1
        job = logged.get(row.id)
        if job is None:
            findings.append(f"job {row.id} of the trace is not in the log")
        elif job.gpus != row.gpus:
            findings.append(f"job {row.id} asks for {row.gpus} GPUs, {job.gpus} in the log")
    if count != len(logged):
        findings.append(f"the trace has {count} jobs, the log {len(logged)}")
    return findings
