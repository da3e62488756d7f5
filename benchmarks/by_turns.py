"""Jobs that share two machines by turns, beside the same without an order, and one after another.

Two elastic programs have a host on each of two machines, an unadapted DistributedDataParallel job
has two processes on one of them, and all have their parameters in aggregators on a third. Every
machine is a network namespace of its own on one bridge, and sends through a shaped link. Computing
is emulated: each machine has one processor, a lock, which whoever computes holds for slices of
5 ms, as a system's scheduler would deal them. So transfers, Python and services do not take what
jobs compute with, as on machines with cores to spare for them. Jobs compute, and move what they
computed, for about as long; all train for a set number of iterations.

*By turns*: all at once (Lee 2020, section 4.3.1). *Without an order*: the same, on nodes that give
permits to whoever asks. *One after another*: each alone. Compared is the time until all have ended.
Eq. 4.1 says how long an iteration of the group takes, out of the seconds that each job, alone,
holds the permits of the slower machine.

    python benchmarks/by_turns.py [--rate-mbit 60] [--iterations 40] [--rounds 2] [--json FILE]
        [--picture FILE] [--logs FOLDER]
"""

import argparse
import asyncio
import contextlib
import fcntl
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from emulated_cluster import HOST, NODE, cluster
from figures import Figure, Row, Skipped, show, spread, write_json
from namespaces import Machine, in_a_namespace, machines

from slackwater.common.base import codec
from slackwater.common.base.errors import Rejected
from slackwater.common.bus.base import Delivery
from slackwater.common.domains.models.group import Subtasks, group_iteration_s
from slackwater.common.native import blas_threads
from slackwater.common.shell.client import Client
from slackwater.schemas.gpus import NodeAllocation
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.telemetry import IterationsObserved

NODES = ("w1", "w2")
GIVE_UP_S = 150.0
SAMPLE_S = 0.25
LOOK_S = 0.007
"""Seconds between two looks at a processor, not a multiple of its slices."""
GAIN_GOAL = 1.15
MODEL_GOAL = 1.05
PROCESSOR = """
import fcntl, os, sys, time

_processor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)


def compute(seconds):
    while seconds > 0:
        fcntl.flock(_processor, fcntl.LOCK_EX)
        begun_s = time.perf_counter()
        time.sleep(min(0.005, seconds))
        seconds -= time.perf_counter() - begun_s
        fcntl.flock(_processor, fcntl.LOCK_UN)
        time.sleep(0.0001)  # Else nobody else has it.
"""
ELASTIC = """
import numpy as np
from slackwater import elastic
from slackwater.elastic import Bsp, Table

rows, iterations = map(int, sys.argv[3:])


class Shared(elastic.App):
    executors = 4
    tables = {"w": Table(rows, 1000)}
    driver = Bsp(iterations)

    class Executor(elastic.Executor):
        def run(self, ctx, task):
            values = ctx.get("w")
            compute(float(sys.argv[2]))
            ctx.update("w", np.full(values.shape, 1e-3, np.float32))
            return float(values[0, 0])


elastic.launch(Shared())
"""
DDP = """
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

width, iterations = map(int, sys.argv[3:])
torch.set_num_threads(1)
distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(),
                                              nn.Linear(width, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(16, width), torch.randint(0, 10, (16,))
for iteration in range(iterations):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    compute(float(sys.argv[2]))
    loss.backward()
    optimizer.step()
print("loss", float(loss))
distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class Kind:
    """A job: its program, and what that is given: the size of its table or model, and the seconds
    that a task, or a process's iteration, computes."""

    name: str
    program: str
    size: int
    computes_s: float
    consistency: str


KINDS = (
    Kind("factors", ELASTIC, 1000, 0.3, "asynchronous"),
    Kind("topics", ELASTIC, 700, 0.2, "asynchronous"),
    Kind("network", DDP, 600, 0.2, "synchronous"),
)


@dataclass
class Sample:
    """The use of both machines at one instant: parts of a processor, and of a link."""

    at_s: float
    cpu: float
    link: float


@dataclass
class Outcome:
    """One way of running the jobs."""

    took_s: float = 0.0
    each_s: dict[str, float] = field(default_factory=dict)
    """Job -> seconds from its submission to its end."""
    iteration_s: dict[str, float] = field(default_factory=dict)
    """While all of its jobs iterated."""
    subtasks: dict[str, dict[str, Subtasks]] = field(default_factory=dict)
    """By job and machine."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def used(self) -> tuple[float, float]:
        """Means of both resources while the jobs ran."""
        cpu = statistics.fmean(each.cpu for each in self.samples)
        return cpu, statistics.fmean(each.link for each in self.samples)


class Sampler:
    """Looks at both machines' processors and links, in a thread of its own."""

    def __init__(self, rate_mbit: int, folder: Path) -> None:
        self._bytes_s = rate_mbit * 125_000
        self._processors = [
            os.open(processor(folder, node), os.O_RDWR | os.O_CREAT) for node in NODES
        ]
        self._end = threading.Event()
        self.samples: list[Sample] = []

    def _look(self) -> None:
        begun_s = before_s = time.monotonic()
        carried, looks, busy = self._carried(), 0, 0
        while not self._end.wait(LOOK_S):
            busy += sum(map(_is_held, self._processors))
            looks += len(NODES)
            if (now_s := time.monotonic()) - before_s < SAMPLE_S:
                continue
            now = self._carried()
            moved = (now - carried) / (now_s - before_s) / len(NODES) / self._bytes_s
            self.samples.append(Sample(now_s - begun_s, busy / looks, moved))
            carried, before_s, looks, busy = now, now_s, 0, 0

    @staticmethod
    def _carried() -> int:
        """Return the bytes that have left both machines, as their bridge sees them."""
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        return sum(counters[name].bytes_recv for name in NODES)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[list[Sample]]:
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield self.samples
        finally:
            self._end.set()
            thread.join()
            for each in self._processors:
                os.close(each)


def processor(folder: Path, node: str) -> str:
    """Return the file that is the machine's processor."""
    return str(folder / f"processor-{node}")


def _is_held(file: int) -> bool:
    """Say whether somebody computes."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


class Stack:
    """A cluster on emulated machines."""

    def __init__(self, client: Client, folder: Path, options: argparse.Namespace) -> None:
        self.client, self.folder, self.options = client, folder, options
        self.number = 0
        self.observed: dict[str, dict[int, list[IterationsObserved]]] = {}

    async def watch(self) -> None:
        async def take(delivery: Delivery) -> None:
            with contextlib.suppress(Rejected):  # Telemetry of another kind.
                said = codec.decode(delivery.payload, IterationsObserved)
                self.observed.setdefault(said.job, {}).setdefault(said.rank, []).append(said)

        await self.client.bus.subscribe("sw.v1.tel.job.*.iterations", take)

    def spec(self, kind: Kind) -> JobSpec:
        self.number += 1
        path = self.folder / f"{kind.name}.py"
        path.write_text(PROCESSOR + kind.program)
        at = f"{self.folder}/processor-${NODE}"
        given = map(str, (kind.computes_s, kind.size, self.options.iterations))
        return JobSpec(
            id=f"{kind.name}-{self.number}", workers=len(NODES), by_turns=True,
            program=("/bin/sh", "-c", f'exec {sys.executable} {path} {at} {" ".join(given)}'),
            iterations=self.options.iterations,
            consistency=kind.consistency, fractional_share=True,  # type: ignore[arg-type]
            env=blas_threads.one_each({}), checkpoint=str(self.folder / f"{self.number}"),
        )  # fmt: skip

    async def run(self, kinds: Sequence[Kind]) -> Outcome:
        """Run them at once."""
        found = Outcome()
        specs = {kind.name: self.spec(kind) for kind in kinds}
        with Sampler(self.options.rate_mbit, self.folder).sampling() as found.samples:
            begun_s = time.monotonic()
            for spec in specs.values():
                await self.client.submit(spec)
            seen: dict[str, list[tuple[float, int]]] = {name: [] for name in specs}
            living, ran_on = dict(specs), dict[str, NodeAllocation]()
            while living:
                await asyncio.sleep(0.2)
                if len(living) == len(specs):
                    await self._look(specs, seen)
                for name, spec in tuple(living.items()):
                    record = await self.client.job(spec.id)
                    if record.state in ("failed", "cancelled"):
                        raise RuntimeError(f"{spec.id} {record.state}: {record.reason}")
                    if record.state == "completed":
                        ran_on[name] = record.allocation or record.ran_on
                        found.each_s[name] = time.monotonic() - begun_s
                        del living[name]
                if time.monotonic() - begun_s > GIVE_UP_S:
                    raise RuntimeError(
                        f"{name} is {record.state} after {GIVE_UP_S:g} s: {record.reason}"
                    )
            found.took_s = time.monotonic() - begun_s
        await asyncio.sleep(1.5)  # For the last reports.
        for name, spec in specs.items():
            nodes = [node for node, count in ran_on[name] for _ in range(count)]
            (first_s, first), (last_s, last) = seen[name][0], seen[name][-1]
            found.iteration_s[name] = (last_s - first_s) / max(1, last - first)
            self._read(found, name, self.observed.get(spec.id, {}), nodes)
        return found

    def _read(
        self, found: Outcome, name: str, said: dict[int, list[IterationsObserved]],
        nodes: Sequence[str],
    ) -> None:  # fmt: skip
        iterations, sums = self.options.iterations, dict[str, list[float]]()
        for rank, reports in said.items():
            on_node = sums.setdefault(nodes[rank], [0.0, 0.0])
            on_node[0] += sum(each.subtasks.compute_s for each in reports) / iterations
            on_node[1] += sum(each.subtasks.move_s for each in reports) / iterations
        found.subtasks[name] = {
            node: Subtasks(max(cpu_s, 1e-6), max(move_s, 1e-6), 1)
            for node, (cpu_s, move_s) in sums.items()
        }

    async def _look(
        self, specs: dict[str, JobSpec], seen: dict[str, list[tuple[float, int]]]
    ) -> None:
        """Note how far all jobs are, once each of them iterates."""
        told = {
            name: (await self.client.job_info(spec.id)).progress for name, spec in specs.items()
        }
        now_s = time.monotonic()
        if all(each is not None and each.iteration >= 2 for each in told.values()):
            for name, progress in told.items():
                assert progress is not None
                seen[name].append((now_s, progress.iteration))


@contextlib.asynccontextmanager
async def stack_of(
    options: argparse.Namespace, hosts: dict[str, Machine], folder: Path, permits: int
) -> AsyncIterator[Stack]:
    """`permits`: of each kind, on each node."""
    fields = {
        "slots": len(KINDS) + 1, "network_bytes_s": options.rate_mbit * 125_000,
        "computing": permits, "moving": permits,
    }  # fmt: skip
    workers = dict.fromkeys(NODES, fields)
    async with cluster(hosts, workers, options.logs, aggregators=len(KINDS)) as client:
        stack = Stack(client, folder, options)
        await stack.watch()
        yield stack


async def run(options: argparse.Namespace, hosts: dict[str, Machine]) -> list[Row]:
    kinds = [each for each in KINDS if each.program is not DDP or _has_torch()]
    turns: list[Outcome] = []
    together: list[Outcome] = []
    alone: list[dict[str, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="sw-turns-") as made:
        for number in range(options.rounds):
            folder = Path(made) / str(number)
            folder.mkdir()
            async with stack_of(options, hosts, folder, 1) as stack:
                alone.append({kind.name: await stack.run([kind]) for kind in kinds})
                turns.append(await stack.run(kinds))
            async with stack_of(options, hosts, folder, 64) as stack:
                stack.number = 100
                together.append(await stack.run(kinds))
            report(alone[-1], turns[-1], together[-1])
    if options.picture is not None:
        draw(options.picture, alone[-1], turns[-1], together[-1])
    rows: list[Row] = [] if len(kinds) == len(KINDS) else [
        Skipped("a DistributedDataParallel job", "torch is not here")
    ]  # fmt: skip
    return [*rows, *judged(alone, turns, together)]


def judged(
    alone: list[dict[str, Outcome]], turns: list[Outcome], together: list[Outcome]
) -> list[Row]:
    apart_s = [sum(each.took_s for each in round_.values()) for round_ in alone]
    ours_s = [each.took_s for each in turns]
    foretold_s = [foretold(round_) for round_ in alone]
    group_s = [max(each.iteration_s.values()) for each in turns]
    apart = one_after_another(alone[-1])
    return [
        Figure(
            "three jobs on two machines by turns: until all have ended",
            statistics.median(ours_s), statistics.median(t.took_s for t in together), "s",
            "without an order", goal=1.0 / GAIN_GOAL, lower_is_better=True,
            spread=spread(ours_s),
            ratios=tuple(a / b.took_s for a, b in zip(ours_s, together, strict=True)),
        ),
        Figure(
            "the same", statistics.median(ours_s), statistics.median(apart_s), "s",
            "one after another", lower_is_better=True,
            ratios=tuple(a / b for a, b in zip(ours_s, apart_s, strict=True)),
        ),
        Figure(
            "an iteration of the group", statistics.median(group_s),
            statistics.median(foretold_s), "s", "eq. 4.1", goal=MODEL_GOAL, lower_is_better=True,
            ratios=tuple(a / b for a, b in zip(group_s, foretold_s, strict=True)),
        ),
        *(
            Figure(f"{what} in use by turns", 100 * turns[-1].used[at], 100 * apart[at], "%",
                   "one after another")
            for at, what in enumerate(("processors", "links"))
        ),
    ]  # fmt: skip


def one_after_another(alone: dict[str, Outcome]) -> tuple[float, float]:
    return Outcome(samples=[s for each in alone.values() for s in each.samples]).used


def foretold(alone: dict[str, Outcome]) -> float:
    """Return eq. 4.1 of the machine where it takes longest."""
    on_nodes = [
        [each.subtasks[name][node] for name, each in alone.items() if node in each.subtasks[name]]
        for node in NODES
    ]
    return max(group_iteration_s(jobs, 1) for jobs in on_nodes if jobs)


def report(alone: dict[str, Outcome], turns: Outcome, together: Outcome) -> None:
    for name, each in alone.items():
        parts = "; ".join(
            f"on {node} computes {1e3 * job.cpu_s:.0f} ms, moves {1e3 * job.network_s:.0f} ms"
            for node, job in sorted(each.subtasks[name].items())
        )
        took_ms = 1e3 * each.iteration_s[name]
        print(f"{name}: alone {each.took_s:.1f} s, {took_ms:.0f} ms an iteration: {parts}")
    for what, each in (("by turns", turns), ("without an order", together)):
        cpu, link = each.used
        ended = ", ".join(f"{name} {s:.1f} s" for name, s in each.each_s.items())
        print(f"{what}: {ended}; processors {cpu:.0%}, links {link:.0%}", flush=True)


def draw(path: Path, alone: dict[str, Outcome], turns: Outcome, together: Outcome) -> None:
    """Both resources over time, a panel for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    apart, offset_s = list[Sample](), 0.0
    for each in alone.values():
        apart += [Sample(s.at_s + offset_s, s.cpu, s.link) for s in each.samples]
        offset_s += each.took_s
    panels = (
        ("by turns", turns.samples), ("all at once, without an order", together.samples),
        ("one after another", apart),
    )  # fmt: skip
    longest_s = max(samples[-1].at_s for _, samples in panels)
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 7), sharex=True, sharey=True)
    for axis, (name, samples) in zip(axes, panels, strict=True):
        for label, values in (
            ("processors", [s.cpu for s in samples]), ("links", [s.link for s in samples]),
        ):  # fmt: skip
            smooth = [statistics.fmean(values[max(0, i - 3) : i + 4]) for i in range(len(values))]
            axis.plot([s.at_s for s in samples], [100 * v for v in smooth], label=label)
        axis.set_title(f"{name}: {samples[-1].at_s:.0f} s", loc="left", fontsize=10)
        axis.set_ylim(0, 105)
        axis.set_xlim(0, longest_s)
        axis.set_ylabel("% in use")
    axes[0].legend(loc="upper right")
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _has_torch() -> bool:
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

        return True
    return False


def inside(options: argparse.Namespace) -> None:
    with machines(options.rate_mbit, HOST, *NODES) as hosts:
        wide = f"htb rate {20 * options.rate_mbit}mbit ceil {20 * options.rate_mbit}mbit"
        for parent, which in (("1:", "1:1"), ("1:1", "1:10")):
            hosts[HOST].tc(f"class change dev nic parent {parent} classid {which} {wide}")
        rows = asyncio.run(run(options, hosts))
    show(f"links of {options.rate_mbit} Mbit/s, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/by_turns.py", rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate-mbit", type=int, default=60)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--logs", type=Path, help="where the services' logs are kept")
    options = parser.parse_args(arguments)
    os.environ.update(blas_threads.one_each(os.environ))
    return in_a_namespace(arguments, lambda: inside(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
