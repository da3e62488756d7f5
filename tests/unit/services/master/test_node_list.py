"""`slackwater nodes`: what each node told last, and what jobs hold of it by the records."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.master.test_master_core import Harness, submitted

from slackwater.common.base.limits import LIST_BYTES_MAX
from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import ListNodes, NodeInfo, NodeList, WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.node_list import listing


def beat(node: str, gpus: int = 0, **fields: Any) -> WorkerHeartbeat:
    told = tuple(Gpu(index=n, id=f"{node}/{n}", type="V100") for n in range(gpus))
    return WorkerHeartbeat(
        service="worker", id=node, incarnation=1, at_s=1.0, node=NodeId(node), slots=8, gpus=told,
        running=((JobId("a"), 0),), **fields,
    )  # fmt: skip


def record(id: str, state: Any, gpus: int = 0, **nodes: int) -> JobRecord:
    held = {NodeId(node): number for node, number in sorted(nodes.items())}
    ids = {node: tuple(f"{node}/{n}" for n in range(number)) for node, number in held.items()}
    return JobRecord(
        spec=JobSpec(id=id, gpus=gpus), state=state, allocation=tuple(held.items()),
        gpu_ids=ids if gpus else {},
    )  # fmt: skip


def test_gpus_and_slots_are_counted_apart_and_ended_jobs_hold_until_their_processes_are_gone() -> (
    None
):
    records = [
        record("a", "running", gpus=3, n1=2, n2=1),
        record("b", "starting", n1=5),
        record("c", "completed", n1=1),  # Its processes have ended by themselves.
        record("d", "cancelled", n2=2),  # Its processes are being stopped.
    ]
    one, two = listing([(beat("n2", 4), False), (beat("n1", 4), True)], records)
    assert (one.heartbeat.node, one.alive, one.heartbeat.running) == ("n1", True, ())
    assert (one.gpus_used, one.slots_used, one.jobs) == (("n1/0", "n1/1"), 5, 2)
    assert (two.heartbeat.node, two.alive) == ("n2", False)
    assert (two.gpus_used, two.slots_used, two.jobs) == (("n2/0",), 2, 2)


def nodes(harness: Harness, offset: int = 0) -> NodeList:
    found = harness.answer(ListNodes(offset=offset))
    assert isinstance(found, NodeList)
    return found


def test_a_master_lists_its_nodes_and_what_its_jobs_hold() -> None:
    harness = Harness()
    harness.see(beat("n1", gpus=2, cores=4.0, memory_bytes=2**30))
    submitted(harness, "a", workers=3)
    (info,) = nodes(harness).nodes
    assert (info.slots_used, info.jobs, len(info.heartbeat.gpus)) == (3, 1, 2)
    harness.now_s += harness.config.node_silent_s + 1
    assert not nodes(harness).nodes[0].alive


@given(st.integers(1, 40))
def test_nodes_that_fill_more_than_a_message_come_page_by_page(count: int) -> None:
    harness = Harness()
    for number in range(count):
        harness.see(beat(f"n{number:02}", gpus=400))
    found: list[NodeInfo] = []
    while len(found) < count:
        page = nodes(harness, offset=len(found))
        assert page.total == count
        assert page.nodes
        assert len(page.nodes) * 400 * 30 < 2 * LIST_BYTES_MAX
        found += page.nodes
    assert [info.heartbeat.node for info in found] == [f"n{n:02}" for n in range(count)]
