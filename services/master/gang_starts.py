"""Gangs that a node does not take, or does not start, in time: they are given up everywhere.

Pure. A gang is started once all of its nodes keep room for it. One that refuses, dies or is silent
before that costs nothing but the wait. One that does so between its answer and the order to start
leaves the others' ranks waiting for its own: they are stopped, and the next attempt goes elsewhere.
The node is given no GPU job for a while, longer each time, so that neither this job nor the next
one tries the same again and again.
"""

from typing import Final

from slackwater.schemas.base import NodeId
from slackwater.schemas.workers import fetch_s
from slackwater.services.master.jobs import Job
from slackwater.services.master.keys import Verb
from slackwater.services.master.lifecycle import (
    advance,
    count_use,
    leave,
    on_processes_gone,
    ready,
    start_ready,
)
from slackwater.services.master.state import State

STEP_S: Final = 5.0
"""Seconds that the nodes of a gang have to keep room for it, all together; and again to start it.
"""


def late_node(state: State, job: Job, now_s: float) -> tuple[NodeId, str] | None:
    """Name the node that keeps a gang from being started for too long, and say why."""
    record = job.record
    if record.state != "starting" or not record.spec.gpus or not ready(state, job):
        job.begun = None
        return None
    verb: Verb = "prepare" if job.unprepared else "start"
    if job.begun is None or job.begun[0] != verb:
        job.begun = verb, now_s
    more_s = fetch_s(record.spec.code, record.spec.venv) if verb == "prepare" else 0.0
    if now_s - job.begun[1] < STEP_S + more_s:
        return None
    late = job.unprepared or job.unstarted
    if not late:
        return None
    node = late[0]
    return node, job.refusals.get(job.order(verb, node), "it does not answer")


def give_up(state: State, job: Job, node: NodeId, why: str, now_s: float) -> None:
    """Give up the attempt because of `node`: what is kept for it is free again, and where ranks of
    it were started they are stopped."""
    verb = "take" if job.unprepared else "start"
    # Another master may have started ranks before this one asked.
    nothing_there = job.unprepared if job.found != job.record.attempt else []
    avoided_s = state.nodes.avoid(node, f"it did not {verb} job {job.id}: {why}", now_s)
    reason = (
        f"worker node {node} does not {verb} it: {why}; it waits for other GPUs, and {node} is "
        f"left out for {avoided_s:g} s"
    )
    leave(state, job, (), now_s, reason=reason)
    job.told |= {job.order("stop", each) for each in nothing_there}
    advance(state, job)
    on_processes_gone(state, job, now_s)


def free_early(state: State, job: Job, now_s: float) -> None:
    """Give others the GPUs of nodes on which no process of it is left, while another of its nodes
    is waited for."""
    record = job.record
    if (record.state != "stopping" and not job.ended) or not job.unstopped:
        return
    kept = {n: ids for n, ids in record.gpu_ids.items() if n in job.unstopped}
    if kept != record.gpu_ids:
        state.change(job, now_s, gpu_ids=kept, **count_use(state, job, None, now_s))
        start_ready(state)
