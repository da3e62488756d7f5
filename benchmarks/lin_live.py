"""Asynchronous jobs of ours over shaped links, beside plain sockets, against what mean value
analysis says of the four times that an Agent measures with one worker (Lin et al. 2018, III, V-A).

Workers are in a network namespace of their own; the link to it is shaped in both directions (htb).
The border of g (eq. 4) is fitted on one shape and judged on the other. With two servers these are
in namespaces, each behind a link of its own, and the larger one has four times as many bytes; their
parts are what Agents pushed to each.

    python benchmarks/lin_live.py [--workers 2 3 4 5 6] [--shapes 100:2:0.3 50:0.5:0.25]
        [--seconds 20] [--leaf "pfifo limit 1000"] [--control cubic] [--no-peer]
        [--servers 1] [--json FILE]
"""

import argparse
import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from aggregation import Member
from async_reads import units
from figures import Figure, Row, show, write_json
from interference import forward, lent
from namespaces import BURST, HUB, Machine, in_a_namespace, machines, sh

from slackwater.agent import Agent
from slackwater.common.domains.models.asynchronous_speed import profile_of, speeds
from slackwater.common.domains.models.captured_turns import Segment, captured_turns
from slackwater.common.domains.models.queueing import sharing_above
from slackwater.common.embedded import Supervisor
from slackwater.common.shell.client import connect
from slackwater.schemas.steps import StepProfile

PEER_PORT: Final = 4900
TURNS_MIN: Final = 40
MEAN_GOAL, EACH_GOAL, READS_GOAL = 0.10, 0.20, 1.05
BORDERS: Final = (-8.0, -4.0, -2.0, -1.0, -0.5, 0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
"""Borders that the fit tries; `exact` is one below all of them."""
Told = tuple[float, float]
"""Updates a second, and reads an iteration."""


@dataclass(frozen=True)
class Shape:
    rate_mbit: int
    mbytes: float
    compute_s: float

    @classmethod
    def parsed(cls, text: str) -> "Shape":
        rate, mbytes, compute_s = text.split(":")
        return cls(int(rate), float(mbytes), float(compute_s))

    def __str__(self) -> str:
        return f"{self.rate_mbit} Mbit/s, {self.mbytes:g} MB, {self.compute_s:g} s"


@dataclass
class Measured:
    """One system on one shape."""

    system: str
    shape: Shape
    profile: StepProfile
    alone: float
    """X(1), as it was counted."""
    rates: dict[int, float] = field(default_factory=dict)
    reads: dict[int, float] = field(default_factory=dict)

    def errors(self, border: float | None) -> dict[int, float]:
        """Prediction over measurement - 1, by the number of workers. `border`: None for exact."""
        most = max(self.rates)
        if border is None:
            model = speeds(self.profile, most)
        else:
            model = speeds(self.profile, most, "hybrid", sharing_above(border))
        return {k: float(model[k]) / rate - 1.0 for k, rate in self.rates.items()}


def mean_error(measured: Measured, border: float | None) -> float:
    errors = measured.errors(border).values()
    return sum(map(abs, errors)) / len(errors)


def fitted(measured: Measured) -> float | None:
    """Return the border of g that errs least; None: exact does."""
    return min((None, *BORDERS), key=lambda border: mean_error(measured, border))


# Workers ------------------------------------------------------------------------------------------


def turns(once: Callable[[], None], compute_s: float, seconds: float, seed: int) -> float:
    """Compute and exchange for so many seconds; return updates a second. Times vary: equal sleeps
    keep the phases that they begin with."""
    rng = np.random.default_rng(seed)
    time.sleep(float(rng.uniform(0.0, 2.0 * compute_s)))
    once()  # A worker's first exchange is alone on the link.
    done, begun_s = 0, time.monotonic()
    while time.monotonic() - begun_s < seconds:
        time.sleep(compute_s * rng.uniform(0.8, 1.2))
        once()
        done += 1
    return done / (time.monotonic() - begun_s)


def our_worker(url: str, job: str, rank: int, workers: int, shape: Shape, servers: int) -> None:
    """Answer `go SECONDS` with updates a second and reads an iteration."""
    whole = int(shape.mbytes * 1e6 / 4)
    sizes = {"w": (whole,)} if servers == 1 else {"w": (4 * whole // 5,), "v": (whole // 5,)}
    gradients = {name: np.full(shaped, 1e-6, np.float32) for name, shaped in sizes.items()}
    with Agent(
        url=url, job=job, rank=rank, workers=workers, tensors=dict(sizes), servers=servers,
        consistency="asynchronous", transport="tcp", deadline_s=120.0,
    ) as agent:  # fmt: skip
        agent.step(gradients)
        print("ready", flush=True)
        for line in sys.stdin:
            before, first = agent.reads[0], agent.iteration
            rate = turns(
                lambda: agent.step(gradients) and None,
                shape.compute_s,
                float(line.split()[1]),
                rank,
            )
            iterations = agent.iteration - first
            print(rate, (agent.reads[0] - before) / iterations / len(sizes), flush=True)


def peer_worker(address: str, rank: int, shape: Shape) -> None:
    """Answer `go SECONDS` with updates a second and, of rank 0, its segments' arrivals."""
    payload = bytes(int(shape.mbytes * 1e6))
    arrivals: list[tuple[float, int]] = []
    with socket.create_connection((address, PEER_PORT)) as link:
        buffer = bytearray(1 << 18)

        def once() -> None:
            link.sendall(payload)
            left = len(payload)
            while left:
                count = link.recv_into(buffer, min(len(buffer), left))
                if not count:
                    raise ConnectionError("the peer's server ended")
                arrivals.append((time.monotonic(), count))
                left -= count

        print("ready", flush=True)
        for line in sys.stdin:
            arrivals.clear()
            rate = turns(once, shape.compute_s, float(line.split()[1]), rank)
            print(rate, *(f"{at_s:.6f}:{count}" for at_s, count in arrivals), flush=True)


class PeerServer:
    """Plain sockets: take a gradient, add it to the parameters, send these; a thread a worker."""

    def __init__(self, nbytes: int) -> None:
        self.arrivals: list[Segment] = []
        self._parameters = np.zeros(nbytes // 4, np.float32)
        self._nbytes, self._apply = nbytes, threading.Lock()
        self._listener = socket.create_server((HUB, PEER_PORT))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # It ends the wait in accept.
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # It was closed.
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        gradient = bytearray(self._nbytes)
        view = memoryview(gradient)
        with link:
            while True:
                at = 0
                while at < self._nbytes:
                    count = link.recv_into(view[at : at + (1 << 18)])
                    if not count:
                        return
                    self.arrivals.append(Segment(time.monotonic(), False, count))
                    at += count
                with self._apply:
                    self._parameters += np.frombuffer(gradient, np.float32)
                link.sendall(self._parameters.data)


# Measuring ----------------------------------------------------------------------------------------


async def together(commands: Sequence[Sequence[str]], seconds: float) -> list[list[str]]:
    """Run these workers for so many seconds; return what each tells, as words."""
    members = [Member(command) for command in commands]
    try:
        await asyncio.gather(*(asyncio.to_thread(member.hear) for member in members))
        for member in members:
            member.tell(f"go {seconds}")
        told = await asyncio.gather(*(asyncio.to_thread(member.hear) for member in members))
    finally:
        await asyncio.gather(*(asyncio.to_thread(member.end) for member in members))
    return [line.split() for line in told]


def long_enough_s(shape: Shape, seconds: float) -> float:
    """Return seconds in which one worker surely makes the turns of a profile."""
    turn_s = shape.compute_s + 2.2 * shape.mbytes * 8 / shape.rate_mbit
    return max(seconds, (TURNS_MIN + 6) * turn_s)


async def measure_ours(
    url: str, hosts: Sequence[Machine], shape: Shape, options: argparse.Namespace
) -> Measured:
    label = f"lin-{shape.rate_mbit}-{options.servers}"
    host = hosts[0] if options.servers == 1 else None  # With several, workers are where we are.

    async def rate(workers: int, seconds: float) -> Told:
        command = [sys.executable, __file__, "--worker", lent(url), f"{label}-{workers}"]
        all_words = [
            [*command, str(rank), str(workers), *shape_words(shape), str(options.servers)]
            for rank in range(workers)
        ]
        told = await together(
            [host.command(*words) if host else words for words in all_words], seconds
        )
        rates = [float(words[0]) for words in told]
        return sum(rates), sum(float(words[1]) for words in told) / workers

    alone, _ = await rate(1, long_enough_s(shape, options.seconds))
    async with connect(url, "lin-live") as client:
        steps = (await client.job(f"{label}-1")).steps
    assert steps is not None, f"{TURNS_MIN} turns were not reported"
    found = Measured("ours", shape, steps, alone)
    for workers in options.workers:
        found.rates[workers], found.reads[workers] = await rate(workers, options.seconds)
        print(f"{label} K = {workers}: {found.rates[workers]:.3f}/s", flush=True)
    return found


async def measure_peer(host: Machine, shape: Shape, options: argparse.Namespace) -> Measured:
    server = PeerServer(int(shape.mbytes * 1e6))

    async def rate(workers: int, seconds: float) -> list[list[str]]:
        command = [sys.executable, __file__, "--peer", HUB]
        return await together(
            [host.command(*command, str(rank), *shape_words(shape)) for rank in range(workers)],
            seconds,
        )

    try:
        ((alone, *arrivals),) = await rate(1, long_enough_s(shape, options.seconds))
        pairs = (each.split(":") for each in arrivals)
        down = [Segment(float(at_s), True, int(count)) for at_s, count in pairs]
        times = captured_turns(sorted([*server.arrivals, *down]))
        found = Measured("sockets", shape, profile_of(times, 1), float(alone))
        for workers in options.workers:
            told = await rate(workers, options.seconds)
            found.rates[workers] = sum(float(words[0]) for words in told)
            print(f"sockets K = {workers}: {found.rates[workers]:.3f}/s", flush=True)
    finally:
        server.close()
    return found


def shape_words(shape: Shape) -> tuple[str, str, str]:
    return str(shape.rate_mbit), str(shape.mbytes), str(shape.compute_s)


def reshape(host: Machine, rate_mbit: int, leaf: str) -> None:
    """Shape both directions of the workers' link."""
    whole = f"htb rate {rate_mbit}mbit burst {BURST} quantum 60000"
    for run, dev in ((lambda *words: sh(*host.command(*words)), "nic"), (sh, host.name)):
        run("tc", "qdisc", "replace", "dev", dev, "root", "pfifo")
        run("tc", "qdisc", "replace", *f"dev {dev} root handle 1: htb default 10".split())
        run("tc", "class", "add", *f"dev {dev} parent 1: classid 1:10 {whole}".split())
        run("tc", "qdisc", "add", *f"dev {dev} parent 1:10 handle 10: {leaf}".split())


def control(host: Machine, name: str) -> None:
    """Choose TCP's congestion control on both ends: bbr's probing would be part of what is seen."""
    network = f"{HUB.rpartition('.')[0]}.0/24"
    for run, dev, source in (
        (lambda *words: sh(*host.command(*words)), "nic", host.address),
        (sh, "hub", HUB),
    ):
        run("ip", "route", "replace", *f"{network} dev {dev} src {source} congctl {name}".split())


async def run(options: argparse.Namespace, hosts: Sequence[Machine]) -> list[Measured]:
    supervisor = Supervisor()
    found: list[Measured] = []
    try:
        url = await supervisor.start_nats()
        forwarder = await forward(url)
        several = options.servers > 1
        await supervisor.start_units(units(supervisor, hosts if several else ()))
        for shape in options.shapes:
            for host in hosts:
                reshape(host, shape.rate_mbit, options.leaf)
            found.append(await measure_ours(url, hosts, shape, options))
            tell(found[-1], None)
            if options.peer and not several:
                found.append(await measure_peer(hosts[0], shape, options))
                tell(found[-1], None)
        forwarder.close()
    finally:
        await supervisor.stop()
    return found


# Judging ------------------------------------------------------------------------------------------


def judged(found: Sequence[Measured]) -> list[Row]:
    """Print the table; return the figures. The border of g is the other shape's."""
    rows: list[Row] = []
    for measured in found:
        others = [
            each
            for each in found
            if each.system == measured.system and each.shape != measured.shape
        ]
        border = fitted(others[0]) if others else None
        tell(measured, border)
        if measured.system == "ours":
            rows += figures(measured, border)
    return rows


def tell(measured: Measured, border: float | None) -> None:
    """Print what was measured, and how far each method is off. `border`: of another shape's fit."""
    steps = measured.profile
    print(
        f"{measured.system}, {measured.shape}: S_W {steps.worker_s:.4f} S_U "
        f"{steps.uplink_s:.4f} S_S {steps.server_s:.4f} S_D {steps.downlink_s:.4f} "
        f"({steps.turns} turns, shares {[round(share, 3) for share in steps.shares]}); X(1) "
        f"{measured.alone:.3f}, of the times {speeds(steps, 1)[1]:.3f}"
    )
    fit = "exact" if border is None else border
    judges = {"exact": None, "hybrid .8": 0.8, f"fitted elsewhere ({fit})": border}
    for name, of in judges.items():
        errors = measured.errors(of)
        words = " ".join(f"{k}: {100 * error:+.1f} %" for k, error in errors.items())
        print(f"  {name}: {words}; mean {100 * mean_error(measured, of):.1f} %")
    print("  X:", " ".join(f"{k}: {rate:.2f}" for k, rate in measured.rates.items()), flush=True)


def figures(measured: Measured, border: float | None) -> list[Row]:
    name = str(measured.shape)
    worst = max(map(abs, measured.errors(border).values()))
    return [
        Figure(f"{name}: mean error of the model", mean_error(measured, border), 1.0, "part",
               "the measurement", MEAN_GOAL, lower_is_better=True),
        Figure(f"{name}: largest error", worst, 1.0, "part", "the measurement", EACH_GOAL,
               lower_is_better=True),
        Figure(f"{name}: reads an iteration, at most", max(measured.reads.values()), 1.0, "reads",
               "one", READS_GOAL, lower_is_better=True),
    ]  # fmt: skip


def inside(options: argparse.Namespace) -> None:
    names = [f"host{number + 1}" for number in range(options.servers)]
    with machines(options.shapes[0].rate_mbit, *names) as hosts:
        for host in hosts.values():
            control(host, options.control)
        found = asyncio.run(run(options, list(hosts.values())))
    rows = judged(found)
    show(f"Asynchronous jobs and Lin's model, load {os.getloadavg()[0]:.1f}", rows)
    if options.json is not None:
        write_json(options.json, "python benchmarks/lin_live.py", rows)


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["--worker", url, job, rank, workers, rate, mbytes, compute_s, servers]:
            shape = Shape(int(rate), float(mbytes), float(compute_s))
            our_worker(url, job, int(rank), int(workers), shape, int(servers))
            return 0
        case ["--peer", address, rank, rate, mbytes, compute_s]:
            peer_worker(address, int(rank), Shape(int(rate), float(mbytes), float(compute_s)))
            return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3, 4, 5, 6])
    parser.add_argument("--shapes", nargs="+", type=Shape.parsed,
                        default=[Shape(100, 2.0, 0.3), Shape(50, 0.5, 0.25)])  # fmt: skip
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--leaf", default="pfifo limit 1000")
    parser.add_argument("--control", default="cubic")
    parser.add_argument("--servers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    return in_a_namespace(arguments, lambda: inside(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
