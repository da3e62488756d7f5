"""A refusal that may pass is retried; who wants to hear of it hears, and the last one is the
receiver's own words."""

import asyncio
from typing import Any

import pytest

from slackwater.common.base import codec
from slackwater.common.base.effects import Answered, EffectKey, RefusedSoFar, Request
from slackwater.common.shell.counters import Counters
from slackwater.common.shell.requester import Requester
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld
from slackwater.schemas.base import Ok, Refused

Heard = Answered | RefusedSoFar
BUSY = Refused(reason="all slots are taken", retry_after_s=1.0)


class Start(EffectKey, frozen=True):
    job: str


START = Start("j")


class Receiver:
    """Refuses as often as it was told, then obeys."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals

    async def request(self, *_: Any, **__: Any) -> bytes:
        self.left -= 1
        return codec.encode(BUSY if self.left >= 0 else Ok())


def answers(refusals: int, hear_refusals: bool, again: bool = True) -> list[Heard]:
    async def main() -> list[Heard]:
        world = SimWorld(1).client("asker")
        heard: list[Heard] = []
        tasks: list[asyncio.Task[Any]] = []
        requester = Requester(
            "asker",
            Receiver(refusals),  # type: ignore[arg-type]  # no more of a bus is used
            world.clock,
            world.rng,
            Counters(),
            stamp=lambda message: message,
            post=heard.append,
            spawn=lambda work, name: tasks.append(asyncio.ensure_future(work)),
            fenced=lambda epoch: pytest.fail(f"fenced by {epoch}"),
        )
        requester.send(
            Request(
                "a.subject",
                Ok(),
                START,
                budget_s=10.0,
                hear_refusals=hear_refusals,
                retry_refusals=again,
            )
        )
        await asyncio.gather(*tasks)
        return heard

    return run_simulated(main())


def test_refusals_are_heard_as_they_come_and_then_the_answer() -> None:
    assert answers(2, True) == [RefusedSoFar(START, BUSY)] * 2 + [Answered(START, Ok())]
    assert answers(2, False) == [Answered(START, Ok())]


@pytest.mark.parametrize("hear", [True, False])
def test_when_the_budget_ends_with_a_refusal_it_is_the_answer_as_it_was_said(hear: bool) -> None:
    assert answers(99, hear)[-1] == Answered(START, BUSY)


def test_a_refusal_may_be_the_answer() -> None:
    assert answers(2, True, again=False) == [Answered(START, BUSY)]
