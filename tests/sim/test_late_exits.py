"""The real cores of a master and two worker services under messages that come late, repeated and in
any order: what one attempt of a job left behind never ends the next.

No event loop: each step of a seed delivers one message of those on their way, lets a process end,
pauses or resumes a job, restarts the master, or lets time pass.
"""

from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness

from slackwater.common.base.effects import (
    Answered,
    Effect,
    Recovered,
    RefusedSoFar,
    Reply,
    Request,
    Requested,
    StartTimer,
    TimerFired,
)
from slackwater.schemas.base import RUN_ATTEMPTS, JobId, Message, NodeId, Refused
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.job_requests import PauseJob, ResumeJob
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.workers import WorkerExited
from slackwater.services.worker.core import WorkerCore
from slackwater.services.worker.effects import LookAtProgram, RunRank, SignalRank
from slackwater.services.worker.events import ProcessesFound, ProcessExited, ProgramLooked

NODES = ("n1", "n2")
REPEATED = 0.3
"""The part of all requests of which a second copy stays on its way, for however long."""


@dataclass(eq=False)
class Sent:
    """A message on its way; the answer to a copy is nobody's."""

    to: str
    ask: Request
    life: int
    """The life of the sender, where it is the master."""
    copy: bool = False
    until_s: float = inf
    """When the sender gives up asking again."""


@dataclass
class Node:
    core: WorkerCore
    timers: dict[object, float] = field(default_factory=dict)
    running: dict[tuple[str, int], tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """Job and rank -> its process number and GPUs."""


class World(GpuHarness):
    """Everything that happens is drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.on_way: list[Sent] = []
        self.lanes: dict[str, list[Sent]] = {}
        self.asked: dict[int, Sent] = {}
        """Token -> what a node has not answered yet."""
        self.life = 0
        self.exits: dict[tuple[str, int, int], int] = {}
        """Job, rank and process number -> how it ended."""
        self.seen: dict[str, dict[str, str]] = {}
        self.nodes = {
            name: Node(WorkerCore(NodeId(name), 8, stop_grace_s=1.0, keep_jobs=True))
            for name in NODES
        }
        self.late = 0
        """Ends of former attempts that reached the master."""
        super().__init__()
        self.prepares = False
        for name, node in self.nodes.items():
            self.carry_out(name, node.core.step(Recovered(1, {}), self.now_s))
            self.carry_out(name, node.core.step(ProcessesFound(()), self.now_s))

    # The master -----------------------------------------------------------------------------------

    def step(self, event: Any) -> list[Effect]:
        effects = super().step(event)
        for effect in effects:
            if isinstance(effect, Request) and ".worker." in effect.subject:
                way = Sent(effect.subject.split(".")[4], effect, self.life)
                lane = self.lanes.setdefault(effect.lane or f"{id(effect)}", [])
                lane.append(way)
                if len(lane) == 1:
                    self.send(way)
        self.check()
        return effects

    def send(self, way: Sent) -> None:
        way.until_s = self.now_s + way.ask.budget_s
        self.on_way.append(way)
        if self.rng.random() < REPEATED:
            self.on_way.append(Sent(way.to, way.ask, way.life, copy=True))

    def restarted(self) -> None:
        self.life += 1
        self.lanes.clear()
        self.restart()
        self.beat()

    def beat(self) -> None:
        for name, node in self.nodes.items():
            self.see(
                WorkerHeartbeat(
                    service="worker", id=name, incarnation=0, at_s=self.now_s, node=NodeId(name),
                    slots=8, running=node.core.running(),
                    gpus=tuple(Gpu(index=n, id=f"{name}/{n}", type="fake") for n in range(2)),
                )
            )  # fmt: skip

    def check(self) -> None:
        """Check that what the master believes of a rank's end has happened in this attempt."""
        for id, job in self.core.state.jobs.items():
            record = job.record
            known = self.seen.setdefault(id, {})
            for rank in record.results.keys() - known.keys():
                ends = {
                    number: code
                    for (of, one, number), code in self.exits.items()
                    if of == id and str(one) == rank and number // RUN_ATTEMPTS == record.attempt
                }
                assert 0 in ends.values(), (id, rank, record, self.exits)
            self.seen[id] = dict(record.results)
            assert record.state != "failed", record.reason

    # The nodes ------------------------------------------------------------------------------------

    def carry_out(self, name: str, effects: Any) -> None:
        node = self.nodes[name]
        for effect in effects:
            match effect:
                case Reply(token=token, message=message):
                    way = self.asked.pop(token)
                    if not way.copy:
                        self.answered(way, message)
                case LookAtProgram(token=token, job=job, attempt=attempt):
                    looked = ProgramLooked(token, job, attempt, "", "host", 4000)
                    self.carry_out(name, node.core.step(looked, self.now_s))
                case RunRank(job=job, rank=rank, attempt=attempt, gpu_ids=ids):
                    self.begin(name, job, rank, attempt, ids)
                case SignalRank(job=job, rank=rank, kill=kill):
                    if (job, rank) in node.running and (kill or self.rng.random() < 0.5):
                        self.end(name, job, rank, -9 if kill else -15)
                case StartTimer(key=key, at_s=at_s):
                    node.timers[key] = at_s
                case Request():
                    self.send(Sent("master", effect, 0))

    def begin(self, name: str, job: str, rank: int, number: int, ids: tuple[str, ...]) -> None:
        for node in self.nodes.values():
            for (of, _), (other, others_ids) in node.running.items():
                assert not set(ids) & set(others_ids), f"{ids} are held by {of}"
                same = of != job or other // RUN_ATTEMPTS == number // RUN_ATTEMPTS
                assert same, f"{job}: attempts of {other} and {number} at once"
        self.nodes[name].running[job, rank] = number, ids

    def end(self, name: str, job: str, rank: int, code: int) -> None:
        node = self.nodes[name]
        number, _ = node.running.pop((job, rank))
        self.exits[job, rank, number] = code
        exited = ProcessExited(JobId(job), rank, code, "{}" if code == 0 else "", number)
        self.carry_out(name, node.core.step(exited, self.now_s))

    # The bus --------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Hand over any message that is on its way, the oldest no sooner than the newest."""
        way = self.on_way.pop(self.rng.randrange(len(self.on_way)))
        if way.to == "master":
            message = way.ask.message
            assert isinstance(message, WorkerExited)
            record = self.core.state.jobs[JobId(message.job)].record
            self.late += message.job_attempt < record.attempt
            replies = [e for e in self.ask(message) if isinstance(e, Reply)]
            if not way.copy:
                node = self.nodes[message.node]
                told = Answered(way.ask.key, replies[0].message)
                self.carry_out(message.node, node.core.step(told, self.now_s))
            return
        self.token += 1
        self.asked[self.token] = way
        requested = Requested(self.token, way.ask.message)
        self.carry_out(way.to, self.nodes[way.to].core.step(requested, self.now_s))

    def answered(self, way: Sent, message: Message) -> None:
        if way.life != self.life:
            return  # Its sender was killed.
        if isinstance(message, Refused) and message.retry_after_s and self.now_s < way.until_s:
            self.step(RefusedSoFar(way.ask.key, message))
            self.on_way.append(way)
            return
        lane = next(lane for lane in self.lanes.values() if way in lane)
        lane.remove(way)
        if lane:
            self.send(lane[0])
        self.step(Answered(way.ask.key, message))

    def pass_time(self, seconds: float) -> None:
        self.beat()
        self.tick(seconds)
        for name, node in self.nodes.items():
            for key in [key for key, at_s in node.timers.items() if at_s <= self.now_s]:
                del node.timers[key]
                self.carry_out(name, node.core.step(TimerFired(key), self.now_s))

    def act(self) -> None:
        rng, what = self.rng, self.rng.random()
        running = [(name, *key) for name, node in self.nodes.items() for key in node.running]
        if what < 0.55 and self.on_way:
            self.deliver()
        elif what < 0.65 and running:
            self.end(*rng.choice(running), 0)
        elif what < 0.8:
            id = rng.choice(sorted(self.core.state.jobs))
            asked = PauseJob(job=id) if rng.random() < 0.5 else ResumeJob(job=id)
            self.ask(asked)
        elif what < 0.82:
            self.restarted()
        else:
            self.pass_time(rng.choice((0.1, 1.0, 1.0, 3.0)))

    def over(self) -> bool:
        return all(job.record.state in TERMINAL_STATES for job in self.core.state.jobs.values())


def lived(seed: int) -> World:
    world = World(seed)
    world.submit("a", 4)
    world.submit("b", 2)
    for _ in range(150):
        world.act()
    for id in ("a", "b"):
        world.ask(ResumeJob(job=id))
    for _ in range(2000):  # In peace: no more pauses.
        if world.over() and not world.on_way:
            break
        if world.on_way and world.rng.random() < 0.8:
            world.deliver()
        else:
            for name, node in world.nodes.items():
                for job, rank in list(node.running):
                    if world.job(job).state == "running":
                        world.end(name, job, rank, 0)
            world.pass_time(1.0)
    assert world.over(), [world.job(id) for id in ("a", "b")]
    assert {world.job(id).state for id in ("a", "b")} == {"completed"}
    return world


def all_lived(seeds: range) -> tuple[int, int]:
    """Return how many attempts there were, and how many ends came late."""
    attempts = late = 0
    for seed in seeds:
        try:
            world = lived(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        attempts += sum(world.job(id).attempt + 1 for id in ("a", "b"))
        late += world.late
    return attempts, late


def test_what_a_former_attempt_left_behind_ends_no_later_one() -> None:
    """A hundred seeds take some seconds."""
    attempts, late = all_lived(range(100))
    assert attempts > 300
    assert late > 30


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_seeds_of_late_exits(part: int) -> None:
    """A quarter of them each; minutes."""
    attempts, late = all_lived(range(2500 * part, 2500 * (part + 1)))
    assert attempts > 7500
    assert late > 750
