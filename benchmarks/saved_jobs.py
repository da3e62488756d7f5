"""Measure what saving a job costs its training, and what a loss costs a job that is saved.

    python benchmarks/saved_jobs.py [--rounds 5] [--mb 100] [--epochs 8]

*Saving*: two workers push and pull over tcp, Adam, a plain Agent each that computes 20 ms. In the
middle its buckets are copied at one version and written (`slackwater checkpoint`). The pause is
what the slowest iteration beside it took longer than the median; the goal is SCAR's (Qiao 2021,
5.5.5: under 1 s of an epoch of 140 s), 1 % of the default interval, 60 s. *Writing a part*: bytes
that an update of an eighth of the pieces writes beside those of a whole set.

*Losing*: softmax regression by momentum on generated blobs, four aggregators; after epoch 7 of 8
one is killed with its memory. Rework: how many more epochs it takes until the loss is that of the
same run undisturbed after epoch 8. The second time it is paused first, so that no worker has its
parameters, and a checkpoint that is up to an epoch old stands in. A restart from the begin would
cost 7. Goal: at most 1.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
from figures import Figure, Row, show, this_command, write_json

from slackwater.common.base import codec
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas import subjects
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import JobState
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.tensors import UpdateRule

GOAL_PAUSE: Final = 0.01 * 60.0
GIVE_UP_S: Final = 180.0
LOOK_S: Final = 0.05
STEPS: Final = """
import sys, time
import numpy as np
from slackwater import Agent
elements, iterations = map(int, sys.argv[1:])
agent = Agent(tensors={"w": (elements,)}, transport="tcp", deadline_s=100.0)
ones = np.ones(elements, np.float32)
lasted = []
for _ in range(iterations):
    begun_s = time.perf_counter()
    time.sleep(0.02)
    agent.step({"w": ones})
    lasted.append(time.perf_counter() - begun_s)
lasted = sorted(lasted[10:])
agent.close([lasted[len(lasted) // 2], lasted[-1]])
"""
EPOCH: Final = 40
SOFTMAX: Final = """
import json, os, sys, time
import numpy as np
from slackwater import Agent
epoch, epochs, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rng = np.random.default_rng(5)
centres = rng.standard_normal((20, 784)).astype(np.float32)
y = rng.integers(0, 20, 4000)
x = (0.12 * centres[y] + rng.standard_normal((4000, 784))).astype(np.float32)
shapes = {f"w{i}": (196, 20) for i in range(4)}
groups = {f"w{i}": i for i in range(4)}  # So that each is a bucket.
agent = Agent(tensors=shapes, groups=groups, transport="tcp", deadline_s=100.0)
mine = np.arange(agent.rank, 4000, agent.workers)
targets = np.eye(20, dtype=np.float32)
def softmax(rows, w):
    z = rows @ w
    z = np.exp(z - z.max(1, keepdims=True))
    return z / z.sum(1, keepdims=True)
def whole():
    return np.concatenate([agent.pull(f"w{i}") for i in range(4)])
done = agent.wait()
while done < epoch * epochs:
    w = whole()
    batch = mine[np.random.default_rng(done * 64 + agent.rank).integers(0, mine.size, 32)]
    error = softmax(x[batch], w) - targets[y[batch]]
    gradient = x[batch].T @ error / 32
    time.sleep(0.02)
    agent.step({f"w{i}": gradient[196 * i : 196 * i + 196].astype(np.float32) for i in range(4)})
    done += 1
    if agent.rank == 0 and done % 4 == 0:
        p = softmax(x, whole())
        loss = float(-np.log(p[np.arange(4000), y] + 1e-9).mean())
        with open(out, "a") as file:
            file.write(json.dumps([done, loss]) + "\\n")
agent.close()
"""


async def until(client: Client, id: str, state: JobState) -> Any:
    """Wait until the job is in that state; return its record."""
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        record = await client.job(id)
        if record.state == state:
            return record
        if record.finished_s:
            raise RuntimeError(f"{id}: {record.reason}")
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} was not {state} within {GIVE_UP_S:g} s")


async def iterated(client: Client, id: str, least: int) -> None:
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        progress = (await client.job_info(id)).progress
        if progress is not None and progress.iteration >= least:
            return
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} did not reach iteration {least} within {GIVE_UP_S:g} s")


# Saving -------------------------------------------------------------------------------------------


async def pause(client: Client, folder: Path, mb: float, rounds: int) -> list[Row]:
    """Each round has one job that is saved and one that is not."""
    longer: dict[bool, list[float]] = {True: [], False: []}
    took_s: list[float] = []
    for turn in range(rounds):
        for saved in sorted(longer, reverse=bool(turn % 2)):
            id = f"p{turn}{'s' if saved else 'n'}"
            words = (str(int(mb * 2**18)), "60")
            await client.submit(
                JobSpec(
                    id=id, workers=2, iterations=60, update=UpdateRule(name="adam"), state_copies=0,
                    program=("python", str(folder / "steps.py"), *words),
                )
            )  # fmt: skip
            await iterated(client, id, 20)
            if saved:
                took_s.append(await save(client, id, folder / "whole"))
            median, slowest = json.loads((await until(client, id, "completed")).results["0"])
            longer[saved].append(slowest - median)
    return [
        Figure(
            f"{mb:g} MB, Adam: pause of training while it is saved, above the median iteration",
            statistics.median(longer[True]), GOAL_PAUSE, "s", "1 % of a minute", 1.0,
            lower_is_better=True,
        ),
        Figure(
            f"{mb:g} MB, Adam: the slowest iteration above the median, saved beside not saved",
            statistics.median(longer[True]), statistics.median(longer[False]), "s", "not saved",
        ),
        Figure(
            f"{mb:g} MB, Adam: from the order until {3 * mb:g} MB are durable",
            3 * mb / statistics.median(took_s), written_mb_s(folder, 3 * mb), "MB/s",
            "the disk: one file of as many bytes, synced",
        ),
    ]  # fmt: skip


async def save(client: Client, id: str, folder: Path) -> float:
    """Save the job; return the seconds that it took."""
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        made = await client.checkpoint(id, f"c{id}", str(folder))
        if made.phase == "failed":
            raise RuntimeError(made.reason)
        if made.phase == "done":
            return made.took_s
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} was not saved within {GIVE_UP_S:g} s")


def written_mb_s(folder: Path, mb: float) -> float:
    """Return at which rate this disk takes so many bytes."""
    content, path = os.urandom(int(mb * 1e6)), folder / "floor"
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    took_s = loop.time() - begun_s
    path.unlink()
    return mb / took_s


# Losing -------------------------------------------------------------------------------------------


async def train(
    cluster: EmbeddedCluster, client: Client, folder: Path, epochs: int, how: str, turn: int
) -> list[tuple[int, float]]:
    """Train for half as long again as `epochs`; lose an aggregator one epoch before their end, as
    `how` says. Returns (iteration, loss)."""
    id, out = f"{how}{turn}", folder / f"{how}{turn}.jsonl"
    spec = JobSpec(
        id=id, workers=2, servers=4, iterations=EPOCH * epochs * 3 // 2, aggregation="static",
        update=UpdateRule(name="momentum", learning_rate=0.002),
        program=("python", str(folder / "softmax.py"), str(EPOCH), str(epochs * 3 // 2), str(out)),
    )  # fmt: skip
    if how == "paused":
        period_s = EPOCH * 0.025  # An epoch, roughly: what is lost is up to so old.
        spec = msgspec.structs.replace(spec, save_to=str(folder / id), save_every_s=period_s)
    await client.submit(spec)
    if how != "undisturbed":
        await iterated(client, id, EPOCH * (epochs - 1))
        if how == "paused":
            # The last save before this is not the one of the paused job: that would cost nothing.
            await client.pause(id)
            await until(client, id, "paused")
        pool = [each for each in await client.aggregators() if each.heartbeat]
        homes = [each.record.id for each in pool if each.heartbeat and each.heartbeat.buckets]
        if len(homes) < 4:
            raise RuntimeError(f"{id} has its buckets on {homes} alone")
        victim = f"aggregator-{homes[turn % len(homes)]}"
        cluster.supervisor.drop_fds(victim)
        cluster.supervisor.kill(victim, signal.SIGKILL)
        await cluster.supervisor.until_ready(victim)
        if how == "paused":
            await asyncio.sleep(1.0)
            await client.resume(id)
    await until(client, id, "completed")
    if how != "undisturbed":
        fact = "restored" if how == "paused" else "optimizer-state-recovered"
        print(f"{id}: {await reasons(client, id, fact)}")
    lines = out.read_text().splitlines()
    return [(iteration, loss) for iteration, loss in map(json.loads, lines)]


async def reasons(client: Client, id: str, fact: str) -> str:
    """Return what was told of the loss. Raises RuntimeError where nothing was: none was lost."""
    async with aclosing(client.history.read([subjects.events("job", id, fact)])) as told:
        found = [codec.decode(each.payload, JobEvent).reason async for each in told]
    if not found:
        raise RuntimeError(f"{id}: no fact {fact}; its aggregator kept its memory")
    return "; ".join(found)


def smooth(losses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Take means of five, as batches are drawn: whole data, so little noise is left."""
    values = [loss for _, loss in losses]
    return [
        (iteration, statistics.fmean(values[max(0, at - 2) : at + 3]))
        for at, (iteration, _) in enumerate(losses)
    ]


def rework(
    run: list[tuple[int, float]], undisturbed: list[tuple[int, float]], epochs: int
) -> float:
    """Return in epochs how much later the loss is that of the undisturbed run at their end."""
    end = EPOCH * epochs
    wanted = next(loss for iteration, loss in smooth(undisturbed) if iteration >= end)
    for iteration, loss in smooth(run):
        if iteration > end - EPOCH and loss <= wanted:
            return (iteration - end) / EPOCH
    return float("inf")


async def losses(
    cluster: EmbeddedCluster, client: Client, folder: Path, epochs: int, rounds: int
) -> list[Row]:
    found: dict[str, list[float]] = {"killed": [], "paused": []}
    for turn in range(rounds):
        alone = await train(cluster, client, folder, epochs, "undisturbed", turn)
        for how, reworks in found.items():
            run = await train(cluster, client, folder, epochs, how, turn)
            reworks.append(rework(run, alone, epochs))
    names = {
        "killed": "an aggregator of four lost while it trains",
        "paused": "the same while the job is paused, from its checkpoint",
    }
    return [
        Figure(
            f"{names[how]}, after epoch {epochs - 1} of {epochs}: rework",
            statistics.median(reworks), float(epochs - 1), "epochs", "a restart from the begin",
            1.0 / (epochs - 1), lower_is_better=True,
        )
        for how, reworks in found.items()
    ]  # fmt: skip


async def measure(rounds: int, mb: float, epochs: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="slw-") as name:
        folder = Path(name)
        (folder / "steps.py").write_text(STEPS)
        (folder / "softmax.py").write_text(SOFTMAX)
        async with (
            EmbeddedCluster(ClusterOptions(controllers=1, aggregators=2)) as cluster,
            connect(cluster.url) as client,
        ):
            rows = await pause(client, folder, mb, rounds)
        async with (
            EmbeddedCluster(ClusterOptions(controllers=1, aggregators=4)) as cluster,
            connect(cluster.url) as client,
        ):
            return rows + await losses(cluster, client, folder, epochs, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.rounds, options.mb, options.epochs))
    show(f"jobs that are saved, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
