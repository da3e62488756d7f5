"""Jobs that wait for slots, indexed: the same jobs start as by looking at all of them each time."""

from random import Random

import pytest

from slackwater.schemas.base import JobId, NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.master.nodes import Nodes, Room
from slackwater.services.master.queue import Queued


def record(id: str, asked: int, at_s: float) -> JobRecord:
    return JobRecord(spec=JobSpec(id=id, workers=asked, program=("train",)), submitted_s=at_s)


def started_by_rule(waiting: list[JobRecord], room: Room) -> list[str]:
    """First come, first served: who fits no node is passed over, who only waits holds back all."""
    free, started = dict(room.free), []
    for each in sorted(waiting, key=lambda r: (r.submitted_s, r.spec.id)):
        if each.spec.workers > room.largest:
            continue
        fits = [(left, node) for node, left in free.items() if left >= each.spec.workers]
        if not fits:
            break
        free[min(fits)[1]] -= each.spec.workers
        started.append(each.spec.id)
    return started


def started_by_index(queued: Queued, records: dict[str, JobRecord], room: Room) -> list[str]:
    started = []
    while (first := queued.first(room.largest)) is not None:
        node = room.fitting(records[first].spec.workers)
        if node is None:
            break
        room.free[node] -= records[first].spec.workers
        queued.discard(first)
        started.append(first)
    return started


@pytest.mark.parametrize("seed", range(30))
def test_the_same_jobs_start_in_the_same_order_as_by_the_rule(seed: int) -> None:
    rng = Random(seed)
    queued, records = Queued(), {}
    for turn in range(40):
        for number in range(rng.randrange(3)):
            new = record(f"j{turn}-{number}", rng.choice((1, 1, 2, 3, 8)), float(rng.randrange(20)))
            records[new.spec.id] = new
            queued.add(new)
        if records and rng.random() < 0.2:  # One is cancelled.
            gone = rng.choice(sorted(records))
            queued.discard(JobId(gone))
            del records[gone]
        free = {NodeId(f"n{n}"): rng.randrange(5) for n in range(rng.randrange(4))}
        largest = max(free.values(), default=0) + (rng.randrange(4) if free else 0)
        expected = started_by_rule(list(records.values()), Room(dict(free), 0, largest))
        assert started_by_index(queued, records, Room(dict(free), 0, largest)) == expected
        for id in expected:
            del records[id]
        assert len(queued) == len(records)


def test_a_queue_looks_at_the_first_of_each_group_however_many_wait() -> None:
    """A thousand jobs that ask for alike are one candidate."""
    queued = Queued()
    for number in range(1000):
        queued.add(record(f"j{number}", 1 + number % 2, float(number)))
    assert queued.groups() == [(1, ""), (2, "")]
    assert queued.first(largest=1) == "j0"
    queued.discard(JobId("j0"))
    assert queued.first(largest=2) == "j1"
    assert queued.first(largest=0) is None


def test_room_is_what_records_have_not_taken_of_the_nodes_that_are_heard() -> None:
    nodes = Nodes(silent_s=30.0)
    for node, slots in (("n1", 4), ("n2", 2)):
        beat = WorkerHeartbeat(
            service="worker", id=node, incarnation=1, at_s=0.0, node=NodeId(node), slots=slots
        )
        assert nodes.heard(beat, 0.0)
    nodes.taken[NodeId("n1")] += 3
    room = nodes.room(10.0)
    assert (room.free, room.slots, room.largest) == ({"n1": 1, "n2": 2}, 6, 4)
    assert room.fitting(2) == "n2"
    assert room.barrier(4) == "slots"
    assert room.barrier(5) == "larger-node"
    assert nodes.room(31.0).barrier(1) == "node"
