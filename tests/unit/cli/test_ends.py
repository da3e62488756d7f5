"""A GPU job's end beside what else is known of it."""

from slackwater.cli.ends import Ends
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
