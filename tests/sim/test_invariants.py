"""Watches find every violation in the whole system: provoked one by one, where all was well."""

import asyncio
import copy
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from tests.sim.invariants import (
    LEAKED_AFTER_S,
    CycleWatch,
    LeakWatch,
    LossWatch,
    OwnerWatch,
    Peace,
)
from tests.sim.system import SHARE, Job, System, make_job, whole_system

from slackwater.common.domains.slots import folding
from slackwater.common.domains.slots.region import SlotRegion
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.schemas.base import JobId
from slackwater.services.controller import feedback, membership

SHARED_S = 45.0
"""By then the second of two jobs was profiled and shares an aggregator with the first."""


class Scene:
    """Two jobs that share an aggregator, without a fault; the watches are asked by hand."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.peace = Peace(system)
        self.owners, self.cycles = OwnerWatch(self.peace), CycleWatch(system)
        self.losses, self.leaks = LossWatch(self.peace), LeakWatch(self.peace)

    async def begin(self) -> None:
        system = self.system
        system.faults.drop = system.faults.duplicate = 0.0
        await asyncio.sleep(2.0)
        for number in range(2):
            await system.submit(make_job(f"j{number}", 1.0, 0.3 * SHARE, 900, Random(number)))
        await asyncio.sleep(SHARED_S)
        first, second = self.placed(0), self.placed(1)
        assert first.record.phase == second.record.phase == "steady"
        assert first.homes() & second.homes()
        self.look()

    def job(self, number: int) -> Job:
        return self.system.jobs[f"j{number}"]

    def placed(self, number: int) -> Any:
        return self.system.controllers["c0"].state.jobs[JobId(f"j{number}")]

    def buckets(self, aggregator: str) -> dict[Any, Any]:
        return self.system.lives.lives[aggregator].aggregator.core.buckets

    def look(self) -> None:
        for watch in (self.owners, self.cycles, self.losses, self.leaks):
            watch.check()
        self.system.raise_failures()

    async def watch(self, for_s: float) -> None:
        for _ in range(int(for_s)):
            await asyncio.sleep(1.0)
            self.look()


def in_scene(policy: str, act: Callable[[Scene], Any]) -> None:
    async def main() -> None:
        async with whole_system(1, policy=policy) as system:
            scene = Scene(system)
            await scene.begin()
            await act(scene)

    run_simulated(main())


def test_a_bucket_that_is_served_where_it_must_not_be_is_found() -> None:
    async def act(scene: Scene) -> None:
        place = scene.placed(0).record.places[0]
        key = (JobId("j0"), 0)
        here, there = scene.buckets(place.aggregator), scene.buckets("a8")
        for higher, found in ((0, "is served twice"), (1, "by its record"), (-1, "is at")):
            there[key] = copy.copy(here[key])
            there[key].location_epoch += higher
            with pytest.raises(AssertionError, match=found):
                scene.look()
            del there[key]
        there[key] = here.pop(key)
        with pytest.raises(AssertionError, match=r"not \{"):
            scene.look()
        del there[key]
        with pytest.raises(AssertionError, match=r"j0/0 is at \[\]"):
            scene.look()

    in_scene("cyclic", act)


def test_a_fold_where_the_bucket_was_left_behind_is_found() -> None:
    async def act(scene: Scene) -> None:
        place = scene.placed(0).record.places[0]
        key = (JobId("j0"), 0)
        scene.peace.disturb(60.0)  # So that it may be there, for a while.
        left = scene.buckets("a8")[key] = copy.copy(scene.buckets(place.aggregator)[key])
        left.location_epoch -= 1
        scene.look()
        left.version += 1
        with pytest.raises(AssertionError, match="folded where it was left behind"):
            scene.look()
        del scene.buckets("a8")[key]

    in_scene("cyclic", act)


@pytest.mark.parametrize("times", [0.0, 2.0], ids=["lost", "twice"])
def test_an_update_that_is_applied_twice_or_not_at_all_is_found(
    times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        commit, left = folding.commit, [1]

        def wrong(region: SlotRegion, *arguments: Any) -> int:
            version = commit(region, *arguments)
            if left:
                left.pop()
                values, before = region.parameters(version), region.parameters(version - 1)
                values[:] = before + times * (values - before)
            return version

        monkeypatch.setattr(folding, "commit", wrong)
        with pytest.raises(AssertionError, match="j"):
            await scene.watch(20.0)

    in_scene("cyclic", act)


@pytest.mark.parametrize(
    ("policy", "found"), [("cyclic", "over its cycle"), ("edf", "may miss its deadline")]
)
def test_an_aggregator_that_is_asked_for_more_than_it_has_is_found(policy: str, found: str) -> None:
    async def act(scene: Scene) -> None:
        for number in range(2):
            job = scene.placed(number)
            profile = job.record.profile
            dearer = tuple(4.0 * cpu_s for cpu_s in profile.task_cpu_s)
            job.record = msgspec.structs.replace(
                job.record, profile=msgspec.structs.replace(profile, task_cpu_s=dearer)
            )
        with pytest.raises(AssertionError, match=found):
            scene.look()

    in_scene(policy, act)


@pytest.mark.parametrize("helped", [True, False])
def test_a_loss_that_outlasts_feedback_is_found(
    helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job becomes slower while it shares: the controller sees to it that it does not for long.
    One that hears of no window leaves it there."""

    async def act(scene: Scene) -> None:
        scene.job(1).slow = [1.4, 1.4]
        if helped:
            await scene.watch(200.0)
            assert scene.losses.beyond > 0
        else:
            monkeypatch.setattr(feedback, "measured", lambda *arguments: None)
            with pytest.raises(AssertionError, match="j1 loses 0"):
                await scene.watch(200.0)

    in_scene("cyclic", act)


def test_an_aggregator_that_is_kept_for_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene) -> None:
        monkeypatch.setattr(membership, "sweep", lambda *arguments: None)
        await scene.system.cancel(scene.job(0))
        with pytest.raises(AssertionError, match="serve nobody and are kept"):
            await scene.watch(LEAKED_AFTER_S + 20.0)

    in_scene("cyclic", act)
