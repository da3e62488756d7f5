"""Worker nodes for people: what each told last, and what jobs hold of it by their records."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import NodeInfo, WorkerHeartbeat
from slackwater.schemas.jobs import JobRecord


def listing(
    heard: Iterable[tuple[WorkerHeartbeat, bool]], records: Iterable[JobRecord]
) -> list[NodeInfo]:
    """List the nodes by id. `heard`: each one's last heartbeat, and whether it came lately.
    `records`: of jobs whose processes are not known to have ended."""
    slots, gpus, jobs = Counter[NodeId](), defaultdict[NodeId, list[str]](list), Counter[NodeId]()
    for record in records:
        if record.state == "completed":
            continue
        for node, number in record.allocation:
            jobs[node] += 1
            gpus[node] += record.gpu_ids.get(node, ())
            slots[node] += 0 if record.spec.gpus else number
    infos = (
        NodeInfo(
            alive=alive,
            heartbeat=msgspec.structs.replace(beat, running=()),
            slots_used=slots[beat.node],
            gpus_used=tuple(sorted(gpus[beat.node])),
            jobs=jobs[beat.node],
        )
        for beat, alive in heard
    )
    return sorted(infos, key=lambda info: info.heartbeat.node)
