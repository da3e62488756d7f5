"""Jobs whose updates are not synchronous: real aggregators are killed and buckets travel, and every
push is in the parameters exactly once. Gradients are whole numbers and the rule subtracts them, so
that what parameters contain can be counted, in whatever order it came."""

import asyncio
import random
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from slackwater.agent import Agent
from slackwater.schemas.tensors import UpdateRule

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

WORKERS = 2
PHASES = 4
SIZES = {"embed": 270_001, "mlp.w": 262_147, "mlp.b": 1_001}
POINTS = (
    "aggregator.fold.before",
    "aggregator.fold.mid",
    "aggregator.fold.after",
    "aggregator.copy.before",
    "aggregator.copy.mid",
    "aggregator.copy.after",
)
MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {"consistency": "asynchronous"},
    "stale": {"consistency": "stale-synchronous", "staleness": 2},
}


@dataclass
class Workers:
    """Agents in threads, one faster than the other where it may be."""

    url: str
    transport: str
    mode: dict[str, Any]
    done: dict[int, int] = field(default_factory=dict)
    furthest: int = 0
    last: int = 2**62
    failures: list[BaseException] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    lossy: bool = False
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """By tensor: of each rank so many, which it pushes in turn."""

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        for name, size in SIZES.items():
            made = rng.integers(-4, 5, (WORKERS * PHASES, size))
            self.gradients[name] = made.astype(np.float32)

    def gradient(self, name: str, rank: int, iteration: int) -> np.ndarray:
        return self.gradients[name][rank * PHASES + iteration % PHASES]

    def summed(self, name: str, contained: tuple[int, ...]) -> np.ndarray:
        """Minus each gradient as often as it was pushed."""
        times = [
            len(range(phase or PHASES, iterations + 1, PHASES))
            for iterations in contained
            for phase in range(PHASES)
        ]
        return -(np.array(times, np.float32) @ self.gradients[name])

    def start(self) -> None:
        for rank in range(WORKERS):
            self.threads.append(threading.Thread(target=self._run, args=(rank,), daemon=True))
            self.threads[-1].start()

    def _run(self, rank: int) -> None:
        try:
            with Agent(
                url=self.url, job="j1", rank=rank, workers=WORKERS, transport=self.transport,
                tensors={name: (size,) for name, size in SIZES.items()}, deadline_s=60.0,
                update=UpdateRule(name="sgd", learning_rate=1.0), **self.mode,
            ) as agent:  # fmt: skip
                pause = threading.Event()
                while agent.iteration < self.last:
                    iteration = agent.iteration + 1
                    agent.step({n: self.gradient(n, rank, iteration) for n in SIZES})
                    assert agent.iteration == iteration
                    self.done[rank] = iteration
                    self.furthest = max(
                        self.furthest, iteration - min(self.done.get(r, 0) for r in range(WORKERS))
                    )
                    if not self.lossy:
                        self._check(agent, rank, iteration)
                    pause.wait(0.01 + 0.02 * rank)
        except BaseException as error:
            self.failures.append(error)

    def _check(self, agent: Agent, rank: int, iteration: int) -> None:
        """Check that the worker's reads are whole, and have what the mode promises."""
        for bucket in agent._buckets:
            contained = bucket.contained
            assert contained[rank] >= iteration
            if "staleness" in self.mode:
                assert min(contained) >= iteration - self.mode["staleness"], contained
            for spec in bucket.tensors:
                values = agent.pull(spec.name)
                assert np.array_equal(values, self.summed(spec.name, contained)), contained

    async def until(self, iteration: int) -> None:
        async with asyncio.timeout(60.0):
            while min(self.done.get(rank, 0) for rank in range(WORKERS)) < iteration:
                if self.failures:
                    raise self.failures[0]
                await asyncio.sleep(0.01)

    async def until_ahead(self, iterations: int) -> None:
        """Wait until the faster worker is that far ahead, which a mode that waits forbids."""
        async with asyncio.timeout(60.0):
            while self.furthest < iterations:
                if self.failures:
                    raise self.failures[0]
                await asyncio.sleep(0.01)

    async def finish(self) -> int:
        self.last = max(self.done.values()) + 5
        for thread in self.threads:
            await asyncio.to_thread(thread.join, 60.0)
            assert not thread.is_alive(), "a worker hangs"
        if self.failures:
            raise self.failures[0]
        return self.last


async def travel(lab: Any, rng: random.Random) -> None:
    job = lab.director.jobs["j1"]
    while True:
        bucket = rng.randrange(len(job.places))
        here = job.places[bucket].aggregator
        there = next(home for home in lab.director.homes if home != here)
        await lab.director.move(job, bucket, there)
        await asyncio.sleep(rng.uniform(0.0, 0.05))


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("shm", "asynchronous"),
        ("tcp", "stale"),
        pytest.param("shm", "stale", marks=pytest.mark.slow),
        pytest.param("tcp", "asynchronous", marks=pytest.mark.slow),
    ],
)
async def test_every_push_counts_once_whoever_is_killed(
    lab: Any, transport: str, mode: str
) -> None:
    """Kills at some moment and at named points, while buckets travel with pushes pending."""
    rng = random.Random(f"{transport}/{mode}")
    await lab.aggregators("a1", "a2", transport=transport)
    run = Workers(lab.supervisor.url, transport, MODES[mode])
    run.start()
    await run.until(3)
    travelling = asyncio.ensure_future(travel(lab, rng))
    try:
        for point in POINTS[(transport == "tcp") :: 2]:
            victim = rng.choice(["a1", "a2"])
            before = lab.restarts(victim)
            lab.supervisor.arm(victim, f"{point}=kill@{rng.randint(1, 6)}")
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            lab.supervisor.kill(victim, signal.SIGKILL)
            await lab.restarted(victim, before + 2)
            assert not travelling.done(), travelling
            await run.until(min(run.done.values()) + 2)
        if mode == "asynchronous":
            await run.until_ahead(4)
    finally:
        travelling.cancel()
        await asyncio.gather(travelling, return_exceptions=True)
    last = await run.finish()
    await all_applied(lab, last)
    if mode == "stale":
        assert run.furthest <= MODES[mode]["staleness"] + 1


async def all_applied(lab: Any, last: int) -> None:
    job = lab.director.jobs["j1"]
    async with asyncio.timeout(30.0):
        while True:
            held = [
                h for id in lab.director.homes for h in (await lab.director.held(id, job)).values()
            ]
            if len(held) == len(job.places) and {h.version for h in held} == {last * WORKERS}:
                return
            await asyncio.sleep(0.05)


async def test_a_lost_region_begins_anew_from_what_a_worker_read(lab: Any) -> None:
    """The supervisor forgot the memory, too. Nobody's push is refused or waited for in vain."""
    await lab.aggregators("a1", "a2", transport="shm")
    run = Workers(lab.supervisor.url, "shm", MODES["stale"], lossy=True)
    run.start()
    for kill in range(3):
        await run.until(8 * (kill + 1))
        assert await lab.lose("a1", lab.director.jobs["j1"]) >= 1
    await run.finish()
    lost = [f for f in lab.director.facts if getattr(f, "fact", "").startswith("optimizer")]
    assert lost == [], "SGD has no state to lose"
