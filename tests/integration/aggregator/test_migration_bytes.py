"""Bytes that a migration between hosts puts on the wire."""

from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
ELEMENTS = 1_000_003
SLACK_BYTES = 200_000
"""Header, record, frames of the protocol."""


@pytest.mark.parametrize(("update", "states"), [("sgd", 0), ("adam", 2)])
async def test_a_migration_carries_live_bytes_alone(
    lab: Any, wires: list[Any], training: Any, check_result: Any, update: str, states: int
) -> None:
    """One buffer of parameters and one of each state: neither slots nor the copies of the version
    before. Everybody rests meanwhile, so that nothing else is on the wire."""
    run = training(transport="tcp", update=update, sizes={"w": ELEMENTS})
    run.start()
    await run.until(3)
    before_last = await run.finish(more=2)
    job = lab.director.jobs["j1"]
    before = sum(wire.carried for wire in wires)
    await lab.director.move(job, 0, "a2")
    carried = sum(wire.carried for wire in wires) - before
    live = (1 + states) * 4 * ELEMENTS
    assert live <= carried <= live + SLACK_BYTES
    await check_result(run, before_last)
