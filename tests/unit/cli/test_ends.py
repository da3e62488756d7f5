"""A GPU job's end beside what else is known of it."""

import asyncio
from typing import Any
from unittest.mock import Mock

from slackwater.cli.ends import Ends, foretold
from slackwater.cli.job import described
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobRecord, JobSpec


def lines(ends: Ends | None) -> list[str]:
    record = JobRecord(spec=JobSpec(id="k1", gpus=2, workers=2, program=("train",)))
    return described(JobInfo(job=record), 1_700_000_000.0, ends=ends)


def test_a_description_tells_the_end_or_why_none_is_known() -> None:
    told = lines(Ends(ends_s=180.0, policy="tiresias-las"))
    assert "Ends:         in about 3m, foretold under tiresias-las" in told
    assumed = lines(Ends(ends_s=180.0, policy="fifo", assumed=True))
    assert (
        "Ends:         in about 3m, foretold under fifo, if it needs as long as jobs that ended"
        in assumed
    )
    unknown = lines(Ends(why="it is held"))
    assert "Ends:         not known: it is held" in unknown
    assert not [each for each in lines(None) if each.startswith("Ends")]


def test_the_end_of_a_paused_job_waits_for_its_user() -> None:
    """It was said to have no room on the nodes of now. Nothing is asked of the cluster."""
    spec = JobSpec(id="k1", gpus=2, workers=2, program=("train",))
    client: Any = Mock(spec=())
    told = asyncio.run(foretold(client, JobRecord(spec=spec, state="paused", held=True)))
    assert told == Ends(why="it waits until its user lets it go on")
