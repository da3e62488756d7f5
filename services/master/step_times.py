"""The times of an asynchronous job's iterations, out of what its Agents report of their turns (Lin
et al. 2018, section III-A), for its record and for policies that size it.

Pure. Means over turns of all its workers, never medians: a stall is time, too. A change of the
number of workers begins anew. What is stored was measured with as few workers as ever: the fewer
wait for each other, the less has to be reckoned out. A record is written when there are enough
turns, and whenever they have doubled.
"""

from slackwater.common.base.effects import Log
from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.asynchronous_speed import profile_of
from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.telemetry import IterationsObserved
from slackwater.services.master.jobs import Job
from slackwater.services.master.state import State
from slackwater.services.master.turn_sums import TurnSums


def heard(state: State, job: Job, message: IterationsObserved, now_s: float) -> None:
    """Take what a rank says of its turns; store the job's times once they are known better."""
    record, workers = job.record, message.workers
    if record.spec.consistency != "asynchronous" or not message.turns.turns or record.resizing:
        return
    if not 1 <= workers <= WORKERS_MAX:  # An Agent of an older version does not say it.
        return
    turns = job.turns
    if (turns.attempt, turns.workers) != (record.attempt, workers):
        turns = job.turns = TurnSums(workers, record.attempt)
    turns.add(message)
    if turns.sums.turns < turns.next:
        return
    turns.next = 2 * turns.sums.turns
    known = record.steps
    if known is not None and known.workers < workers:
        return
    try:
        steps = profile_of(turns.sums, workers, tuple(turns.pushed_bytes.values()))
    except Rejected as error:
        state.out.append(Log("steps.refused", {"job": job.id, "reason": str(error)}, "warning"))
        return
    state.change(job, now_s, steps=steps)
    state.gpus.due |= bool(record.spec.gpus)
