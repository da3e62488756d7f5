"""An iteration of a network's true tensor list against one tensor of the same bytes.

BERT-large has 393 tensors, ResNet152 467, most of them small: neighbours share buckets
(slots/layout.py). Two workers push every tensor and wait; gradients are produced in the region or
copied in; plain SGD. Both jobs live in one cluster, on an aggregator each, and take turns; the
median over turns.

    python benchmarks/tensor_lists.py [--models bert-large resnet152] [--bytes-scale 1]
        [--rounds 7] [--json FILE]
"""

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from aggregation import NICE, Contender, Member, cluster
from figures import Figure, Row, Skipped, favour, show, spread, write_json

from slackwater.agent import Agent
from slackwater.loadgen import models

WORKERS = 2
GOAL = 1.25
REPETITIONS = 3


def worker(url: str, job: str, tensors: str, rank: int) -> None:
    """`tensors`: a network's name and scale, or a number of elements."""
    if tensors.isdecimal():
        shapes: dict[str, Any] = {"all": (int(tensors),)}
    else:
        model, scale = tensors.split("*")
        shapes = {spec.name: spec.shape for spec in models.tensors(model, float(scale))}
    with Agent(
        url=url, job=job, rank=rank, workers=WORKERS, tensors=shapes, transport="shm"
    ) as agent:
        gradients = {name: np.full(shape, 1e-3, np.float32) for name, shape in shapes.items()}
        backwards = list(reversed(gradients))
        print("ready", flush=True)
        for line in sys.stdin:
            mode, repetitions = line.split()
            begun_s = time.perf_counter()
            for _ in range(int(repetitions)):
                for name in backwards:
                    if mode == "copy":
                        agent.push(name, gradients[name])
                    else:
                        agent.gradient_buffer(name)
                        agent.push(name)
                agent.wait()
            print(f"{begun_s!r} {time.perf_counter()!r}", flush=True)


def contender(url: str, job: str, tensors: str, stack: ExitStack) -> Contender:
    me = [sys.executable, __file__, "--member", url, job, tensors]
    members = [Member([*me, str(rank)]) for rank in range(WORKERS)]
    for member in members:
        stack.callback(member.end)
        member.hear()
    return Contender(members, {"in region": "inplace", "copied in": "copy"})


def measure(url: str, model: str, scale: float, rounds: int) -> list[Row]:
    specs = models.tensors(model, scale)
    elements = models.parameters(specs)
    need = 2 * (2 + 2 * WORKERS) * 4 * elements
    free = psutil.virtual_memory().available
    part = "" if scale == 1.0 else f" scaled by {scale:g}"
    label = f"{model}{part}, {len(specs)} tensors, {4 * elements / 1e6:.0f} MB"
    if need > 0.8 * free:
        return [Skipped(label, f"needs {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free memory")]
    with ExitStack() as stack:
        many = contender(url, f"list-{model}", f"{model}*{scale}", stack)
        one = contender(url, f"one-{model}", str(elements), stack)
        favour(NICE)
        taken: dict[tuple[str, str], list[float]] = {}
        for turn in range(rounds + 1):
            for mode in many.modes:
                for kind, who in (("many", many), ("one", one)):
                    turn_s = who.turn(many.modes[mode], REPETITIONS if turn else 1)
                    if turn:
                        taken.setdefault((mode, kind), []).append(turn_s * 1e3)
    return [
        Figure(
            f"{label}, {mode}", statistics.median(taken[mode, "many"]),
            statistics.median(taken[mode, "one"]), "ms", "one tensor", GOAL, True,
            spread=spread(taken[mode, "many"]),
        )
        for mode in many.modes
    ]  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        url, job, tensors, rank = sys.argv[2:6]
        worker(url, job, tensors, int(rank))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert-large", "resnet152"])
    parser.add_argument("--bytes-scale", type=float, default=1.0, help="part of each tensor kept")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with cluster(aggregators=2) as url:
        for model in options.models:
            rows += measure(url, model, options.bytes_scale, options.rounds)
    show("true tensor lists", rows)
    if options.json is not None:
        command = f"python benchmarks/tensor_lists.py --models {' '.join(options.models)}"
        write_json(options.json, command, rows)


if __name__ == "__main__":
    main()
