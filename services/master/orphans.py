"""Processes of jobs that nobody knows: their records were lost with a store, or with a backup.

Pure. A node that tells of such a job in its heartbeats for ORPHAN_S is told to stop it. A job whose
record is damaged is known: it is somebody's, until a person has looked.
"""

from typing import Final

from slackwater.common.base.effects import Count, Log, Request
from slackwater.schemas import subjects
from slackwater.schemas.base import ATTEMPTS_MAX, RUNS_MAX
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.workers import StopWorkers
from slackwater.services.master.keys import OrphanKey
from slackwater.services.master.state import ASK_BUDGET_S, State

ORPHAN_S: Final = 5.0
"""Seconds for which a job is unknown before it is stopped: a heartbeat may be older than a deletion
of what it tells."""


def look(state: State, heartbeat: WorkerHeartbeat, now_s: float) -> None:
    """Stop what the node has run of unknown jobs for ORPHAN_S. Said again each ORPHAN_S."""
    node = heartbeat.node
    running = {id for id, _ in heartbeat.running}
    unknown = {id for id in running if id not in state.jobs and id not in state.unreadable}
    for key in [key for key in state.orphans if key.node == node and key.job not in unknown]:
        del state.orphans[key]
    for id in sorted(unknown):
        key = OrphanKey(id, node)
        if now_s - state.orphans.setdefault(key, now_s) < ORPHAN_S:
            continue
        state.orphans[key] = now_s
        subject = subjects.command("worker", state.nodes.service_id(node), "stop")
        lane = f"{subject.rpartition('.')[0]}/{id}"  # Before a start of another job of that id.
        stop = StopWorkers(job=id, run=RUNS_MAX, attempt=ATTEMPTS_MAX)
        state.out += [
            Log("job.unknown", {"job": id, "node": node}, "warning"),
            Count("unknown_jobs_stopped"),
            Request(subject, stop, key, lane=lane, budget_s=ASK_BUDGET_S),
        ]
