"""The instant that `slackwater why` names for a job with GPUs comes true in the master, too.

The simulated half is tests/unit/services/master/scheduling/policies/test_reasons.py.
"""

import random
import re
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
from tests.unit.services.master.test_gpu_dispatch import GpuHarness

from slackwater.common.base.effects import Answered, Effect, Request, StartTimer, TimerFired
from slackwater.schemas.base import JobId, NodeId, Ok
from slackwater.schemas.cluster import WorkerHeartbeat
from slackwater.schemas.gpus import Gpu
from slackwater.schemas.job_requests import CancelJob
from slackwater.schemas.workers import StartWorkers, StopWorkers
from slackwater.services.master.dispatch import waits_for_gpus
from slackwater.services.master.keys import DecisionDue

POLICIES = ("tiresias-las", "sf", "fifo", "easy-backfill", "best-effort")
TICK_S = 3.0
AHEAD_S = 120.0
"""Seconds that each state is followed."""

NEAR_S = 1.5
"""An instant is shown in whole seconds, and a demotion is made at a whole second of its job's."""


class Obedient(GpuHarness):
    """Nodes that start and stop whatever they are told to, at once, and a policy that is asked when
    it wants to be."""

    def __init__(self, **config: Any) -> None:
        self.wakes_s = inf
        super().__init__(**config)

    def step(self, event: Any) -> list[Effect]:
        effects = super().step(event)
        for effect in effects:
            if isinstance(effect, StartTimer) and isinstance(effect.key, DecisionDue):
                self.wakes_s = effect.at_s
            elif isinstance(effect, Request) and isinstance(
                effect.message, StartWorkers | StopWorkers
            ):
                effects = [*effects, *self.step(Answered(effect.key, Ok()))]
        return effects

    def hear(self, *nodes: str) -> list[object]:
        """Beats that name the ranks on each node, of two nodes."""
        if not hasattr(self, "core"):
            return []
        for at in nodes or ("n1", "n2"):
            gpus = tuple(Gpu(index=n, id=f"{at}/{n}", type="fake") for n in range(self.gpus))
            self.see(
                WorkerHeartbeat(
                    service="worker", id=at, incarnation=0, at_s=self.now_s, node=NodeId(at),
                    slots=8, gpus=gpus, running=tuple(self._ranks(at)),
                )
            )  # fmt: skip
        return []

    def _ranks(self, node: str) -> Iterator[tuple[JobId, int]]:
        for id in self.stored["jobs"]:
            record, rank = self.job(id), 0
            for at, gpus in record.allocation:
                for _ in range(gpus):
                    if at == node and record.state == "running":
                        yield JobId(id), rank
                    rank += 1

    def pass_s(self, seconds: float) -> None:
        """Let time pass, in ticks and the policy's own instants."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + TICK_S, max(self.now_s, self.wakes_s))
            if self.now_s >= self.wakes_s:
                self.wakes_s = inf
                self.step(TimerFired(DecisionDue("gpus")))
            self.hear()
            self.tick(0.0)


def a_state(policy: str, seed: int) -> Obedient:
    """Two nodes of four GPUs after some submissions, ends and waits."""
    rng = random.Random(f"{policy} {seed}")
    settings = {"limits": "100,400"} if policy == "tiresias-las" else {}
    master = Obedient(
        gpus=4,
        gpu_policy=policy,
        gpu_policy_settings=settings,
        gpu_min_run_s=rng.choice([0.0, 15.0]),
        node_silent_s=1e6,
    )
    for number in range(rng.randrange(3, 9)):
        master.submit(f"j{number}", rng.randrange(1, 7))
        master.pass_s(rng.uniform(1.0, 20.0))
        if rng.random() < 0.2:
            master.ask(CancelJob(job=f"j{rng.randrange(number + 1)}"))
    return master


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("states", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_job_starts_at_the_instant_that_was_named_and_no_earlier(
    policy: str, states: int
) -> None:
    """Random states of each of five policies, each followed for two minutes; 200 take 10 s."""
    named = 0
    for seed in range(states):
        master = a_state(policy, seed)
        why = waits_for_gpus(master.core.state, master.now_s)
        asked_s = master.now_s
        said_s = {job: instant(text) for job, text in why.items()}
        started_s = dict.fromkeys(said_s, inf)
        while master.now_s < asked_s + AHEAD_S and inf in started_s.values():
            master.pass_s(TICK_S)
            for job in said_s:
                if started_s[job] == inf and master.job(job).state in ("starting", "running"):
                    started_s[job] = master.now_s - asked_s
        for job, in_s in said_s.items():
            if in_s < AHEAD_S - 2 * TICK_S:
                named += 1
                assert in_s - NEAR_S <= started_s[job] <= in_s + TICK_S + NEAR_S, (
                    seed,
                    job,
                    why[job],
                )
            elif in_s == inf:
                assert started_s[job] == inf, (seed, job, why[job])
    if policy == "tiresias-las":
        assert named >= states / 4, "the states have jobs that start by themselves"


def instant(why: str) -> float:
    found = re.search(r"it starts in (\d+) s unless", why)
    return float(found[1]) if found else inf
