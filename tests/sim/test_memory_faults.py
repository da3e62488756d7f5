"""Remote memory in virtual time (remote_memory.py), with every fault and kind of copies."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.sim.remote_memory import RemoteMemory

from slackwater.common.shell.simulated_loop import run_simulated
from slackwater.memory.service.warm import warm


async def run(
    seed: int,
    file: Path,
    faults: int,
    *,
    mapped: bool,
    resilience: str = "disk",
    ahead: bool = False,
) -> RemoteMemory:
    system = RemoteMemory(seed, file, mapped=mapped, resilience=resilience, ahead=ahead)
    await system.begin()
    system.users_start(4)
    await asyncio.sleep(4.0)
    for _ in range(faults):
        await system.fault()
        system.watch()
        await asyncio.sleep(system.rng.choice((0.0, 0.2, 1.5)))
        system.watch()
    await system.finish()
    return system


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm()


def simulate(work: Coroutine[Any, Any, RemoteMemory]) -> RemoteMemory:
    return run_simulated(work)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "channel"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
@pytest.mark.timeout(180)
def test_every_page_is_right_or_the_read_fails(seed: int, mapped: bool, tmp_path: Path) -> None:
    """50 faults in 10 runs: 500 squeezes, evictions, partitions, deaths of daemons, lost machines,
    deaths of the device. No page is wrong, no flush is lost, and remote memory was really used."""
    system = simulate(run(seed, tmp_path / "backup", 50, mapped=mapped))
    assert sum(system.happened.values()) >= 50
    assert system.checker.reads > 1000
    assert system.facts.count("mapped") > 5
    assert "unmapped" in system.facts


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "channel"])
@pytest.mark.parametrize("resilience", ["2+1", pytest.param("2-copies", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
@pytest.mark.timeout(180)
def test_coded_pages_are_right_or_the_read_fails(
    seed: int, resilience: str, mapped: bool, tmp_path: Path
) -> None:
    """The same with several members a span, made again while all this happens."""
    work = run(seed, tmp_path / "backup", 30, mapped=mapped, resilience=resilience)
    system = simulate(work)
    assert sum(system.happened.values()) >= 30
    assert system.checker.reads > 500
    assert system.facts.count("mapped") > 5
    assert "unmapped" in system.facts


@pytest.mark.parametrize("resilience", ["disk", pytest.param("2+1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5))]
)
@pytest.mark.timeout(180)
def test_prefetched_pages_are_right_too(seed: int, resilience: str, tmp_path: Path) -> None:
    """Two of the users scan, and what they will read is prefetched over a channel, while the others
    write and let go of just these pages, and the same faults happen."""
    work = run(seed, tmp_path / "backup", 25, mapped=False, resilience=resilience, ahead=True)
    system = simulate(work)
    assert sum(system.happened.values()) >= 25
    assert system.hits > 100
    assert system.changed > 10
    assert "unmapped" in system.facts
