"""Jobs that take turns, as the master sees them: where they are started, and what they had."""

import msgspec
import pytest
from tests.unit.services.master.test_master_core import Harness, spec

from slackwater.common.base import codec
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import PermitUse, WorkerHeartbeat
from slackwater.schemas.job_requests import GetJob, JobInfo, SubmitJob
from slackwater.schemas.jobs import BY_TURNS_VARIABLE, CHOOSE_HOSTS_VARIABLE, JobSpec
from slackwater.services.master.environment import launch_environment
from slackwater.services.master.gangs import ranks_at


def see(harness: Harness, node: str, *turns: PermitUse) -> None:
    harness.see(
        WorkerHeartbeat(
            service="worker", id=node, incarnation=0, at_s=harness.now_s, node=NodeId(node),
            slots=8, turns=turns,
        )
    )  # fmt: skip


def test_each_host_of_a_program_goes_to_a_node_that_others_like_it_share() -> None:
    harness = Harness()
    for node in ("n1", "n2", "n3"):
        see(harness, node)
    for id in ("a", "b", "c"):
        asynchronous = spec(id, workers=2, by_turns=True, consistency="asynchronous")
        harness.ask(SubmitJob(spec=asynchronous))
        assert ranks_at(harness.job(id)) == {"n1": (0,), "n2": (1,)}
    for id, by_turns in (("d", False), ("e", True)):  # Ranks that meet do so on one node.
        harness.ask(SubmitJob(spec=spec(id, workers=2, by_turns=by_turns)))
        assert len(ranks_at(harness.job(id))) == 1


def test_its_program_is_told_that_it_takes_turns() -> None:
    assert launch_environment(JobSpec(id="j", by_turns=True)) == {BY_TURNS_VARIABLE: "1"}
    assert BY_TURNS_VARIABLE not in launch_environment(JobSpec(id="j"))


def test_a_program_that_chooses_its_hosts_is_told_its_bounds() -> None:
    spec = JobSpec(
        id="j", workers=2, workers_min=1, workers_max=6, choose_hosts=True,
        consistency="asynchronous",
    )  # fmt: skip
    assert launch_environment(spec) == {CHOOSE_HOSTS_VARIABLE: "1:6"}
    with pytest.raises(ValueError, match="choose_hosts: give workers_min"):
        JobSpec(id="j", workers=2, choose_hosts=True)


def test_what_nodes_told_last_is_shown_with_the_job() -> None:
    harness = Harness()
    mine = [
        PermitUse(job=JobId("a"), node=NodeId(node), computed_s=1.0, late=1)
        for node in ("n1", "n2")
    ]
    other = PermitUse(job=JobId("z"), node=NodeId("n1"))
    see(harness, "n2", mine[1])
    see(harness, "n1", other, mine[0])
    harness.ask(SubmitJob(spec=spec("a", by_turns=True)))
    info = harness.answer(GetJob(job=JobId("a")))
    assert isinstance(info, JobInfo)
    assert list(info.turns) == mine
    see(harness, "n1")
    later = harness.answer(GetJob(job=JobId("a")))
    assert isinstance(later, JobInfo)
    assert list(later.turns) == mine[1:]


def test_a_job_with_gpus_takes_no_turns() -> None:
    with pytest.raises(ValueError, match="by_turns: of a job with GPUs"):
        JobSpec(id="j", gpus=1, by_turns=True)
    raw = codec.encode(SubmitJob(spec=JobSpec(id="j", by_turns=True)))
    document = msgspec.msgpack.decode(raw)
    document["spec"]["gpus"] = 1
    with pytest.raises(Exception, match="by_turns"):
        codec.decode(msgspec.msgpack.encode(document), SubmitJob)
