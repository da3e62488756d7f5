"""The ends of jobs as `slackwater job` tells them while they wait and run, and how true that was.

A prediction is judged where half of the job's life is over, from its submission to its end: by how
far it is off, relative to the time that was left.
"""

from collections.abc import Mapping
from statistics import median

import msgspec

from slackwater.common.shell.client import Client
from slackwater.loadgen.simulator.gpu.what_if import forecast
from slackwater.schemas.base import JobId
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.progress import JobProgress
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One prediction in the middle of a job's life."""

    left_s: float
    """Seconds until it did end."""
    foretold_s: float
    life_s: float

    @property
    def error(self) -> float:
        return abs(self.foretold_s - self.left_s) / self.left_s


class Foretold:
    """Collects what is foretold of all jobs, look by look."""

    def __init__(self, restart_s: float) -> None:
        self._restart_s = restart_s
        self._looks: list[tuple[float, dict[str, float]]] = []

    async def look(
        self,
        client: Client,
        records: Mapping[str, JobRecord],
        progress: Mapping[JobId, JobProgress],
    ) -> None:
        """Foretell the end of every job that has not ended."""
        if all(each.state in TERMINAL_STATES for each in records.values()):
            return
        policy = await client.master("policy", GetPolicy(), PolicyInfo)
        nodes, now_s = await client.nodes(), client.clock.now_s()
        told = forecast(records.values(), progress, nodes, now_s, policy, self._restart_s)
        self._looks.append((now_s, {id: now_s + end_s for id, end_s in told.ends_s.items()}))

    def told(self, records: Mapping[str, JobRecord]) -> dict[str, Told]:
        """Return the prediction nearest to the middle of each completed job's life."""
        found = {
            id: self._told(id, record)
            for id, record in records.items()
            if record.state == "completed"
        }
        return {id: told for id, told in found.items() if told is not None}

    def _told(self, id: str, record: JobRecord) -> Told | None:
        half_s = (record.submitted_s + record.finished_s) / 2
        told = [
            (at_s, ends_s[id])
            for at_s, ends_s in self._looks
            if id in ends_s and record.submitted_s < at_s < record.finished_s
        ]
        if not told:
            return None
        at_s, end_s = min(told, key=lambda each: abs(each[0] - half_s))
        return Told(
            left_s=record.finished_s - at_s,
            foretold_s=end_s - at_s,
            life_s=record.finished_s - record.submitted_s,
        )


def middle_error(told: Mapping[str, Told]) -> float | None:
    """Return the median error over all jobs; None: nothing was foretold."""
    return median(each.error for each in told.values()) if told else None
