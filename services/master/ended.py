"""The jobs that ended a while ago and whose records the master has dropped.

Pure. A submission whose answer was lost comes again for as long as its client tries. The record of
a job that ran briefly may be gone by then, if many others ended after it. Its id is kept instead,
with a digest of its spec: the same spec is acknowledged once more, another one is refused, and
neither runs. It is stored before the record is deleted, many ids in one record, so that a master
that starts has few to read.
"""

from collections import deque
from hashlib import blake2b
from typing import Any, Final

import msgspec

from slackwater.common.base.limits import RETRY_BUDGET_S
from slackwater.schemas.base import JobId, Refused
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import ENDED_TOGETHER_MAX, EndedJob, EndedJobs, JobRecord, JobSpec

ENDED_BUCKET: Final = "ended"
KEPT_S: Final = 10 * RETRY_BUDGET_S
"""Seconds after its end for which a job's id is kept: no client tries for nearly so long."""
KEPT_MAX: Final = 100_000
"""Ids that are kept; while there are so many no further job is taken."""


class Ended:
    """Jobs without a record, by id."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, EndedJob] = {}
        self._records: deque[tuple[int, list[EndedJob]]] = deque()
        """The stored records, each with its number, the oldest first."""

    def recover(self, records: dict[str, Any]) -> None:
        """Take what a former master stored."""
        found = {key: each for key, each in records.items() if isinstance(each, EndedJobs)}
        self._records = deque((int(key), list(found[key].jobs)) for key in sorted(found))
        self._jobs = {job.id: job for _, jobs in self._records for job in jobs}

    def state_of(self, id: str) -> JobState | None:
        """Return how the job ended; None: it is not known."""
        found = self._jobs.get(JobId(id))
        return None if found is None else found.state

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, id: str) -> bool:
        return id in self._jobs

    def add(self, record: JobRecord, now_s: float) -> tuple[str, EndedJobs] | None:
        """Return the key and the record to store for a job that ended; None: nothing. A job that
        its user deleted was to be forgotten."""
        id = JobId(record.spec.id)
        if record.deleted or id in self._jobs or now_s - record.finished_s > KEPT_S:
            return None
        kept = EndedJob(
            id=id,
            spec=digest(record.spec),
            state=record.state,
            run=record.run,
            ended_s=record.finished_s,
        )
        self._jobs[id] = kept
        number, together = self._records[-1] if self._records else (0, [])
        if not self._records or len(together) >= ENDED_TOGETHER_MAX:
            number, together = number + 1, []
            self._records.append((number, together))
        together.append(kept)
        return _key(number), EndedJobs(jobs=tuple(together))

    def expired(self, now_s: float) -> list[str]:
        """Let go of records in which all are old enough; returns their keys."""
        found = []
        while self._records and self._left_s(now_s) <= 0.0:
            number, together = self._records.popleft()
            found.append(_key(number))
            for job in together:
                del self._jobs[job.id]
        return found

    def no_room(self, now_s: float) -> Refused | None:
        """Refuse a further job while too many ids are kept."""
        if len(self._jobs) < KEPT_MAX:
            return None
        reason = f"{KEPT_MAX} jobs ended within the last {KEPT_S / 60.0:.0f} minutes"
        return Refused(reason=reason, retry_after_s=max(1.0, self._left_s(now_s)))

    def known(self, spec: JobSpec) -> JobRecord | None:
        """Return what is still known of a job with just this spec, which is submitted again."""
        kept = self._jobs.get(JobId(spec.id))
        if kept is None or kept.spec != digest(spec):
            return None
        return JobRecord(
            spec=spec, state=kept.state, run=kept.run, finished_s=kept.ended_s, released=True
        )

    def taken(self, id: JobId) -> str:
        """Say why another job cannot have this id; empty: it can."""
        if id not in self._jobs:
            return ""
        return (
            f"job {id} ended a while ago, and its record is dropped (jobs_kept_max); choose "
            f"another id, or this one again {KEPT_S / 60.0:.0f} minutes after its end"
        )

    def _left_s(self, now_s: float) -> float:
        """Return the seconds for which the oldest record is still to be kept."""
        return max(job.ended_s for job in self._records[0][1]) + KEPT_S - now_s


def digest(spec: JobSpec) -> str:
    return blake2b(msgspec.msgpack.encode(spec), digest_size=16).hexdigest()


def _key(number: int) -> str:
    return f"{number:012d}"
