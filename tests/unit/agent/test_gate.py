"""Transfers of early layers overtake those that wait, and nobody is forgotten."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slackwater.agent.gate import Gate
from slackwater.common.shell.simulated_loop import run_simulated


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_simulated(main())


def test_the_backward_pass_pushes_last_layers_first_and_early_ones_overtake() -> None:
    """Ten layers are handed over from the last on; two transfers at once."""
    sent: list[int] = []

    async def transfer(gate: Gate, layer: int) -> None:
        async with gate.turn(layer):
            sent.append(layer)
            await asyncio.sleep(1.0)

    async def main() -> None:
        gate = Gate(2)
        await asyncio.gather(*(transfer(gate, layer) for layer in reversed(range(10))))

    run(main)
    assert sent == [9, 8, 0, 1, 2, 3, 4, 5, 6, 7]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
)
def test_at_most_count_at_once_and_all_have_their_turn(
    transfers: list[tuple[int, int, int, bool]], count: int
) -> None:
    """(rank, begin, seconds, whether it is cancelled a second later): whatever is cancelled,
    waiting, at its turn or in it, the others come through, and all places are free again."""
    inside = most = 0
    done: list[int] = []

    async def main() -> None:
        nonlocal inside, most
        gate = Gate(count)

        async def transfer(number: int, rank: int, begin_s: int, lasts_s: int) -> None:
            nonlocal inside, most
            await asyncio.sleep(begin_s)
            async with gate.turn(rank):
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(lasts_s)
                finally:
                    inside -= 1
            done.append(number)

        tasks = [
            asyncio.create_task(transfer(number, rank, begin_s, lasts_s))
            for number, (rank, begin_s, lasts_s, _) in enumerate(transfers)
        ]

        async def cancel(number: int, begin_s: int) -> None:
            await asyncio.sleep(begin_s + 1)
            tasks[number].cancel()

        cancels = [
            cancel(number, begin_s)
            for number, (_, begin_s, _, cancelled) in enumerate(transfers)
            if cancelled
        ]
        await asyncio.gather(*tasks, *cancels, return_exceptions=True)
        assert gate._free == count

    run(main)
    kept = {number for number, each in enumerate(transfers) if not each[3]}
    assert kept <= set(done)
    assert most <= count


def test_a_turn_that_came_while_its_task_was_cancelled_goes_to_the_next() -> None:
    sent: list[str] = []

    async def transfer(gate: Gate, name: str, rank: int) -> None:
        async with gate.turn(rank):
            sent.append(name)

    async def main() -> None:
        gate = Gate(1)
        async with gate.turn(0):
            first = asyncio.create_task(transfer(gate, "first", 1))
            second = asyncio.create_task(transfer(gate, "second", 2))
            await asyncio.sleep(0)
        first.cancel()  # In the same turn of the loop in which the place was given to it.
        await second
        assert first.cancelled()

    run(main)
    assert sent == ["second"]
