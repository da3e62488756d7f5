"""Early layers first over tcp, against first come, first served.

A worker that emulates VGG19 and an aggregator are on machines of their own (network namespaces),
with shaped links; large tensors are divided into buckets. The worker waits for a layer's parameters
before that layer's forward pass, and pushes its gradients after its backward pass. Both orders take
turns, a few iterations each, in one process and on one placement. At 3 % of VGG19's bytes transfers
take longer than computing; at 1 % they hide behind it, and the order makes no difference.

    python benchmarks/layer_order.py [--rate-mbit 160] [--rounds 8] [--json FILE] [--logs FOLDER]
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import network_budget
from figures import Figure, Row, show, spread, write_json
from namespaces import Machine, in_a_namespace, machines

from slackwater.agent import Agent
from slackwater.agent.gate import Gate
from slackwater.loadgen.emulate import Emulation, iterate

MODEL = "vgg19"
BYTES_SCALE = 0.03
COMPUTE_S = 0.5
DIVIDE_BYTES = 131_072
ITERATIONS = 4


class AsTheyCome(Gate):
    """First come, first served."""

    async def _wait(self, rank: int) -> None:
        await super()._wait(0)


def worker(url: str, job: str) -> None:
    """`open`, `go ITERATIONS` (early layers first), `in-order ITERATIONS`."""
    emulation = Emulation(MODEL, BYTES_SCALE)
    agent: Agent | None = None
    print("ready", flush=True)
    for line in sys.stdin:
        if line.startswith("open"):
            shapes = {spec.name: spec.shape for spec in emulation.tensors}
            agent = Agent(
                url=url, job=job, rank=0, workers=1, servers=1, tensors=shapes, transport="tcp",
                fractional_share=True,
            )  # fmt: skip
            print("opened", flush=True)
            continue
        assert agent is not None
        order, count = line.split()[0], int(line.split()[1])
        session: Any = agent._session
        session._transfers._gate = (AsTheyCome if order == "in-order" else Gate)(
            4
        )  # Nothing is under way.
        begun_s = time.perf_counter()
        for _ in range(count):
            iterate(emulation, agent, COMPUTE_S, lambda tensor, buffer: None)
        agent.wait()
        print(f"{(time.perf_counter() - begun_s) / count:.6f}", flush=True)
    if agent is not None:
        agent.close()


async def run(options: argparse.Namespace, hosts: dict[str, Machine]) -> list[Row]:
    where = {"a1": ("host1", 8 * 2**30)}
    first: list[float] = []
    in_order: list[float] = []
    async with network_budget.cluster(options, hosts, where, 0, DIVIDE_BYTES) as stack:
        stack.program = __file__
        await stack.begin("j", "worker0")
        member = stack.members["j"]
        for turn in range(options.rounds):
            pair = [("go", first), ("in-order", in_order)]
            for order, found in pair if turn % 2 else reversed(pair):
                member.tell(f"{order} {ITERATIONS}")
                found.append(float(await asyncio.to_thread(member.hear)))
    return [
        Figure(
            "an iteration of VGG19, early layers first",
            statistics.median(first),
            statistics.median(in_order),
            "s",
            "first come, first served",
            lower_is_better=True,
            floor=COMPUTE_S,
            spread=spread(first),
            ratios=tuple(a / b for a, b in zip(first, in_order, strict=True)),
        )
    ]


def inside(options: argparse.Namespace) -> None:
    with ExitStack() as held:
        hosts = held.enter_context(machines(options.rate_mbit, "host1", "worker0"))
        rows = asyncio.run(run(options, hosts))
    show(f"links of {options.rate_mbit} Mbit/s, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/layer_order.py", rows)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--worker"]:
        worker(arguments[1], arguments[2])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate-mbit", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="where the services' logs are kept")
    options = parser.parse_args(arguments)
    return in_a_namespace(arguments, lambda: inside(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
