"""Virtual time and the simulated world: equal seeds give equal runs, byte for byte."""

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from slackwater.common.base import codec
from slackwater.common.base.errors import Fatal, Retryable
from slackwater.common.bus.base import Delivery, Endpoint, ServiceInfo
from slackwater.common.bus.faults import SeededFaults
from slackwater.common.shell.simulated_loop import SIM_START_S, run_simulated
from slackwater.common.shell.world import SimWorld, World
from slackwater.common.store.base import SequenceConflict
from slackwater.common.store.memory import SeededStoreFaults
from slackwater.schemas.base import Ok
from slackwater.schemas.cluster import Heartbeat
from slackwater.schemas.subjects import command, telemetries, telemetry

SERVICES = 50
MINUTES = 2.0


async def toy_service(world: World, peers: list[str], end_s: float) -> None:
    """Heartbeats once a second with jitter, asks a random peer now and then, stores what it did."""
    seen = 0

    async def observe(_: Delivery) -> None:
        nonlocal seen
        seen += 1

    async def answer(_: Delivery) -> bytes:
        await world.clock.sleep_until(world.clock.now_s() + world.rng.uniform(0.0, 0.01))
        return codec.encode(Ok(sender=world.name, epoch=seen))

    endpoint = Endpoint("ping", command("toy", world.name, "ping"), answer, {}, concurrency=4)
    await world.bus.serve(ServiceInfo("toy", "1.0.0", "a toy", {}), [endpoint])
    watched = world.rng.choice(peers)
    await world.bus.subscribe(telemetries("toy", watched, "heartbeat"), observe)
    bucket = await world.store.bucket(f"toys_{world.name}")
    written = 0
    while world.clock.now_s() < end_s:
        beat = Heartbeat(
            service="toy", id=world.name, incarnation=written, at_s=world.clock.now_s()
        )
        await world.bus.publish(telemetry("toy", world.name, "heartbeat"), codec.encode(beat))
        try:
            if world.rng.random() < 0.2:
                subject = command("toy", world.rng.choice(peers), "ping")
                await world.bus.request(subject, codec.encode(Ok()), timeout_s=1.0)
            if world.rng.random() < 0.1:
                written = await bucket.put("beat", codec.encode(beat), expected_last=written)
        except Retryable:
            written = await bucket.last_sequence()
        except SequenceConflict as conflict:
            written = conflict.last
        await world.clock.sleep_until(world.clock.now_s() + world.rng.uniform(0.5, 1.5))


def message_log(seed: int, *, faulty: bool = True) -> tuple[str, int]:
    """SHA-256 over every delivery of a run, and how many there were."""
    digest = hashlib.sha256()
    count = 0

    def trace(at_s: float, sender: str, receiver: str, subject: str, payload: bytes) -> None:
        nonlocal count
        count += 1
        digest.update(f"{at_s!r} {sender} {receiver} {subject} ".encode() + payload)

    async def main() -> None:
        sim = SimWorld(seed, trace=trace)
        if faulty:
            sim.broker.faults = SeededFaults(
                sim.rng("network"), drop=0.02, duplicate=0.02, delay_s_max=0.05
            )
            sim.storage.faults = SeededStoreFaults(
                sim.rng("disk"), lost=0.05, unanswered=0.05, delay_s_max=0.02
            )
        names = [f"t{index}" for index in range(SERVICES)]
        end_s = sim.clock.now_s() + MINUTES * 60.0
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(toy_service(sim.client(name), names, end_s))

    run_simulated(main())
    return digest.hexdigest(), count


def test_equal_seeds_give_equal_message_logs() -> None:
    first, count = message_log(1)
    assert count > SERVICES * MINUTES * 60 * 0.8
    assert message_log(1) == (first, count)
    assert message_log(2)[0] != first
    assert message_log(1, faulty=False)[0] != first


@pytest.mark.slow
def test_another_process_with_other_hashes_gives_the_same_log() -> None:
    """Python draws new string hashes per process: no order may depend on them."""
    program = (
        f"import importlib.util as u; s = u.spec_from_file_location('m', {__file__!r});"
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.message_log(1)[0])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert found == {message_log(1)[0]}


def test_time_jumps() -> None:
    async def main() -> list[float]:
        sim = SimWorld(1)
        seen_s = []
        for at_s in (30.0, 10.0, 20.0):
            asyncio.get_running_loop().call_at(at_s, lambda: seen_s.append(sim.clock.now_s()))
        await sim.clock.sleep_until(SIM_START_S + 30 * 24 * 3600.0)
        return [*seen_s, sim.clock.now_s()]

    expected = [SIM_START_S + after_s for after_s in (10.0, 20.0, 30.0, 30 * 24 * 3600.0)]
    assert run_simulated(main()) == pytest.approx(expected, abs=1e-6)


def test_timeouts_are_virtual() -> None:
    async def main() -> float:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time() - began_s

    assert run_simulated(main()) == pytest.approx(3600.0)


async def _wait_for_nothing() -> None:
    await asyncio.Event().wait()


async def _use_a_thread() -> None:
    await asyncio.to_thread(threading.get_ident)


async def _use_a_socket() -> None:
    await asyncio.open_connection("127.0.0.1", 9)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (_wait_for_nothing, "the simulation is stuck"),
        (_use_a_thread, "may not use threads"),
        (_use_a_socket, "may not use sockets"),
    ],
)
def test_what_cannot_be_simulated_is_refused(program: Any, why: str) -> None:
    main: Coroutine[Any, Any, None] = program()
    with pytest.raises(Fatal, match=why):
        run_simulated(main)


def test_each_client_draws_its_own_numbers() -> None:
    async def main() -> None:
        sim = SimWorld(9)
        first = [sim.client("a").rng.random() for _ in range(3)]
        assert first == [first[0]] * 3, "a client that starts anew draws the same numbers"
        assert sim.client("b").rng.random() != first[0]

    run_simulated(main())


def test_tasks_in_a_set_have_the_same_order_in_every_run() -> None:
    """By their addresses two runs of one process differed: services are cancelled in a set's order,
    and what they say last draws from the same random numbers."""

    async def orders() -> list[str]:
        found = []
        for turn in range(20):
            tasks = {asyncio.create_task(asyncio.sleep(0.0), name=f"{turn}.{n}") for n in range(9)}
            found += [task.get_name() for task in tasks]
            await asyncio.gather(*tasks)
        return found

    first = run_simulated(orders())
    moved = [bytearray(size) for size in range(0, 4000, 7)]  # The next objects lie elsewhere.
    assert run_simulated(orders()) == first
    assert len(moved) > 0
