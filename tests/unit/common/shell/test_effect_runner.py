"""Effects are carried out by the handler of their type, and a type without one is found at the
start."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from slackwater.common.base.effects import Action, CancelTimer, EffectKey, StartTimer, TimerFired
from slackwater.common.base.errors import Fatal
from slackwater.common.shell.effect_runner import EffectRunner, Handlers, handlers, on
from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.common.shell.world import SimWorld


@dataclass(frozen=True, slots=True)
class Open(Action):
    path: str


@dataclass(frozen=True, slots=True)
class Close(Action):
    path: str


class Retry(EffectKey, frozen=True):
    path: str


class Expire(EffectKey, frozen=True):
    path: str


def nothing(effect: Any) -> None:
    pass


def runner(found: Handlers, events: list[Any], failures: list[str] | None = None) -> EffectRunner:
    def fail(name: str, error: BaseException) -> None:
        assert failures is not None, error
        failures.append(f"{name}: {error}")

    return EffectRunner(SimWorld(1).client("x").clock, events.append, fail, found)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ((on(Open, nothing),), "Close have no handler"),
        ((on(Open, nothing), on(Close, nothing), on(Open, nothing)), "Open have two handlers"),
        ((on(Open, nothing), on(Close, nothing), on(StartTimer, nothing)), "not effects of this"),
    ],
    ids=["missing", "doubled", "strange"],
)
def test_each_effect_of_a_core_needs_one_handler_before_anything_runs(
    entries: tuple[Any, ...], why: str
) -> None:
    with pytest.raises(Fatal, match=why):
        handlers(Open | Close, *entries)


def test_an_effect_that_nobody_registered_ends_the_process() -> None:
    async def main() -> None:
        with pytest.raises(Fatal, match="Close"):
            runner(handlers(Open, on(Open, nothing)), []).perform(Close("a"))

    run_simulated(main())


def test_what_a_handler_returns_at_once_or_later_is_the_next_event() -> None:
    async def main() -> None:
        events: list[Any] = []

        async def close(effect: Close) -> str:
            await asyncio.sleep(1.0)
            return f"closed {effect.path}"

        one = runner(
            handlers(Open | Close, on(Open, lambda e: f"opened {e.path}"), on(Close, close)), events
        )
        one.perform(Close("a"))
        one.perform(Open("b"))
        assert (events, one.running) == (["opened b"], 1)
        await asyncio.sleep(1.5)
        assert (events, one.running) == (["opened b", "closed a"], 0)

    run_simulated(main())


def test_a_handler_that_fails_later_is_told_by_its_effect_and_a_closed_one_is_not() -> None:
    async def main() -> None:
        failures: list[str] = []

        async def close(effect: Close) -> None:
            await asyncio.sleep(1.0)
            raise ValueError(effect.path)

        one = runner(handlers(Close, on(Close, close)), [], failures)
        one.perform(Close("a"))
        await asyncio.sleep(1.5)
        one.perform(Close("b"))
        await one.close()
        assert (failures, one.running, one.tasks.running) == (["Close: a"], 0, 0)

    run_simulated(main())


def test_keys_of_two_kinds_with_one_content_are_two_timers() -> None:
    async def main() -> None:
        events: list[Any] = []
        one, due_s = runner({}, events), SimWorld(1).client("x").clock.now_s() + 1.0
        for after_s, key in enumerate((Retry("a"), Expire("a"), Retry("b"))):
            one.perform(StartTimer(key, due_s + after_s))
        one.perform(CancelTimer(Retry("a")))
        await asyncio.sleep(4.0)
        assert events == [TimerFired(Expire("a")), TimerFired(Retry("b"))]

    run_simulated(main())
