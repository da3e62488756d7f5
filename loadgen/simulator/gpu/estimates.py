"""Estimate the work that a live job has left, from how fast it and jobs like it were.

Pure. A job's own speed counts first, over all the time that it held GPUs; of one that has not run
yet the speed of the jobs of its model counts, on as many GPUs or on the number next to it. Without
either its time limit is all that is known.
"""

from collections.abc import Iterable, Mapping

from slackwater.schemas.base import JobId
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.progress import JobProgress


class Estimates:
    """Seconds of an iteration by model and GPUs, as `records` and their `progress` tell them."""

    def __init__(
        self, records: Iterable[JobRecord], progress: Mapping[JobId, JobProgress], now_s: float
    ) -> None:
        self._progress, self._now_s = progress, now_s
        seen: dict[str, dict[int, list[float]]] = {}
        for record in records:
            own_s = self._iteration_s(record)
            if own_s and record.spec.model:
                sizes = seen.setdefault(record.spec.model, {})
                sizes.setdefault(record.spec.gpus, []).append(own_s)
        self._known = {
            model: {gpus: sum(each) / len(each) for gpus, each in sizes.items()}
            for model, sizes in seen.items()
        }

    def remaining_s(self, record: JobRecord) -> float | None:
        """Return the seconds that it still needs on the GPUs that it asks for; None: not known."""
        spec = record.spec
        told = self._progress.get(JobId(spec.id))
        iteration_s = self._iteration_s(record) or self._like(record)
        if spec.iterations > 1 and iteration_s:
            done = told.iteration if told is not None else 0
            left_s = max(0, spec.iterations - done) * iteration_s
            return max(0.0, left_s - self._untold_s(record))
        if spec.time_limit_s:
            return max(0.0, spec.time_limit_s - self._ran_s(record, self._now_s))
        return None

    def _iteration_s(self, record: JobRecord) -> float:
        """Seconds of one of its iterations so far; 0: not known."""
        told = self._progress.get(JobId(record.spec.id))
        if told is None or not told.iteration:
            return 0.0
        return self._ran_s(record, told.updated_s or self._now_s) / told.iteration

    def _ran_s(self, record: JobRecord, until_s: float) -> float:
        return record.run_s + (max(0.0, until_s - record.since_s) if _holds(record) else 0.0)

    def _untold_s(self, record: JobRecord) -> float:
        """Seconds that it has worked since it told its progress."""
        told = self._progress.get(JobId(record.spec.id))
        if told is None or not told.updated_s or not _holds(record):
            return 0.0
        return max(0.0, self._now_s - max(told.updated_s, record.since_s))

    def _like(self, record: JobRecord) -> float:
        sizes = self._known.get(record.spec.model)
        if not sizes:
            return 0.0
        return sizes[min(sizes, key=lambda gpus: (abs(gpus - record.spec.gpus), gpus))]


def _holds(record: JobRecord) -> bool:
    return record.state in ("starting", "running")
