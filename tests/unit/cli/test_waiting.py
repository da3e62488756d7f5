"""`slackwater wait`: what is reached, what never can be, and a master that is away meanwhile."""

from collections.abc import Callable

import pytest

from slackwater.client.waits import Verdict, Wanted, until, verdict
from slackwater.common.base.clock import LiveClock
from slackwater.common.base.errors import Rejected, Unavailable
from slackwater.common.bus.memory import MemoryBroker
from slackwater.common.shell.client import Client
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobRecord, JobSpec


def record(id: str, state: JobState, started_s: float = 0.0) -> JobRecord:
    return JobRecord(spec=JobSpec(id=id), state=state, started_s=started_s)


@pytest.mark.parametrize(
    ("state", "started_s", "wanted", "expected"),
    [
        ("pending", 0.0, "ended", "waits"),
        ("running", 1.0, "ended", "waits"),
        ("failed", 1.0, "ended", "reached"),
        ("completed", 1.0, "completed", "reached"),
        ("cancelled", 0.0, "completed", "never"),
        ("pending", 0.0, "running", "waits"),
        ("running", 1.0, "running", "reached"),
        ("completed", 1.0, "running", "reached"),
        ("cancelled", 0.0, "running", "never"),
        ("failed", 1.0, "failed", "reached"),
    ],
)
def test_a_state_is_reached_or_never_will_be(
    state: JobState, started_s: float, wanted: Wanted, expected: Verdict
) -> None:
    assert verdict(record("j", state, started_s), wanted) == expected


class Answers(Client):
    """Each look at a job takes the next of its records; an exception is raised, the last stays."""

    looks: dict[str, list[JobRecord | Exception]]

    async def job(self, job: str) -> JobRecord:
        left = self.looks[job]
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answers]:
    monkeypatch.setattr("slackwater.client.waits.POLL_S", 0.01)
    clock = LiveClock()

    def made(**looks: list[JobRecord | Exception]) -> Answers:
        answers = Answers(MemoryBroker(1, clock=clock).connect("test"), clock)
        answers.looks = looks
        return answers

    return made


async def test_it_waits_for_all_of_them(client: Callable[..., Answers]) -> None:
    answers = client(
        a=[record("a", "running"), record("a", "completed")],
        b=[record("b", "pending"), record("b", "running"), record("b", "failed")],
    )
    found = await until(answers, ["a", "b", "a"], "ended", 30.0)
    assert [(each.job, each.state) for each in found] == [("a", "completed"), ("b", "failed")]


async def test_one_that_can_never_reach_it_ends_the_wait(client: Callable[..., Answers]) -> None:
    answers = client(a=[record("a", "running")], b=[record("b", "failed")])
    found = await until(answers, ["a", "b"], "completed", 30.0)
    assert [each.verdict for each in found] == ["waits", "never"]


async def test_a_master_that_does_not_answer_for_a_while_is_waited_for(
    client: Callable[..., Answers],
) -> None:
    answers = client(a=[record("a", "running"), Unavailable("away"), record("a", "completed")])
    (found,) = await until(answers, ["a"], "ended", 30.0)
    assert found.verdict == "reached"


async def test_the_time_is_over(client: Callable[..., Answers]) -> None:
    (found,) = await until(client(a=[record("a", "running")]), ["a"], "ended", 0.05)
    assert found.verdict == "waits"


async def test_a_job_that_there_is_not_is_said_at_once(client: Callable[..., Answers]) -> None:
    with pytest.raises(Rejected, match="there is no job"):
        await until(client(a=[Rejected("there is no job a")]), ["a"], "ended", 30.0)
