"""Measure an unadapted DistributedDataParallel script: aggregators add its gradients up, or gloo.

A job of two ranks trains a stack of linear layers, a short iteration over many parameters, so that
the exchange is most of it. It is run again and again, in turns: with DDP's communication hook whose
buckets the aggregators add up, on plain DDP over gloo, and with the three-line wrapper
(`slackwater.torch.Optimizer`), whose optimiser runs in the aggregators, too, or with
aggregate="gradients" in the script. Told is the median iteration of rank 0 after the first five.

    python benchmarks/ddp.py [--rounds 5] [--mb 4 25 100]

Needs torch. Goal: gloo's seconds over ours at least .9 on one host.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path
from typing import Final

from figures import Row, paired, show, this_command, write_json

from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.job_states import TERMINAL_STATES
from slackwater.schemas.jobs import JobSpec

GOAL: Final = 1 / 0.9
WAYS: Final = ("hook", "gloo", "wrapper", "gradients")
MODEL = """
import os, statistics, time, torch
torch.set_num_threads(1)
torch.manual_seed(1)
width = int((float(os.environ["MODEL_MB"]) * 1e6 / 4 / 8) ** 0.5)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
inputs = torch.randn(4, width)
"""
LOOP = """
seconds = []
for _ in range(int(os.environ["ITERATIONS"])):
    begun_s = time.perf_counter()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    WAIT
    seconds.append(time.perf_counter() - begun_s)
if os.environ["SLACKWATER_RANK"] == "0":
    open(os.environ["TELL"], "w").write(str(statistics.median(seconds[5:])))
"""
DDP = (
    MODEL
    + """
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
"""
    + LOOP.replace("WAIT", "pass")
)
WRAPPER = (
    MODEL
    + """
import slackwater.torch
optimizer = slackwater.torch.Optimizer(optimizer, model)
"""
    + LOOP.replace("WAIT", "optimizer.synchronize()")
)
GRADIENTS = WRAPPER.replace("optimizer, model)", 'optimizer, model, aggregate="gradients")')


async def run(client: Client, folder: Path, way: str, megabytes: str, number: int) -> float:
    """Return the median seconds of an iteration."""
    tell = folder / f"{way}-{megabytes}-{number}"
    script = f"{way}.py" if way in ("wrapper", "gradients") else "ddp.py"
    iterations = 25 if float(megabytes) > 50 else 60
    spec = JobSpec(
        id=tell.name.replace(".", "-"), workers=2, program=("python", str(folder / script)),
        aggregate="off" if way == "gloo" else "on",
        env={"MODEL_MB": megabytes, "TELL": str(tell), "ITERATIONS": str(iterations)},
    )  # fmt: skip
    await client.submit(spec)
    async with asyncio.timeout(300):
        while (record := await client.job(spec.id)).state not in TERMINAL_STATES:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    if record.state != "completed":
        raise SystemExit(f"{spec.id} {record.state}: {record.reason}")
    return float(tell.read_text())


async def measure(megabytes: str, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ddp.py").write_text(DDP)
        (folder / "wrapper.py").write_text(WRAPPER)
        (folder / "gradients.py").write_text(GRADIENTS)
        made = ClusterOptions(controllers=1, aggregators=1, worker={"warm": "on"})
        async with EmbeddedCluster(made) as cluster, connect(cluster.url) as client:
            for number in range(rounds):
                for way in WAYS:
                    found[way].append(await run(client, folder, way, megabytes, number))
    return found


def rows_of(megabytes: str, found: dict[str, list[float]]) -> list[Row]:
    name = f"{megabytes} MB, an iteration"
    alone, gloo = found["gradients"], found["gloo"]
    return [
        paired(f"{name} of gradients", alone, gloo, "s", "gloo", GOAL, lower_is_better=True),
        paired(name, found["hook"], found["gloo"], "s", "gloo", GOAL, lower_is_better=True),
        paired(name, found["hook"], found["wrapper"], "s", "wrapper", None, lower_is_better=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", nargs="+", default=["4", "25", "100"], help="Megabytes of it.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[Row] = []
    for megabytes in options.mb:
        measured = asyncio.run(measure(megabytes, options.rounds))
        found += rows_of(megabytes, measured)
        medians = {way: statistics.median(each) for way, each in measured.items()}
        show(f"{megabytes} MB so far: {medians}", found[-3:])
    show(f"DistributedDataParallel, load {os.getloadavg()[0]:.1f}", found)
    if options.json is not None:
        write_json(options.json, this_command(), found)
    if any(row.met is False for row in found if hasattr(row, "met")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
