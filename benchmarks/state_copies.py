"""Measure what workers' copies of the optimiser's states cost: an iteration with them and without.

Two workers push and pull over tcp, Adam, a plain Agent each that computes nothing, so that the
copies have no pause to hide in; the same job in turns with `state_copies` 20, its default, and 0.

    python benchmarks/state_copies.py [--rounds 5] [--mb 4 25]

Goal: an iteration takes at most 1.1 of the time without. The floor by bytes is 1.025: two states,
halved between the workers, in 20 iterations, beside a push and a pull.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path

from figures import Figure, Row, show, spread, this_command, write_json

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import STATE_COPIES, JobSpec
from slackwater.schemas.tensors import UpdateRule

GOAL = 1.1
GIVE_UP_S = 120.0
LOOK_S = 0.1
PROGRAM = """
import sys, time
import numpy as np
from slackwater import Agent
elements, iterations = map(int, sys.argv[1:])
agent = Agent(tensors={"w": (elements,)}, transport="tcp", deadline_s=100.0)
ones = np.ones(elements, np.float32)
lasted = []
for _ in range(iterations):
    begun_s = time.perf_counter()
    agent.step({"w": ones})
    lasted.append(time.perf_counter() - begun_s)
agent.close(sorted(lasted[20:])[len(lasted[20:]) // 2])
"""


async def run(client: Client, program: Path, id: str, every: int, mb: float) -> float:
    """Return the median seconds of an iteration, without the first 20."""
    iterations = 120 if mb < 10 else 80
    words = (str(int(mb * 2**18)), str(iterations))
    spec = JobSpec(
        id=id, workers=2, iterations=iterations, update=UpdateRule(name="adam"),
        state_copies=every, program=("python", str(program), *words),
    )  # fmt: skip
    await client.submit(spec)
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        record = await client.job(id)
        if record.state in TERMINAL_STATES:
            if record.state != "completed":
                raise RuntimeError(f"{id}: {record.reason}")
            return float(json.loads(record.results["0"]))
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} did not end within {GIVE_UP_S:g} s")


async def compare(client: Client, program: Path, mb: float, rounds: int) -> Row:
    times: dict[int, list[float]] = {STATE_COPIES: [], 0: []}
    for turn in range(rounds):
        for every in sorted(times, reverse=bool(turn % 2)):
            id = f"c{mb:g}-{turn}-{every}"
            times[every].append(await run(client, program, id, every, mb))
    ours, without = times[STATE_COPIES], times[0]
    return Figure(
        f"{mb:g} MB, Adam, tcp: an iteration with copies", statistics.median(ours),
        statistics.median(without), "s", "the same job without", GOAL, lower_is_better=True,
        spread=spread(ours), ratios=tuple(a / b for a, b in zip(ours, without, strict=True)),
    )  # fmt: skip


async def measure(rounds: int, sizes_mb: list[float]) -> list[Row]:
    options = ClusterOptions(controllers=1, aggregators=2, transport="auto")
    with tempfile.TemporaryDirectory(prefix="slw-") as folder:
        program = Path(folder) / "train.py"
        program.write_text(PROGRAM)
        async with EmbeddedCluster(options) as cluster, connect(cluster.url) as client:
            return [await compare(client, program, mb, rounds) for mb in sizes_mb]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, nargs="+", default=[4.0, 25.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.rounds, options.mb))
    show(f"copies of the optimiser's states, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
