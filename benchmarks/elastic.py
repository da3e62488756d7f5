"""Measure what virtual ranks cost: seconds of an iteration and memory, with them and without.

Two workers train a network with slackwater.torch.Optimizer, and with slackwater.torch.Elastic with
as many virtual ranks as workers (V = W) and twice as many (V = 2W), in turns on one cluster. At
V = 2W a worker computes two micro-batches: beside it stands Optimizer with two backward passes,
which does the same work. Told are the median seconds of an iteration, and the peak resident memory
of a worker: mapped regions count in it, which have a slot for each virtual rank.

    python benchmarks/elastic.py [--rounds 5] [--mb 4 25]

Needs torch. Goal: an iteration takes at most 1.1 of the time without.
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
from slackwater.schemas.jobs import JobSpec

WORKERS = 2
GOAL = 1.1
GIVE_UP_S = 120.0
LOOK_S = 0.1
ITERATIONS = 60
WARM = 10
"""Iterations at the begin that are not counted."""
PROGRAM = """
import json, resource, sys, time, torch
from torch.nn import functional
import slackwater.torch
kind, virtual, passes, mb, iterations, folder = sys.argv[1:7]
virtual, passes, iterations = int(virtual), int(passes), int(iterations)
torch.set_num_threads(1)
torch.manual_seed(1)
width = int((float(mb) * 2**18 / 4) ** 0.5)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)])
inner = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
inputs = torch.randn(32, width)
lasted = []

def backward():
    functional.mse_loss(model(inputs), inputs).backward()

if kind == "elastic":
    optimizer = slackwater.torch.Elastic(inner, model, virtual_ranks=virtual, folder=folder)
    for _ in optimizer.iterations(iterations):
        begun = time.perf_counter()
        for _ in optimizer.ranks():
            backward()
        optimizer.step()
        lasted.append(time.perf_counter() - begun)
else:
    optimizer = slackwater.torch.Optimizer(inner, model, backward_passes_per_step=passes)
    for _ in range(iterations):
        begun = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(passes):
            backward()
        optimizer.step()
        lasted.append(time.perf_counter() - begun)
optimizer.synchronize()
kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
optimizer.close({"s": lasted[WARM:], "bytes": 1024 * kb})
"""


async def run(
    client: Client, folder: Path, id: str, kind: str, virtual: int, passes: int, mb: float
) -> tuple[float, int]:
    """Train once; return the median seconds of an iteration, and rank 0's peak memory."""
    program = folder / "train.py"
    program.write_text(PROGRAM.replace("WARM", str(WARM)))
    words = (kind, virtual, passes, mb, ITERATIONS, folder / id)
    spec = JobSpec(
        id=id, workers=WORKERS, iterations=ITERATIONS,
        program=("python", str(program), *map(str, words)),
    )  # fmt: skip
    await client.submit(spec)
    for _ in range(int(GIVE_UP_S / LOOK_S)):
        record = await client.job(id)
        if record.state in TERMINAL_STATES:
            if record.state != "completed":
                raise RuntimeError(f"{id}: {record.reason}")
            found = json.loads(record.results["0"])
            return statistics.median(found["s"]), found["bytes"]
        await asyncio.sleep(LOOK_S)
    raise RuntimeError(f"{id} did not end within {GIVE_UP_S:g} s")


CASES = {
    "V = W": (("elastic", WORKERS, 1), ("optimizer", 0, 1)),
    "V = 2W": (("elastic", 2 * WORKERS, 1), ("optimizer", 0, 2)),
}
"""Name -> (kind, virtual ranks, backward passes) of ours and of what stands beside it."""


async def compare(client: Client, folder: Path, mb: float, rounds: int) -> list[Row]:
    """Run each case and its peer in turns."""
    rows: list[Row] = []
    for number, (name, pair) in enumerate(CASES.items()):
        times: tuple[list[float], list[float]] = ([], [])
        memory: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                id = f"e{number}-{mb:g}-{turn}-{which}"
                seconds, nbytes = await run(client, folder, id, *pair[which], mb)
                times[which].append(seconds)
                memory[which].append(nbytes / 2**20)
        ratios = tuple(a / b for a, b in zip(*times, strict=True))
        rows.append(
            Figure(
                f"{mb:g} MB, {name}: an iteration", statistics.median(times[0]),
                statistics.median(times[1]), "s", "Optimizer, the same work", GOAL,
                lower_is_better=True, spread=spread(times[0]), ratios=ratios,
            )
        )  # fmt: skip
        rows.append(
            Figure(
                f"{mb:g} MB, {name}: a worker's peak memory, regions mapped",
                statistics.median(memory[0]), statistics.median(memory[1]), "MiB",
                "Optimizer, the same work", lower_is_better=True,
            )
        )  # fmt: skip
    return rows


async def measure(rounds: int, sizes_mb: list[float]) -> list[Row]:
    options = ClusterOptions(controllers=1, aggregators=1, transport="auto")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="slw-") as folder:
        async with EmbeddedCluster(options) as cluster, connect(cluster.url) as client:
            for mb in sizes_mb:
                rows += await compare(client, Path(folder), mb, rounds)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=float, nargs="+", default=[4.0, 25.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.rounds, options.mb))
    show(f"virtual ranks beside ranks, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
