"""Why a job waits, in words for its user: what it asks for, what there is, and the remedy.

Computed when somebody looks, from what is known then, and never stored: a stored reason would have
to be corrected with every slot that comes free. Whoever holds the job up knows why: the worker
nodes' room (nodes.py), the node or the controller that refused an order, and the reports of the
job's controller.
"""

from collections.abc import Iterable, Iterator

import msgspec

from slackwater.schemas.jobs import JobRecord
from slackwater.services.master.clusters import Clusters
from slackwater.services.master.jobs import Job
from slackwater.services.master.nodes import Nodes, Wait

REASON_CHARS_MAX = 1024
BRIEF_CHARS_MAX = 200
NO_CONTROLLER = "waits for a cluster of aggregators: no controller is heard"


def shown(
    page: Iterable[Job], jobs: Iterable[Job], nodes: Nodes, clusters: Clusters, now_s: float
) -> Iterator[JobRecord]:
    """The records of `page`, one part of all `jobs`; those that wait say why."""
    picked = list(page)
    waits: dict[str, Wait] = {}
    if any(job.queued for job in picked):
        all_jobs = list(jobs)
        queue = [job.record for job in all_jobs if job.queued]
        running = [job.record for job in all_jobs if job.record.state == "running"]
        waits = {wait.job: wait for wait in nodes.assign(queue, running, now_s)[1]}
    for job in picked:
        why = job.record.reason if job.ended else _why(job, waits, clusters, now_s)
        yield msgspec.structs.replace(job.record, reason=why[:REASON_CHARS_MAX])


def _why(job: Job, waits: dict[str, Wait], clusters: Clusters, now_s: float) -> str:
    """Empty where nothing holds the job up."""
    record = job.record
    if job.queued:
        wait = waits.get(record.spec.id)
        return wait.reason if wait is not None else "its slots are free, it is about to start"
    if record.state == "pending":
        return (
            "waits for its user to start its program, whose Agents register; "
            "a job that a worker node starts has a `program`"
        )
    if "start" in job.refusals:
        return f"waits for worker node {record.node}, which refused: {job.refusals['start']}"
    if record.cluster is None:
        return _no_cluster(clusters, now_s) if job.tensors else ""
    if "place" in job.refusals:
        return f"controller {record.cluster} refused it: {job.refusals['place']}"
    if clusters.silent(record.cluster, now_s):
        return (
            f"its controller {record.cluster} is not heard: what it has to decide waits; start it "
            f"with `slackwater run controller` (id {record.cluster})"
        )
    return clusters.waiting(record.cluster, job.id)


def _no_cluster(clusters: Clusters, now_s: float) -> str:
    if any(clusters.alive(known, now_s) for known in clusters.known):
        return ""  # The next registration, due any moment, finds it.
    return (
        f"{NO_CONTROLLER} ({len(clusters.known)} were heard before); start one with "
        "`slackwater run controller`"
    )


def brief(record: JobRecord) -> JobRecord:
    """A record as a list has it: `get` gives the rest."""
    return msgspec.structs.replace(
        record,
        results={},
        reason=record.reason[:BRIEF_CHARS_MAX],
        spec=msgspec.structs.replace(record.spec, program=record.spec.program[:1]),
    )
