"""Folding before every push is whole: the fold is spared that part, no bit changes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.aggregator.test_aggregator_talks import (
    UPDATE,
    Array,
    System,
    Worker,
    gradient,
    same,
    simulated,
)

from slackwater.common.base.errors import DecodeRejected, Unavailable
from slackwater.common.domains.slots import folding, frames
from slackwater.common.domains.slots.frames import (
    Done,
    Granted,
    Moved,
    Part,
    PushRefused,
    encode_part,
)
from slackwater.common.domains.slots.rules import Hyper
from slackwater.services.aggregator import executor
from slackwater.services.aggregator.early_fold import Parts

HALF = 150_000


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many elements each fold did not do again."""
    seen: list[int] = []
    fold = folding.fold

    def watched(*arguments: Any) -> bool:
        seen.append(arguments[5])
        return fold(*arguments)

    monkeypatch.setattr(folding, "fold", watched)
    return seen


def write(worker: Worker, values: Array, first: int, last: int, iteration: int = 1) -> None:
    """Begin a push from afar: hyper-parameters, then a part of the slot, which is told."""
    region = worker.regions[0]
    region.set_hyper(worker.rank, Hyper.of(UPDATE))
    region.gradient(worker.rank)[first:last] = values[first:last]
    worker.channel.send(encode_part(worker.granted[0].handle, iteration, last))


def finish(worker: Worker, values: Array, first: int, iteration: int = 1) -> None:
    worker.regions[0].gradient(worker.rank)[first:] = values[first:]
    worker.regions[0].set_pushed(worker.rank, iteration)
    worker.ring(0, iteration)


def test_what_everybody_has_written_is_folded_while_the_rest_comes(saved: list[int]) -> None:
    @simulated
    async def main(system: System) -> None:
        await system.start("a1")
        await system.host()
        workers = await system.training()
        for iteration in (1, 2):
            values = [gradient(worker.rank, iteration, 0) for worker in workers]
            for worker in workers:
                write(worker, values[worker.rank], 0, HALF, iteration)
            await asyncio.sleep(0.1)
            finish(workers[0], values[0], HALF, iteration)
            write(workers[1], values[1], HALF, 2 * HALF - 1, iteration)
            await asyncio.sleep(0.1)
            finish(workers[1], values[1], 2 * HALF - 1, iteration)
            assert [(await worker.hear()).version for worker in workers] == [iteration] * 2
        assert same(workers[0], 0, 2)

    main()
    assert saved == [2 * HALF - 1] * 2


def test_a_worker_that_begins_anew_voids_what_was_folded(saved: list[int]) -> None:
    """It may compute another gradient: half an update of each would be nobody's."""

    @simulated
    async def main(system: System) -> None:
        await system.start("a1")
        await system.host()
        workers = await system.training()
        write(workers[0], gradient(0, 1, 0), 0, HALF)
        write(workers[1], np.full_like(gradient(1, 1, 0), 7.0), 0, HALF)
        await asyncio.sleep(0.1)
        await workers[1].channel.close()
        again = await Worker(system, 1).connect()
        [answer] = await again.attach(0)
        assert isinstance(answer, Granted)
        finish(workers[0], gradient(0, 1, 0), HALF)
        again.push(0, 1, gradient(1, 1, 0))
        assert isinstance(await again.hear(), Done)
        assert same(again, 0, 1)

    main()
    assert saved == [0]


def test_other_hyper_parameters_are_folded_anew(saved: list[int]) -> None:
    @simulated
    async def main(system: System) -> None:
        await system.start("a1")
        await system.host()
        workers = await system.training()
        for worker in workers:
            write(worker, gradient(worker.rank, 1, 0), 0, HALF)
            worker.regions[0].set_hyper(worker.rank, Hyper(learning_rate=0.5))
        await asyncio.sleep(0.1)
        for worker in workers:
            worker.regions[0].set_hyper(worker.rank, Hyper.of(UPDATE))
            finish(worker, gradient(worker.rank, 1, 0), HALF)
        assert isinstance(await workers[0].hear(), Done)
        assert same(workers[0], 0, 1)

    main()
    assert saved == [0]


def test_a_value_that_is_not_finite_is_refused_wherever_it_lies(saved: list[int]) -> None:
    @simulated
    async def main(system: System) -> None:
        await system.start("a1")
        await system.host()
        workers = await system.training()
        bad = gradient(1, 1, 0)
        bad[77] = np.inf
        write(workers[0], gradient(0, 1, 0), 0, HALF)
        write(workers[1], bad, 0, HALF)
        await asyncio.sleep(0.1)
        finish(workers[0], gradient(0, 1, 0), HALF)
        finish(workers[1], bad, HALF)
        refused = await workers[1].hear()
        assert isinstance(refused, PushRefused)
        assert "inf" in refused.why
        workers[1].push(0, 1, gradient(1, 1, 0))
        assert isinstance(await workers[1].hear(), Done)
        assert same(workers[1], 0, 1)

    main()
    assert saved == [0, 0]


def test_a_bucket_does_not_leave_while_it_is_folded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its region would be another aggregator's, which folds into the same buffers."""
    told: list[Any] = []
    tell = executor.Executor._tell_ahead
    monkeypatch.setattr(executor.Executor, "_tell_ahead", lambda *arguments: told.append(arguments))

    @simulated
    async def main(system: System) -> None:
        await system.start("a1")
        await system.start("a2")
        await system.host()
        workers = await system.training()
        for worker in workers:
            write(worker, gradient(worker.rank, 1, 0), 0, HALF)
        await asyncio.sleep(0.1)
        await system.migrate(0, 1)
        await asyncio.sleep(1.0)
        assert (await system.held("a1"))[0].location_epoch == 0
        tell(*told.pop())
        assert isinstance(await workers[0].hear(), Moved)
        await asyncio.sleep(1.0)
        assert 0 in await system.held("a2")

    main()


@pytest.mark.parametrize("elements", [0, 300_001, 1 << 63], ids=str)
def test_a_part_that_cannot_be_ends_its_channel_alone(elements: int) -> None:
    @simulated
    async def main(system: System) -> None:
        await system.start("a1")
        await system.host()
        workers = await system.training()
        workers[1].channel.send(encode_part(workers[1].granted[0].handle, 1, elements))
        with pytest.raises(Unavailable):
            await workers[1].hear()
        workers[0].push(0, 1, gradient(0, 1, 0))
        again = await Worker(system, 1).connect()
        await again.attach(0)
        again.push(0, 1, gradient(1, 1, 0))
        assert isinstance(await workers[0].hear(), Done)

    main()


def test_parts_are_read_as_they_were_said_and_cut_ones_refused() -> None:
    frame = encode_part(7, 3, 1 << 40)
    assert list(frames.decode(frame)) == [Part(7, 3, 1 << 40)]
    for length in range(len(frame)):
        with pytest.raises(DecodeRejected):
            list(frames.decode(frame[:length]))


Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("part", "part", "part", "ring", "anew", "fold")),
            st.integers(0, 2),
            st.integers(1, 10),
        ),
        max_size=40,
    )
)
def test_nothing_is_ready_that_somebody_has_not_written(steps: Sequence[Step]) -> None:
    """Against the plain rule: what all have told since they attached, of this version."""
    parts, version = Parts(3, 10), 0
    there, pushed, known = [0, 0, 0], [0, 0, 0], 0
    for what, rank, elements in steps:
        match what:
            case "part" if pushed[rank] == version and elements > there[rank]:
                there[rank] = elements
                parts.arrived(rank, elements)
            case "ring":
                pushed[rank] = version + 1
            case "anew":
                known = 0 if there[rank] else known
                there[rank] = 0
                parts.forget(rank)
            case "fold" if all(word == version + 1 for word in pushed):
                taken = parts.take()
                assert (taken.upto if taken is not None else 0) == known
                version, there, known = version + 1, [0, 0, 0], 0
        whole = [10 if pushed[r] == version + 1 else there[r] for r in range(3)]
        ready = parts.ready(version + 1, pushed)
        if min(whole) > known:
            assert ready is not None
            assert ready.upto == min(whole)
            assert not ready.over
            known = min(whole)
        else:
            assert ready is None
