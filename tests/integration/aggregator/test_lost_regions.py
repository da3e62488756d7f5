"""Aggregators whose memory is lost with them, as with their host: the workers have what is needed
to go on, the optimiser's states included (SCAR: Qiao 2021, section 5.4)."""

from typing import Any

import numpy as np
import pytest

from slackwater.common.domains.slots.folding import replay
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.jobs import STATE_COPIES

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


async def lose(lab: Any, run: Any, losses: int, every: int) -> None:
    """Lose a1 so often, each time `every` iterations later."""
    for number in range(losses):
        await run.until(every * (number + 1))
        assert await lab.lose("a1", lab.director.jobs["j1"]) == 2


def told(lab: Any) -> list[JobEvent]:
    return [fact for fact in lab.director.facts if isinstance(fact, JobEvent)]


async def test_mapped_states_outlive_their_aggregator_to_the_bit(
    lab: Any, training: Any, check_result: Any
) -> None:
    """Workers on its host have its memory mapped: nothing is lost at all."""
    await lab.aggregators("a1", "a2", transport="shm")
    run = training(update="adam", pace_s=0.002, transport="shm", lossy=True)
    run.start()
    await lose(lab, run, losses=3, every=5)
    iterations = await run.finish(more=20)
    await check_result(run, iterations)
    facts = told(lab)
    assert {fact.fact for fact in facts} == {"optimizer-state-recovered"}
    assert len(facts) == 6, "two buckets, three times"
    assert {fact.detail["behind"] for fact in facts} == {"0"}


async def test_states_read_over_a_network_are_recovered_from_all_workers_copies(
    lab: Any, training: Any
) -> None:
    """Each worker has copied a half of the parts: together they are all, none older than two
    periods, and the job ends nearer to where it would have ended than with states of zero."""
    await lab.aggregators("a1", "a2", transport="tcp")
    run = training(update="adam", pace_s=0.01, transport="tcp", lossy=True)
    run.start()
    await lose(lab, run, losses=2, every=2 * STATE_COPIES + 10)
    iterations = await run.finish(more=20)
    facts = told(lab)
    assert [fact.fact for fact in facts] == ["optimizer-state-recovered"] * 4, facts
    for fact in facts:
        assert "from workers 0, 1" in fact.reason or fact.detail["elements"] == "20011"
        assert 0 < int(fact.detail["behind"]) <= 2 * STATE_COPIES
    ends = [*sorted({int(fact.detail["version"]) for fact in facts}), iterations]
    ours = fresh = 0.0
    for name in run.sizes:
        undisturbed, got = run.expected(name, iterations), run.results[0][name]
        assert (got == run.results[1][name]).all()
        ours += float(np.abs(got - undisturbed).sum())
        fresh += float(np.abs(started_afresh(run, name, ends) - undisturbed).sum())
    assert ours < 0.85 * fresh, "gradients are random: momenta of some iterations ago help a part"


def started_afresh(run: Any, name: str, ends: list[int]) -> np.ndarray:
    """Return the tensor as it would be if its optimiser began anew after each of these versions."""
    values, first = run.initial(name), 1
    for end in ends:
        rows = (
            [run.gradient(name, rank, i) for rank in range(run.workers)]
            for i in range(first, end + 1)
        )
        values, first = replay(run.update, "float32", values, rows), end + 1
    return values
