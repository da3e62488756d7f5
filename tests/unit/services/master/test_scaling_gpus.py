"""Jobs on GPUs that are given more workers by hand: their rules hold, and what lacks is said."""

import msgspec
import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness
from tests.unit.services.master.test_master_core import orders, spec
from tests.unit.services.master.test_racks import Racked

from slackwater.common.base.effects import Answered
from slackwater.common.base.words import number_of
from slackwater.schemas.base import JobId, NodeId, Ok
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu, held
from slackwater.schemas.job_requests import JobInfo, ScaleJob, SubmitJob
from slackwater.schemas.workers import StopWorkers
from slackwater.services.master.keys import OrderKey


def grown(harness: GpuHarness, workers: int, **fields: object) -> tuple[tuple[str, int], ...]:
    """Start a job of two workers, ask for so many, and return what it is to hold."""
    made = spec("a", workers=2, gpus=2, gpus_min=2, gpus_max=8, **fields)
    harness.ask(SubmitJob(spec=made))
    harness.confirm("start/a")
    harness.now_s += 1.0
    harness.ask(ScaleJob(job="a", workers=workers))
    record = harness.job("a")
    return record.planned or record.allocation


class Unlike(GpuHarness):
    """Node n1 with two GPUs and four cores, and n2 with four GPUs of another type."""

    def hear(self, *nodes: str) -> list[object]:
        effects: list[object] = []
        for node, count, type, cores in (("n1", 2, "v100", 8.0), ("n2", 4, self.second, 2.0)):
            gpus = tuple(Gpu(index=n, id=f"{node}/{n}", type=type) for n in range(count))
            beat = WorkerHeartbeat(
                service="worker", id=node, incarnation=0, at_s=self.now_s, node=NodeId(node),
                slots=8, gpus=gpus, cores=cores,
            )  # fmt: skip
            effects += self.see(beat)
        return effects

    def __init__(self, second: str) -> None:
        self.second = second
        super().__init__()


def test_a_job_grows_onto_other_nodes() -> None:
    assert grown(GpuHarness(gpus=4), 6) == (("n1", 4), ("n2", 2))


@pytest.mark.parametrize(("within", "workers"), [("node", 3), ("rack", 5)])
def test_a_job_that_lies_together_does_not_grow_apart(within: str, workers: int) -> None:
    """Regression: it was given GPUs of another node, or of another rack."""
    harness = Racked()
    assert grown(harness, workers, within=within) == (("n1", 2),)
    more = number_of(workers - 2, "more idle GPU")
    assert harness.why("a").startswith(
        f"trains with 2 workers; {workers} were asked for: it waits for {more} of "
        f"its {within}; `slackwater scale a --workers 2`"
    )
    harness.ask(ScaleJob(job="a", workers=2))
    assert harness.why("a") == ""


def test_a_job_grows_within_its_rack() -> None:
    assert grown(Racked(), 4, within="rack") == (("n1", 2), ("n2", 2))


def test_a_job_does_not_grow_onto_gpus_of_another_type() -> None:
    """Regression: its ranks would have waited for the slower ones at each iteration."""
    types = {"v100": 1.0, "k80": 0.5}
    assert grown(Unlike("k80"), 4, gpu_types=types) == (("n1", 2),)
    assert grown(Unlike("v100"), 4) == (("n1", 2), ("n2", 2))


def test_a_job_does_not_grow_where_its_cores_lack() -> None:
    """Regression: of n2's two cores a job took four."""
    assert grown(Unlike("v100"), 4, cores=2.0) == (("n1", 2),)
    assert grown(Unlike("v100"), 3, cores=2.0) == (("n1", 2), ("n2", 1))


def test_a_job_does_not_grow_onto_a_node_that_is_left_out() -> None:
    """Regression: a node that had just refused a gang was asked for another one."""
    harness = GpuHarness()
    harness.core.state.nodes.avoid(NodeId("n2"), "it has no room", harness.now_s)
    assert grown(harness, 4) == (("n1", 2),)


def test_one_gpu_is_said_to_be_one() -> None:
    """Red before: `waits for 1 GPUs`, and `trains with 1 workers`."""
    harness = GpuHarness(gpus=1)
    harness.ask(SubmitJob(spec=spec("a", workers=1, gpus=1, gpus_min=1, gpus_max=4)))
    harness.confirm("start/a")
    harness.ask(SubmitJob(spec=spec("b", workers=1, gpus=1)))
    harness.confirm("start/b")
    harness.ask(SubmitJob(spec=spec("c", workers=1, gpus=1)))
    harness.now_s += 1.0
    harness.ask(ScaleJob(job="a", workers=2))
    assert harness.why("c").startswith("waits for 1 GPU, 0 idle; held by a (1), b (1): ")
    asked = "trains with 1 worker; 2 were asked for: it waits for 1 more idle GPU"
    assert harness.why("a").startswith(asked)


def test_the_answer_says_before_whom_a_job_grows() -> None:
    """It was said nothing to whoever grew a job past the first of the queue."""
    harness = GpuHarness(gpus=4)
    harness.ask(SubmitJob(spec=spec("a", workers=2, gpus=2, gpus_min=2, gpus_max=8)))
    harness.confirm("start/a")
    for id in ("b", "c", "d", "e"):
        harness.ask(SubmitJob(spec=spec(id, workers=8, gpus=8)))
    harness.now_s += 1.0
    for _ in range(2):  # Repeated, the answer is the same.
        answer = harness.answer(ScaleJob(job="a", workers=4))
        assert isinstance(answer, JobInfo)
        said = "it takes idle GPUs before jobs that wait: b, c, d and 1 more"
        assert answer.job.reason == said


def test_the_answer_says_what_a_job_lacks() -> None:
    harness = GpuHarness(gpus=1)
    harness.ask(SubmitJob(spec=spec("a", workers=2, gpus=2, gpus_min=2, gpus_max=8)))
    for node in ("n1", "n2"):
        harness.confirm(f"start@{node}/a")
    harness.now_s += 1.0
    answer = harness.answer(ScaleJob(job="a", workers=4))
    assert isinstance(answer, JobInfo)
    assert answer.job.reason == harness.why("a")
    assert "it waits for 2 more idle GPUs" in answer.job.reason


def test_a_master_that_begins_waits_for_processes_on_nodes_that_it_has_not_heard() -> None:
    """Regression, by seed 90: it took such a node for silent, and started the job beside them."""
    harness = GpuHarness(node_silent_s=30.0)
    assert grown(harness, 2) == (("n1", 2),)
    record = harness.job("a")
    harness.stored["jobs"]["a"] = msgspec.structs.replace(
        record, state="stopping", planned=((NodeId("n1"), 2),)
    )
    harness.restart()
    harness.tick(1.0)
    assert harness.job("a").state == "stopping"
    harness.tick(20.0)
    assert harness.job("a").state == "stopping"
    harness.tick(10.0)
    assert harness.job("a").state != "stopping", "30 s without a word"


def test_a_job_is_not_started_on_gpus_that_nobody_has_named() -> None:
    """Regression, by seed 90: its processes ended before the new master heard of their node, and it
    went on there without a GPU, which a program takes for all of them."""
    harness = GpuHarness()
    assert grown(harness, 2) == (("n1", 2),)
    record = harness.job("a")
    harness.stored["jobs"]["a"] = msgspec.structs.replace(
        record, state="stopping", planned=((NodeId("n1"), 2),)
    )
    assert any(isinstance(order, StopWorkers) for order in orders(harness.restart()))
    order = harness.core.state.jobs[JobId("a")].order("stop", NodeId("n1"))
    harness.step(Answered(OrderKey(JobId("a"), order), Ok()))
    record = harness.job("a")
    assert (record.state, record.allocation, record.gpu_ids) == ("paused", (), {})
    assert record.reason == "GPUs that it was to go on with are gone, or not heard of yet"
    harness.hear()
    harness.tick(5.0)
    record = harness.job("a")
    assert (record.state, held(record.allocation)) == ("starting", 2)
    assert sum(map(len, record.gpu_ids.values())) == 2
