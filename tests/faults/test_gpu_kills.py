"""kill -9 of the master, a worker service, a rank or all of a node, at random moments of a live
trace on fake GPUs: no job is lost, no GPU has two holders, and no process is left.

Real processes and a real bus. Each rank has a child in a session of its own, which no signal to its
group reaches. A kill comes about each second.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

import pytest
from tests.faults.gpu_nodes import GpuNodes, gpu_nodes
from tests.waiting import soon

from slackwater.schemas.base import RUN_ATTEMPTS
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.services.worker.containment import Containment

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

NODES, GPUS = 3, 2
KINDS = ("master", "worker", "rank", "node")
PROGRAM = "setsid sleep 600 & sleep 2"


def marked(nodes: GpuNodes, node: str) -> frozenset[int]:
    """Find what ranks of the node have started, by its mark."""
    return Containment(nodes.state_dir(node), None).processes()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def killed(nodes: GpuNodes, jobs: list[str], rng: random.Random, kind: str) -> bool:
    """Kill something of the kind; False: there is nothing of it now."""
    node = rng.choice(nodes.names)
    if kind == "master":
        nodes.cluster.supervisor.kill("master-m1", signal.SIGKILL)
    elif kind == "worker":
        nodes.signal(node, signal.SIGKILL)
    elif kind == "node":
        nodes.signal(node, signal.SIGKILL)
        for pid in marked(nodes, node):
            kill(pid)
    else:
        ranks = [one for job in jobs for one in nodes.running(job)]
        if not ranks:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rng.choice(ranks).pid, signal.SIGKILL)
    return True


def held_twice(nodes: GpuNodes, records: list[JobRecord]) -> list[str]:
    """Name GPUs on which the ranks of two jobs, or of two attempts, live at this moment."""
    holders: dict[str, set[tuple[str, int]]] = {}
    for record in records:
        each = record.spec.gpus_each
        running = nodes.running(record.spec.id)
        for one in running:
            ids = record.gpu_ids.get(one.node, ()) if one.attempt == record.attempt else ()
            first = min(r.rank for r in running if r.node == one.node)
            for id in ids[(one.rank - first) * each :][:each]:
                holders.setdefault(id, set()).add((record.spec.id, one.attempt))
    return [id for id, by in holders.items() if len(by) > 1]


async def play(nodes: GpuNodes, kills: int, seed: int) -> Counter[str]:
    rng, done, jobs = random.Random(seed), Counter[str](), list[str]()
    while done.total() < kills:
        records = [await nodes.client.job(id) for id in jobs]
        live = [r for r in records if r.state not in TERMINAL_STATES]
        if len(live) < 5:
            gpus = rng.choice((1, 2, 2, 4))
            id = f"job{len(jobs)}"
            spec = JobSpec(
                id=id, workers=gpus, gpus=gpus, program=("/bin/sh", "-c", PROGRAM), restarts=1000
            )
            await nodes.client.submit(spec)
            jobs.append(id)
            continue
        assert not held_twice(nodes, records)
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        kind = rng.choice(KINDS)
        done[kind] += await killed(nodes, [r.spec.id for r in live], rng, kind)
    for id in jobs:
        await ended(nodes, id)
    for node in nodes.names:
        await soon(lambda node=node: not marked(nodes, node), f"nothing is left on {node}")
    done["jobs"] = len(jobs)
    return done


async def ended(nodes: GpuNodes, id: str) -> None:
    for _ in range(1200):
        if (record := await nodes.client.job(id)).state in TERMINAL_STATES:
            break
        await asyncio.sleep(0.1)
    assert record.state == "completed", (record.state, record.reason)
    assert "still held by another process" not in record.reason
    assert record.attempt < RUN_ATTEMPTS


@pytest.mark.parametrize("cgroups", [True, False])
async def test_kills_lose_no_job_and_leave_no_process(cgroups: bool) -> None:
    """Eight kills, and the time that the jobs take to end: half a minute."""
    async with gpu_nodes(NODES, GPUS, worker={"cgroups": cgroups}) as nodes:
        await play(nodes, 8, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("cgroups", [True, False])
async def test_fifty_kills_lose_no_job_and_leave_no_process(cgroups: bool) -> None:
    """Two minutes or three."""
    async with gpu_nodes(NODES, GPUS, worker={"cgroups": cgroups}) as nodes:
        done = await play(nodes, 50, 4)
        assert min(done[kind] for kind in KINDS) >= 5
