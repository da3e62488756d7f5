"""Gradients that are told in pieces: folded while they come, by real aggregators over tcp."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from slackwater.agent import region_access

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


async def test_pieces_are_folded_to_the_same_bits_through_moves_and_kills(
    lab: Any, training: Callable[..., Any], check_result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    encode = region_access.encode_part

    def counted(handle: int, iteration: int, elements: int) -> bytes:
        told.append(elements)
        return encode(handle, iteration, elements)

    monkeypatch.setattr(region_access, "PIECE_BYTES", 65_536)
    monkeypatch.setattr(region_access, "encode_part", counted)
    await lab.aggregators("a1", "a2", transport="tcp")
    run = training("j1", sizes={"w": 300_007}, transport="tcp")
    run.start()
    await run.until(3)
    for to in ("a2", "a1", "a2"):
        await lab.director.move(lab.director.jobs["j1"], 0, to)
        await run.until(min(run.done.values()) + 2)
    before = lab.restarts("a2")
    lab.supervisor.kill("a2", signal.SIGKILL)
    await lab.restarted("a2", before + 1)
    await run.until(min(run.done.values()) + 3)
    iterations = await run.finish()
    await check_result(run, iterations)
    assert len(told) >= 18 * iterations, "each push has eighteen before its last piece"
