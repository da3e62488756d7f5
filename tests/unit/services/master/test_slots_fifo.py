"""Jobs without GPUs: the scheduler starts the same ones as the rule, in the same order."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from tests.unit.services.master.test_master_core import Harness, spec

from slackwater.schemas.base import NodeId
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.job_requests import CancelJob, SubmitJob
from slackwater.schemas.jobs import JobRecord
from slackwater.schemas.workers import WorkerExited
from slackwater.services.master.nodes import Nodes


def beat(node: str, slots: int, at_s: float = 0.0) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        service="worker", id=node, incarnation=1, at_s=at_s, node=NodeId(node), slots=slots
    )


def started_by_rule(waiting: list[JobRecord], free: dict[NodeId, int], largest: int) -> list[str]:
    """First come, first served: who fits no node is passed over, who only waits holds back all."""
    free, started = dict(free), []
    for each in waiting:
        if each.spec.workers > largest:
            continue
        fits = [(left, node) for node, left in free.items() if left >= each.spec.workers]
        if not fits:
            break
        free[min(fits)[1]] -= each.spec.workers
        started.append(f"{each.spec.id} on {min(fits)[1]}")
    return started


class Watched:
    """A master, and what the rule says of each of its steps."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.harness = rng, Harness()
        self.slots: dict[NodeId, int] = {}
        self.running: set[str] = set()

    def records(self, state: str) -> list[JobRecord]:
        found = [self.harness.job(id) for id in self.harness.stored["jobs"]]
        return [record for record in found if record.state == state]

    def check(self) -> None:
        """Compare what the last step started with what the rule starts."""
        running = self.records("running")
        new = [record for record in running if record.spec.id not in self.running]
        taken: Counter[NodeId] = Counter()
        for record in running:
            if record not in new and record.node is not None:
                taken[record.node] += record.spec.workers - len(record.results)
        free = {node: count - taken[node] for node, count in self.slots.items()}
        candidates = sorted(
            [*self.records("pending"), *new], key=lambda r: (r.submitted_s, r.spec.id)
        )
        largest = max(self.slots.values(), default=0)
        expected = started_by_rule(candidates, free, largest)
        assert sorted(f"{r.spec.id} on {r.node}" for r in new) == sorted(expected)
        self.running = {record.spec.id for record in running}

    def turn(self, number: int) -> None:
        rng, harness = self.rng, self.harness
        harness.now_s += 1.0
        for each in range(rng.randrange(3)):
            workers = rng.choice((1, 1, 2, 3, 8))
            harness.ask(SubmitJob(spec=spec(f"j{number}-{each}", workers=workers)))
            self.check()
        pending, running = self.records("pending"), self.records("running")
        if pending and rng.random() < 0.2:
            harness.ask(CancelJob(job=rng.choice(pending).spec.id))
            self.check()
        if running and rng.random() < 0.8:
            record = rng.choice(running)
            rank = next(r for r in range(64) if str(r) not in record.results)
            at = record.node or NodeId("")
            harness.ask(WorkerExited(job=record.spec.id, rank=rank, node=at, code=0, result="{}"))
            self.check()
        if rng.random() < 0.1:
            harness.restart()
            heard, self.slots = self.slots, {}
            for node in heard:
                self.hear(node, heard[node])
        if rng.random() < 0.3:
            self.hear(NodeId(f"n{rng.randrange(3)}"), rng.randrange(1, 9))

    def hear(self, node: NodeId, slots: int) -> None:
        self.slots[node] = slots
        self.harness.see(beat(node, slots, self.harness.now_s))
        self.check()


@pytest.mark.parametrize("seed", range(30))
def test_the_same_jobs_start_in_the_same_order_as_by_the_rule(seed: int) -> None:
    """Jobs come, end and are cancelled, nodes come and change, and the master is killed."""
    watched = Watched(Random(seed))
    for number in range(60):
        watched.turn(number)


def test_room_is_what_records_have_not_taken_of_the_nodes_that_are_heard() -> None:
    nodes = Nodes(silent_s=30.0)
    for node, slots in (("n1", 4), ("n2", 2)):
        assert nodes.heard(beat(node, slots), 0.0)
    nodes.taken[NodeId("n1")] += 3
    room = nodes.room(10.0)
    assert (room.free, room.slots, room.largest) == ({"n1": 1, "n2": 2}, 6, 4)
    assert room.barrier(4, False) == room.barrier(6, True) == "slots"
    assert room.barrier(5, False) == room.barrier(7, True) == "larger-node"
    assert nodes.room(31.0).barrier(1, False) == nodes.room(31.0).barrier(1, True) == "node"


def test_processes_that_need_no_place_to_meet_may_be_on_any_nodes() -> None:
    """Hosts of an elastic program, say: on one node where they fit, else on several."""
    harness = Harness()
    for node in ("n1", "n2", "n3"):
        harness.see(beat(node, 2))

    def asked(id: str, workers: int, **fields: Any) -> JobRecord:
        harness.ask(SubmitJob(spec=spec(id, workers=workers, **fields)))
        return harness.job(id)

    assert asked("one", 2, consistency="asynchronous").allocation == (("n1", 2),)
    assert asked("meets", 3).allocation == ()
    assert "waits for 3 worker slots on one node: the largest has 2" in harness.why("meets")
    assert asked("several", 3, consistency="asynchronous").allocation == (("n2", 2), ("n3", 1))
    assert asked("waits", 2, consistency="asynchronous").allocation == ()
    assert harness.why("waits").startswith("waits for 2 worker slots: 1 of 6 free; runs when")
    assert asked("never", 7, consistency="asynchronous").allocation == ()
    assert harness.why("never").startswith(
        "waits for 7 worker slots: all nodes together have 6; start another one with"
    )
