"""The memory of an aggregator, minus an empty one's, over the bytes of the parameters it holds.

The protocol keeps two parameter buffers and one gradient slot a worker (so that a kill, a NaN or a
migration applies nothing in part), and of each optimiser state two buffers. The bound is therefore
(2 + W + 2 states) times the parameters. The aggregator is the real process in a real cluster, its
memory what is resident (shared memory that it maps included); an empty one holds a tensor
of 16 numbers, so that its kernels are loaded.

    python benchmarks/aggregator_memory.py [--models alexnet vgg19] [--workers 2]
        [--rules sgd momentum adam] [--json FILE]
"""

import argparse
import sys
import time
from pathlib import Path

import psutil
from aggregation import Member, cluster
from figures import Figure, Row, Skipped, show, write_json

from slackwater.agent import Agent
from slackwater.common.domains.slots.rules import RULES
from slackwater.loadgen import models
from slackwater.schemas.tensors import UpdateRule

SETTLE_S = 20.0
"""A job that ended is dropped within this."""


def worker(url: str, job: str, model: str, rank: int, workers: int, rule: str) -> None:
    """One iteration, so that every page is used; then it waits for the end of its stdin."""
    shapes = {"few": (16,)}
    if model != "few":
        shapes = {spec.name: spec.shape for spec in models.tensors(model)}
    with Agent(
        url=url, job=job, rank=rank, workers=workers, tensors=shapes,
        update=UpdateRule(name=rule), transport="shm",  # type: ignore[arg-type]
    ) as agent:  # fmt: skip
        for name in shapes:
            agent.gradient_buffer(name)
            agent.push(name)
        agent.wait()
        print("ready", flush=True)
        sys.stdin.read()


def aggregator() -> psutil.Process:
    (found,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if "slackwater.services.aggregator" in process.cmdline()
    )
    return found


def resident(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def emptied(process: psutil.Process, below: int) -> int:
    """Resident bytes once the last job's memory is given back, or SETTLE_S have passed."""
    until_s = time.monotonic() + SETTLE_S
    while resident(process) > below and time.monotonic() < until_s:
        time.sleep(0.1)
    return resident(process)


def hold(url: str, job: str, model: str, workers: int, rule: str) -> int:
    """The aggregator's resident bytes while it holds the job."""
    me = [sys.executable, __file__, "--member", url, job, model]
    members = [Member([*me, str(rank), str(workers), rule]) for rank in range(workers)]
    for member in members:
        member.hear()
    held = resident(aggregator())
    for member in members:
        member.end()
    return held


def measure(url: str, model: str, workers: int, rule: str) -> Row:
    nbytes = 4 * models.parameters(models.tensors(model))
    bound = 2 + workers + 2 * RULES[rule].states
    label = f"{model}, {rule}, W={workers}: memory over parameters"
    free = psutil.virtual_memory().available
    if bound * nbytes > 0.7 * free:
        why = f"needs {bound * nbytes / 1e9:.0f} GB of {free / 1e9:.0f} GB free memory"
        return Skipped(label, why)
    process = aggregator()
    hold(url, f"warm-{model}-{workers}-{rule}", "few", workers, rule)
    empty = resident(process)
    held = hold(url, f"mem-{model}-{rule}", model, workers, rule)
    emptied(process, below=empty + nbytes // 2)
    return Figure(label, (held - empty) / nbytes, float(bound), "x", "the bound", 1.02, True)


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        url, job, model, rank, workers, rule = sys.argv[2:8]
        worker(url, job, model, int(rank), int(workers), rule)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["alexnet", "vgg19"])
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--rules", nargs="+", default=["sgd", "momentum", "adam"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with cluster() as url:
        rows = [
            measure(url, model, workers, rule)
            for model in options.models
            for workers in options.workers
            for rule in options.rules
        ]
    show("memory of an aggregator, minus an empty one's", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/aggregator_memory.py", rows)


if __name__ == "__main__":
    main()
