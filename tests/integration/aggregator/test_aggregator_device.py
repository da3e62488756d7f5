"""Buckets in device memory, in the running system: real aggregators, real Agents, kernels of the
device; on the fake GPU everywhere, on a GPU where one is. Bits are those of a replay on
this CPU."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.fake_cupy import fake_device

from slackwater.common.base.errors import ConfigRejected
from slackwater.common.transport import devices
from slackwater.common.transport.devices import device_named

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    try:
        device_named(name)
    except ConfigRejected as error:
        pytest.skip(f"no GPU here: {error}")
    return name


@pytest.mark.parametrize(
    ("transport", "workers"),
    [
        ("shm", "device device"),
        ("shm", "host device"),
        ("shm", "host host"),
        ("tcp", "host device"),
    ],
)
async def test_a_job_on_device_memory_ends_at_the_bits_of_a_replay(
    lab: Any, training: Any, check_result: Any, device: str, transport: str, workers: str
) -> None:
    """Workers on the device open the aggregator's memory or stage; workers without one stage."""
    await lab.aggregators("a1", "a2", transport=transport, device=device)
    places = tuple(device if kind == "device" else "" for kind in workers.split())
    run = training(transport=transport, devices=places)
    run.start()
    await run.until(8)
    await check_result(run, await run.finish())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_agents_with_cuda_arrays_train_with_an_aggregator_that_has_none(
    lab: Any,
    training: Any,
    check_result: Any,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The Agents' part for CUDA, on a fake cupy: wrapped, copied into device slots, downloaded into
    the mapped region or through pinned memory, and back."""
    cuda = fake_device(monkeypatch, tmp_path)
    monkeypatch.setitem(devices._devices, "cuda", cuda)
    await lab.aggregators("a1", transport=transport)
    run = training(transport=transport, devices=("cuda", ""), sizes={"w": 300_007, "b": 5_003})
    run.start()
    await run.until(4)
    await check_result(run, await run.finish(more=2))
    assert cuda.cupy.cuda.runtime.synchronized, "the Agents wait for what the program does"


async def test_buckets_travel_between_device_and_host_under_load(
    lab: Any, training: Any, check_result: Any, device: str
) -> None:
    """Device to host to device, three times for each bucket, while a host worker and a device
    worker train: nothing is lost, nothing is applied twice."""
    await lab.aggregators("a1", transport="shm", device=device)
    await lab.aggregators("a2", transport="shm")
    run = training(transport="shm", devices=("", device), pace_s=0.002, lossy=True)
    run.start()
    await run.until(2)
    job = lab.director.jobs["j1"]
    for _ in range(3):
        for bucket, place in enumerate(tuple(job.places)):
            there = "a2" if place.aggregator == "a1" else "a1"
            await lab.director.move(job, bucket, there)
            await run.until(min(run.done.values()) + 1)
    await check_result(run, await run.finish())


async def test_a_stop_in_order_loses_nothing_and_a_kill_loses_the_optimisers_state(
    lab: Any, training: Any, check_result: Any, device: str
) -> None:
    """Stopped, the aggregator leaves its buckets in the descriptor store; killed, it cannot: the
    workers' newest parameters seed fresh ones, as when a host's regions are lost."""
    await lab.aggregators("a1", transport="shm", device=device)
    run = training(
        update="sgd", transport="shm", devices=(device, device), pace_s=0.002, lossy=True
    )
    run.start()
    await run.until(5)
    job = lab.director.jobs["j1"]
    await restart_in_order(lab.supervisor.units["a1"])
    assert await lab.director.rehost(job, "a1") == 0, "all were found again"
    beats = await lab.director.fresh_beats()
    assert [beat.regions_recovered for beat in beats] == [len(job.buckets)]
    await run.until(min(run.done.values()) + 5)
    before = lab.restarts("a1")
    lab.supervisor.kill("a1", signal.SIGKILL)
    await lab.restarted("a1", before + 1)
    assert await lab.director.rehost(job, "a1") == len(job.buckets)
    await check_result(run, await run.finish(more=20))


async def restart_in_order(unit: Any) -> None:
    """Restart like `systemctl restart`: SIGTERM, then a new process with what the store holds."""
    unit.kill(signal.SIGTERM)
    async with asyncio.timeout(20.0):
        await unit.ended.wait()
    unit._task = None
    unit.ended.clear()
    unit.start()
    async with asyncio.timeout(20.0):
        await unit.until_ready()
