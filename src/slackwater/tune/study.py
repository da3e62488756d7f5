"""The search: asks an Optuna study for trials, runs each as a job, and tells the study its values.

A trial's job is named after the given one and the trial's number. One loop looks at all jobs at
work each `LOOK_S`: values that a job's rank 0 has printed since go to the study, whose pruner may
end it; the last value is the trial's result. A job that fails, or that somebody cancels, fails its
trial. However the search ends, it cancels the jobs that it still has.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import optuna
from optuna.trial import TrialState

from slackwater.common.base import codec
from slackwater.common.base.errors import ConfigRejected, Retryable
from slackwater.common.shell.client import Client, connect
from slackwater.common.shell.config import DEFAULT_URL
from slackwater.schemas.base import Refused
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.logs import LogPiece, ReadLog
from slackwater.tune.values import Parameter, Told, environment, told

LOOK_S: Final = 0.5
READ_S: Final = 2.0
"""Seconds that a node may take to send a piece of a log; else it is asked at the next look."""
AT_ONCE_MAX: Final = 256

Suggest = Callable[[optuna.Trial], Mapping[str, Parameter]]


@dataclass(slots=True)
class _Running:
    trial: optuna.Trial
    job: str
    attempt: int = -1
    offset: int = 0
    """Bytes of rank 0's log of this attempt that were read."""
    last: Told | None = None


def optimize(
    study: optuna.Study,
    suggest: Suggest,
    job: JobSpec,
    *,
    trials: int,
    at_once: int = 4,
    url: str | None = None,
) -> None:
    """Run so many trials, `at_once` of them side by side. `job`: each trial's, with an id of its
    own and its parameters in its environment; `url`: the cluster's bus, else SLACKWATER_URL's.

    Raises ConfigRejected for numbers that cannot be, Rejected where the cluster refuses a job,
    Unavailable where nobody answers for long.
    """
    if trials < 1 or not 1 <= at_once <= AT_ONCE_MAX:
        raise ConfigRejected(
            f"{trials} trials, {at_once} at once: give at least 1, and 1 to {AT_ONCE_MAX}"
        )
    asyncio.run(_search(study, suggest, job, trials, at_once, url))


async def _search(
    study: optuna.Study, suggest: Suggest, job: JobSpec, trials: int, at_once: int, url: str | None
) -> None:
    where = url or os.environ.get("SLACKWATER_URL") or DEFAULT_URL
    async with connect(where, "tune") as found:
        client = found.patient()
        running: list[_Running] = []
        begun = 0
        try:
            while begun < trials or running:
                while begun < trials and len(running) < at_once:
                    running.append(await _begin(client, study, suggest, job))
                    begun += 1
                await asyncio.sleep(LOOK_S)
                for each in list(running):
                    if await _look(client, study, each):
                        running.remove(each)
        finally:
            for each in running:
                study.tell(each.trial, state=TrialState.FAIL)
                await client.cancel(each.job)


async def _begin(client: Client, study: optuna.Study, suggest: Suggest, job: JobSpec) -> _Running:
    trial = study.ask()
    values = suggest(trial)
    id = f"{job.id}-{trial.number}"
    spec = msgspec.structs.replace(job, id=id, env={**job.env, **environment(values)})
    await client.submit(spec)
    trial.set_user_attr("job", id)
    return _Running(trial, id)


async def _look(client: Client, study: optuna.Study, each: _Running) -> bool:
    """Say whether the trial is over."""
    record = await client.job(each.job)
    ended = record.state in TERMINAL_STATES
    for value in await _printed(client, record, each):
        each.last = value
        each.trial.report(value.value, value.step)
        if not ended and each.trial.should_prune():
            await client.cancel(each.job)
            study.tell(each.trial, state=TrialState.PRUNED)
            return True
    if record.state == "completed" and each.last is not None:
        study.tell(each.trial, each.last.value)
    elif ended:
        each.trial.set_user_attr("reason", record.reason or "it reported no value")
        study.tell(each.trial, state=TrialState.FAIL)
    return ended


async def _printed(client: Client, record: JobRecord, each: _Running) -> list[Told]:
    """Read what rank 0 has printed since the last look, whole lines."""
    if record.node is None:
        return []
    if record.attempt != each.attempt:
        each.attempt, each.offset = record.attempt, 0
    found: list[Told] = []
    while True:
        asked = ReadLog(job=each.job, rank=0, offset=each.offset)
        subject = client.subject("worker", record.node, "log")
        try:
            raw = await client.bus.request(subject, codec.encode(asked), timeout_s=READ_S)
        except Retryable:
            return found
        piece: LogPiece | Refused = codec.decode(raw, LogPiece | Refused)
        if isinstance(piece, Refused):
            return found
        values, read = told(piece.data)
        each.offset = piece.start + read
        found += [v for v in values if each.last is None or v.step > each.last.step]
        if not read or each.offset >= piece.end:
            return found
