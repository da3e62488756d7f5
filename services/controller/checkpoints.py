"""Checkpoints of jobs' buckets: asked for, copied at one version, written (SCAR's checkpoint
coordinator: Qiao 2021, section 5.4).

What is known of one is not durable: after a restart the same order, which whoever wants it repeats,
begins it anew. A folder has all files of an iteration, or what it has of it does not count.
"""

from math import hypot, inf
from typing import Final

from slackwater.common.base.effects import StartTimer
from slackwater.common.domains.slots.rules import RULES
from slackwater.schemas.base import CONFLICT, NOT_FOUND, TOO_MANY, AggregatorId, Message, Refused
from slackwater.schemas.checkpoints import (
    BucketsCopied,
    BucketsWritten,
    CheckpointJob,
    CheckpointProgress,
    CopyBuckets,
    MarkJob,
    WriteBuckets,
)
from slackwater.services.controller import hosting
from slackwater.services.controller.checkpoint_state import Checkpoint
from slackwater.services.controller.keys import CheckpointDue, CopyAsked, WriteAsked
from slackwater.services.controller.state import Job, State

LOOK_S: Final = 0.1
"""Seconds between two looks at one that waits for a version, or for a disk."""
LOOK_AT_FIRST_S: Final = 0.01
"""And at one that has just begun: a program may stand still for it."""
UPDATES_MAX: Final = 64
"""Updates after which all is saved again: more files would be read for longer."""
_KEEPS_NOTHING: Final = (
    "its aggregators add gradients up and keep nothing; its program saves its state itself "
    "(slackwater.torch.checkpoint)"
)


def tick(state: State, now_s: float) -> None:
    """Begin the checkpoints that are due. The first comes as soon as a job's buckets have
    parameters, before a failure can hurt."""
    for job in state.living():
        spec, saving = job.record.spec, job.saving
        if not spec.save_to or job.record.phase in ("waiting", "hosting") or now_s < saving.due_s:
            continue
        if spec.recover == "rollback":
            continue  # Its program says when: it must hold still.
        if RULES[job.record.plan.update.name].sums:
            saving.due_s = inf
            state.tell(job, "checkpoint-failed", now_s, folder=spec.save_to, why=_KEEPS_NOTHING)
            continue
        if job.checkpoint is not None and not job.checkpoint.over:
            continue
        whole = saving.updates is None or saving.updates >= UPDATES_MAX
        saving.number += 1
        every_s = spec.save_every_s or saving.interval.every_s or state.config.save_every_min_s
        saving.due_s = now_s + every_s * spec.save_fraction
        job.checkpoint = Checkpoint(
            request=f"saved-{saving.number}",
            folder=spec.save_to,
            buckets=len(job.record.buckets),
            synchronous=job.record.plan.consistency == "synchronous",
            begun_s=now_s,
            life=state.epoch,
            automatic=True,
            fraction=1.0 if whole else spec.save_fraction,
            measured=not spec.save_every_s,
            rounded=spec.save_dtype == "bfloat16",
            before=saving.versions,
        )
        pursue(state, job, now_s)


def _ended(state: State, job: Job, made: Checkpoint, now_s: float) -> None:
    """Note how a checkpoint ended, and tell of it."""
    saving = job.saving
    if made.automatic and made.phase == "done":
        saving.failure = ""
        saving.versions = made.copied or saving.versions
        if made.measured and not made.unchanged:
            _choose_interval(state, job, made, now_s)
        if not made.unchanged:
            saving.updates = (saving.updates or 0) + 1 if made.partial else 0
    if made.phase == "failed":
        if made.automatic and saving.failure != made.reason:
            state.tell(job, "checkpoint-failed", now_s, folder=made.folder, why=made.reason)
        saving.failure = made.reason if made.automatic else saving.failure
    elif not made.unchanged and not ((made.automatic or made.mark) and saving.number > 1):
        state.tell(
            job, "checkpointed", now_s, iteration=str(made.iteration), folder=made.folder,
            bytes=str(sum(made.nbytes.values())), took_s=f"{made.ended_s - made.begun_s:.3f}",
        )  # fmt: skip


def _choose_interval(state: State, job: Job, made: Checkpoint, now_s: float) -> None:
    """Let the interval follow from what was saved, and tell where it became another one."""
    interval, homes = job.saving.interval, len(_homes(job))
    known = len(made.moved) == homes
    moved = hypot(*made.moved.values()) if known else None
    took_s, config = made.ended_s - made.begun_s, state.config
    if interval.saved(
        made.iteration, made.begun_s, took_s, moved, homes, config.aggregator_mtbf_s,
        config.save_every_min_s,
    ):  # fmt: skip
        state.tell(job, "save-interval", now_s, why=interval.described)


def order(
    state: State, job: Job | None, asked: CheckpointJob, now_s: float, *, mark: bool = False
) -> Message:
    """Begin a checkpoint, or tell how far it is."""
    if asked.job in state.unreadable:
        return hosting.unreadable(state, asked.job)
    if job is None or job.record.phase == "released":
        reason = f"cluster {state.cluster} has no job {asked.job}: it ended, or never began"
        return Refused(reason=reason, code=NOT_FOUND)
    standing = job.checkpoint
    if standing is not None and standing.request == asked.request:
        return progress(job, standing, now_s)
    if standing is not None and not standing.over:
        reason = f"job {job.id}: another checkpoint is being made ({standing.request})"
        return Refused(reason=reason, retry_after_s=0.5)
    record = job.record
    if RULES[record.plan.update.name].sums:
        return Refused(reason=f"job {job.id}: {_KEEPS_NOTHING}")
    if record.phase in ("waiting", "hosting"):
        return Refused(reason=f"job {job.id}: {hosting.why_waiting(job)}", retry_after_s=0.5)
    job.checkpoint = Checkpoint(
        request=asked.request,
        folder=asked.folder,
        buckets=len(record.buckets),
        synchronous=record.plan.consistency == "synchronous",
        begun_s=now_s,
        life=state.epoch,
        mark=mark,
    )
    job.saving.number += mark
    pursue(state, job, now_s)
    return progress(job, job.checkpoint, now_s)


def mark(state: State, job: Job | None, asked: MarkJob, now_s: float) -> Message:
    """Begin to save a job's tables as a mark, in the folder that its user gave, or tell how far it
    is."""
    if job is not None and job.record.spec.recover != "rollback":
        reason = f"job {job.id} does not go back to marks (recover)"
        return Refused(reason=reason, code=CONFLICT)
    folder = f"{job.record.spec.save_to}/{asked.mark}" if job is not None else ""
    message = CheckpointJob(job=asked.job, request=asked.mark, folder=folder)
    return order(state, job, message, now_s, mark=True)


def progress(job: Job, made: Checkpoint, now_s: float) -> CheckpointProgress:
    return CheckpointProgress(
        job=job.id,
        request=made.request,
        phase=made.phase,
        iteration=made.iteration or made.version or 0,
        buckets=made.buckets,
        written=len(made.written),
        nbytes=sum(made.nbytes.values()),
        took_s=max(0.0, (made.ended_s if made.over else now_s) - made.begun_s),
        reason=made.reason,
    )


def pursue(state: State, job: Job, now_s: float) -> None:
    """Ask every aggregator of the job for what comes next."""
    made = job.checkpoint
    if made is None or made.over:
        return
    look_s = min(LOOK_S, max(LOOK_AT_FIRST_S, (now_s - made.begun_s) / 4))
    state.out.append(StartTimer(CheckpointDue(job.id), now_s + look_s))
    if job.record.phase == "released":
        made.fail("the job ended", now_s)
        return
    for aggregator, buckets in sorted(_homes(job).items()):
        if not state.alive(aggregator):
            continue  # It comes back with its buckets, or they are elsewhere the next time.
        if made.phase == "writing":
            state.ask_aggregator(
                WriteAsked(job.id, aggregator), "write", aggregator,
                _write(job, made, buckets), now_s, insist=False,
            )  # fmt: skip
        elif aggregator not in made.heard:
            message = CopyBuckets(
                job=job.id, request=made.request, attempt=made.attempt, buckets=tuple(buckets),
                version=made.version, look=made.phase == "looking",
                distances=made.partial or made.measured,
            )  # fmt: skip
            key = CopyAsked(job.id, aggregator)
            state.ask_aggregator(key, "copy", aggregator, message, now_s, insist=False)


def _homes(job: Job) -> dict[AggregatorId, list[int]]:
    """Return the buckets of each aggregator that has some now, wherever they are going to."""
    homes: dict[AggregatorId, list[int]] = {}
    for bucket in range(len(job.record.places)):
        homes.setdefault(job.place(bucket).aggregator, []).append(bucket)
    return homes


def _write(job: Job, made: Checkpoint, buckets: list[int]) -> WriteBuckets:
    record = job.record
    return WriteBuckets(
        job=job.id,
        request=made.request,
        attempt=made.attempt,
        layouts=tuple(record.buckets[bucket] for bucket in buckets),
        tensors=record.tensors,
        parts=len(record.buckets),
        iteration=made.iteration,
        folder=made.folder,
        prune=made.automatic,
        remember=made.measured or (made.automatic and record.spec.save_fraction < 1.0),
        above=made.above,
        share=made.share,
        rounded=made.rounded,
    )


def copied(state: State, job: Job, aggregator: AggregatorId, answer: Message, now_s: float) -> None:
    """Take an answer to CopyBuckets."""
    made = job.checkpoint
    if made is None or made.phase not in ("looking", "copying"):
        return
    homes = _homes(job)
    here = homes.get(aggregator, [])
    if isinstance(answer, Refused) and answer.status == TOO_MANY:
        made.fail(answer.reason, now_s)
    elif not isinstance(answer, BucketsCopied):
        made.begin_anew(_why(answer), now_s)  # It is looked at again when the timer fires.
    elif answer.attempt != made.attempt:
        return  # It is late.
    elif len(here) != len(answer.now):
        made.begin_anew("a bucket moved", now_s)
    else:
        made.told(aggregator, here, answer.now, answer.copied, answer.distances, answer.moved)
        if made.heard >= homes.keys() and made.decide(now_s):
            pursue(state, job, now_s)
    if made.over:
        _ended(state, job, made, now_s)


def wrote(state: State, job: Job, aggregator: AggregatorId, answer: Message, now_s: float) -> None:
    """Take an answer to WriteBuckets."""
    made = job.checkpoint
    if made is None or made.phase != "writing":
        return
    if not isinstance(answer, BucketsWritten):
        made.begin_anew(_why(answer), now_s)
    elif answer.attempt != made.attempt:
        return  # It is late.
    elif answer.lacking:
        made.begin_anew(f"{aggregator} has not all copies any more", now_s)
    elif answer.reason:
        made.fail(answer.reason, now_s)
    else:
        made.wrote(aggregator, answer.written, answer.nbytes, now_s)
    if made.over:
        _ended(state, job, made, now_s)


def _why(answer: Message) -> str:
    return answer.reason if isinstance(answer, Refused) else f"answered {type(answer).__name__}"
