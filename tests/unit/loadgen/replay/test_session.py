"""A replay against a master that answers as told."""

from typing import Any

import pytest

from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.shell.client import Client
from slackwater.loadgen.replay import session
from slackwater.loadgen.replay.workload import PlannedJob, Workload
from slackwater.schemas.jobs import JobRecord, JobSpec

SPEC = JobSpec(id="j1", model="vgg19", workers=1, servers=1, iterations=1)


class Answers(Client):
    """Has a job of that id, ended long ago, and refuses another of the same id."""

    async def submit(self, spec: JobSpec) -> None:
        raise Rejected(f"job {spec.id} exists with another spec; choose another id")

    async def jobs(self, state: Any = None) -> tuple[JobRecord, ...]:
        return (JobRecord(spec=SPEC, state="completed", finished_s=1.0),)


async def test_a_refused_submission_ends_the_replay_though_another_job_ended_under_its_id() -> None:
    """Regression: the other job's end was taken for this one's, and the refusal was lost."""
    clock = LiveClock()
    client = Answers(MemoryBroker(1, clock=clock).connect("test"), clock)
    job = PlannedJob(at_s=0.0, compute_s=0.01, spec=SPEC)
    work = Workload(name="one", jobs=(job,), bytes_scale=1.0, time_scale=1.0, seed=0)
    with pytest.raises(Rejected, match="choose another id"):
        await session.replay(client, work, lambda timeline, now_s: None)
