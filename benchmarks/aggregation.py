"""Synchronous aggregation + SGD with momentum against gloo and against the naive servers.

One float32 tensor, W workers and one aggregator on this host. Ours is the whole system: the real
services as processes, its slot protocol, Agents in processes of their own; the aggregator's share
is the machine's cores, so nothing is stretched. Peers (aggregation_peers.py): gloo all_reduce, the
same and torch's fused SGD, gloo reduce + broadcast through one server process, and the simplest
servers in Python, which only sum. All are alive at once and take turns; a turn is several
iterations back to back, its figure the tensor's bytes / time of one iteration; medians over turns.

The floor of shared memory is the bytes that must move (W gradients, the parameters and momentum
read and written; twice the gradients more where they are copied in) at the rate at which one core's
np.add moves its own; that of TCP is 2 W tensors at the rate of a bare socket to a peer.

The PyTorch binding takes part, too, where this interpreter has torch: against gloo and torch's SGD.

    python benchmarks/aggregation.py [--megabytes 1 25 100 400] [--workers 2 4] [--rounds 7]
        [--transports shm tcp] [--torch-python PYTHON] [--json FILE]

`--torch-python`: an interpreter that has torch, where this one has not.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from figures import Figure, Row, Skipped, favour, show, spread, write_json

from slackwater.agent import Agent
from slackwater.common.domains.slots.folding import replay
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.schemas.tensors import UpdateRule

PEERS = Path(__file__).with_name("aggregation_peers.py")
RULE = UpdateRule(name="momentum", learning_rate=1e-4, momentum=0.9)
GRADIENT = 0.5
NICE = -15
"""The nice value of all contenders: the machine may be busy with other things."""
TURN_S = 0.4
"""A turn has as many iterations as fit this at 1 GB/s, at least three."""
COPIES = {"shm": 17, "tcp": 12}
"""Tensors that a worker's share of all contenders takes, about; what must be free."""


class Member:
    """A process that does what it is told, a line at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{self.process.args} ended")
        return line

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            self.process.stdout.close()


@dataclass(frozen=True)
class Contender:
    """`modes`: what its members know, by the name of the measurement."""

    members: list[Member]
    modes: dict[str, str]

    def turn(self, mode: str, repetitions: int) -> float:
        """Seconds of one iteration."""
        for member in self.members:
            member.tell(f"{mode} {repetitions}")
        spans = [[float(word) for word in member.hear().split()] for member in self.members]
        return (max(end for _, end in spans) - min(begin for begin, _ in spans)) / repetitions


# Ours ---------------------------------------------------------------------------------------------


def worker(transport: str, url: str, job: str, rank: int, workers: int, elements: int) -> None:
    """A member: a training program that computes nothing."""
    iterations = 0
    with Agent(
        url=url, job=job, rank=rank, workers=workers, tensors={"w": (elements,)},
        update=RULE, transport=transport,
    ) as agent:  # fmt: skip
        gradient = np.full(elements, GRADIENT, np.float32)
        agent.push("w", gradient)
        agent.wait()
        print("ready", flush=True)
        for line in sys.stdin:
            mode, repetitions = line.split()
            begun_s = time.perf_counter()
            for _ in range(int(repetitions)):
                if mode == "copy":
                    agent.push("w", gradient)
                else:
                    agent.gradient_buffer("w")
                    agent.push("w")
                agent.wait()
            print(f"{begun_s!r} {time.perf_counter()!r}", flush=True)
        iterations = agent.iteration
        ours = agent.pull("w")[:: max(1, elements // 64)]
        one = np.full(1, GRADIENT, np.float32)
        expected = replay(RULE, "float32", np.zeros(1, np.float32), [[one] * workers] * iterations)
        assert (ours == expected).all(), (ours, expected)


def torch_worker(url: str, job: str, rank: int, workers: int, elements: int) -> None:
    """The same in PyTorch: an optimiser that is wrapped, `step` and wait. The gradient is the
    program's own tensor, which the binding copies, or one that lies in the region."""
    import torch

    import slackwater.torch

    torch.set_num_threads(1)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(elements))
    wrapped = torch.optim.SGD(model.parameters(), lr=RULE.learning_rate, momentum=RULE.momentum)
    optimizer = slackwater.torch.Optimizer(
        wrapped, model, overlap=False, wait="step", url=url, job=job, rank=rank,
        workers=workers, transport="shm",
    )  # fmt: skip
    gradient = torch.full((elements,), GRADIENT)

    def iterate(mode: str) -> None:
        if mode == "copy":
            model.w.grad = gradient
        else:
            model.w.grad = torch.from_numpy(optimizer.agent.gradient_buffer("w"))
        optimizer.step()

    iterate("copy")
    print("ready", flush=True)
    for line in sys.stdin:
        mode, repetitions = line.split()
        begun_s = time.perf_counter()
        for _ in range(int(repetitions)):
            iterate(mode)
        print(f"{begun_s!r} {time.perf_counter()!r}", flush=True)
    iterations = optimizer.iteration
    ours = model.w.detach()[:: max(1, elements // 64)].numpy().copy()
    optimizer.close()
    one = np.full(1, GRADIENT, np.float32)
    expected = replay(RULE, "float32", np.zeros(1, np.float32), [[one] * workers] * iterations)
    assert (ours == expected).all(), (ours, expected)


# The processes ------------------------------------------------------------------------------------


class Field:
    """Starts the contenders of one (transport, W, size), and ends them."""

    def __init__(self, url: str, torch_python: str, stack: ExitStack) -> None:
        self._url, self._torch = url, torch_python
        self._stack = stack
        self._number = 0

    def _members(self, commands: list[list[str]]) -> list[Member]:
        members = []
        for command in commands:
            members.append(Member(command))
            self._stack.callback(members[-1].end)
        return members

    def ours(self, transport: str, workers: int, elements: int) -> Contender:
        job = f"bench-{transport}-{workers}-{elements}"
        me = [sys.executable, __file__, "--member", transport, self._url, job]
        members = self._members(
            [[*me, str(rank), str(workers), str(elements)] for rank in range(workers)]
        )
        modes = {"in region": "inplace", "copied in": "copy"}
        return self._ready(members, modes if transport == "shm" else {"tcp": "inplace"})

    def binding(self, workers: int, elements: int) -> Contender:
        """The PyTorch binding, in this interpreter."""
        me = [sys.executable, __file__, "--torch-member", self._url, f"torch-{workers}-{elements}"]
        members = self._members(
            [[*me, str(rank), str(workers), str(elements)] for rank in range(workers)]
        )
        modes = {"slackwater.torch, in region": "inplace", "slackwater.torch, copied in": "copy"}
        return self._ready(members, modes)

    def naive(self, kind: str, workers: int, elements: int) -> Contender:
        folder = self._folder()
        peer = [sys.executable, str(PEERS)]
        tail = [folder, "{rank}", str(workers), str(elements)]
        server = subprocess.Popen(
            [*peer, f"{kind}-server", *(word.format(rank=0) for word in tail)]
        )
        self._stack.callback(_reap, server)
        members = self._members(
            [
                [*peer, f"{kind}-worker", *(word.format(rank=rank) for word in tail)]
                for rank in range(workers)
            ]
        )
        modes = {"naive, in region": "inplace", "naive, copied in": "copy"}
        return self._ready(members, modes if kind == "shm" else {"naive tcp": "copy"})

    def gloo(self, kind: str, workers: int, elements: int) -> Contender:
        peer = [self._torch, str(PEERS), "gloo", self._folder()]
        members = self._members(
            [[*peer, str(rank), str(workers), str(elements)] for rank in range(workers + 1)]
        )
        if kind == "shm":
            modes = {"gloo": "allreduce", "gloo + SGD": "sgd"}
        else:
            modes = {"gloo": "allreduce", "gloo through a server": "server"}
        return self._ready(members, modes)

    def _ready(self, members: list[Member], modes: dict[str, str]) -> Contender:
        for member in members:
            assert member.hear() == "ready"
        return Contender(members, modes)

    def _folder(self) -> str:
        return self._stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))


def _reap(server: "subprocess.Popen[bytes]") -> None:
    """Wait for the server, which ends when its workers have."""
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


# Floors -------------------------------------------------------------------------------------------


def adding_rate(nbytes: int) -> Callable[[], float]:
    left, right, total = (np.ones(nbytes // 4, np.float32) for _ in range(3))

    def measure() -> float:
        begun_s = time.perf_counter()
        np.add(left, right, out=total)
        return 3 * total.nbytes / (time.perf_counter() - begun_s)

    return measure


@contextmanager
def socket_rate(nbytes: int) -> Iterator[Callable[[], float]]:
    """Bytes per second of one bare TCP connection to another process."""
    script = (
        "import socket, sys\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "n = int(sys.argv[2]); b = memoryview(bytearray(n))\n"
        "while True:\n"
        "    g = 0\n"
        "    while g < n:\n"
        "        k = s.recv_into(b[g:g + (1 << 20)])\n"
        "        if not k: sys.exit()\n"
        "        g += k\n"
        "    s.send(b'k')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        peer = subprocess.Popen([sys.executable, "-c", script, port, str(nbytes)])
        with listener.accept()[0] as sock:
            data = memoryview(bytearray(nbytes))
            data[::4096] = bytes(len(data[::4096]))

            def measure() -> float:
                begun_s = time.perf_counter()
                sock.sendall(data)
                sock.recv(1)
                return nbytes / (time.perf_counter() - begun_s)

            yield measure
        peer.wait(10)


# The race -----------------------------------------------------------------------------------------

Rates = dict[str, list[float]]


def race(
    contenders: list[Contender], floor: Callable[[], float], nbytes: int, rounds: int
) -> Rates:
    """GB/s of one worker's tensor, by measurement; `floor`: bytes per second."""
    repetitions = max(3, int(TURN_S * 1e9 / nbytes))
    favour(NICE)
    rates: Rates = {"floor": []}
    for turn in range(rounds + 1):
        rate = statistics.median(floor() for _ in range(3))
        if turn:
            rates["floor"].append(rate / 1e9)
        for contender in contenders:
            for name, mode in contender.modes.items():
                taken_s = contender.turn(mode, repetitions if turn else 2)
                if turn:  # The first one warms up.
                    rates.setdefault(name, []).append(nbytes / taken_s / 1e9)
    return rates


def compare_shm(rates: Rates, label: str, workers: int, megabytes: int) -> list[Row]:
    goals: dict[str, dict[str, float | None]] = {
        "in region": {"gloo": 2.5, "gloo + SGD": 3.0, "naive, in region": 0.7},
        "copied in": {"gloo": 1.5, "gloo + SGD": 2.0, "naive, copied in": 0.7},
    }
    streams = {"in region": workers + 4, "copied in": 3 * workers + 4}
    rows: list[Row] = []
    for mine, peers in goals.items():
        floor = statistics.median(rates["floor"]) / streams[mine]
        for peer, goal in peers.items():
            if megabytes == 1:
                goal = 1.0 if peer == "gloo" else None
            rows.append(_row(rates, f"{label}, {mine}", mine, peer, goal, floor))
        binding = f"slackwater.torch, {mine}"
        goal = None if megabytes == 1 else peers["gloo + SGD"]
        if binding in rates:
            rows.append(_row(rates, f"{label}, {binding}", binding, "gloo + SGD", goal, floor))
        else:
            rows.append(Skipped(f"{label}, {binding}", "no torch here"))
    return rows


def compare_tcp(rates: Rates, label: str, workers: int, megabytes: int) -> list[Row]:
    goals: dict[str, float | None] = {
        "gloo through a server": 1.2, "gloo": None, "naive tcp": 0.9,
    }  # fmt: skip
    if megabytes == 1:
        goals = {"gloo through a server": 1.0, "gloo": 1.0, "naive tcp": None}
    floor = statistics.median(rates["floor"]) / (2 * workers)
    return [_row(rates, label, "tcp", peer, goal, floor) for peer, goal in goals.items()]


def _row(rates: Rates, name: str, mine: str, peer: str, goal: float | None, floor: float) -> Row:
    if peer not in rates:
        return Skipped(f"{name} against {peer}", "no torch: give --torch-python")
    return Figure(
        name,
        statistics.median(rates[mine]),
        statistics.median(rates[peer]),
        "GB/s",
        peer,
        goal,
        floor=floor,
        spread=spread(rates[mine]),
    )


def run_one(field_of: Callable[[ExitStack], Field], options: argparse.Namespace,
            kind: str, workers: int, megabytes: int) -> list[Row]:  # fmt: skip
    nbytes = megabytes * 1_000_000
    label = f"{kind}, W={workers}, {megabytes} MB"
    need = COPIES[kind] * workers * nbytes
    free = psutil.virtual_memory().available
    if need > 0.7 * free:
        return [Skipped(label, f"needs {need / 1e9:.0f} GB of {free / 1e9:.0f} GB free memory")]
    with ExitStack() as stack:
        field = field_of(stack)
        contenders = [field.ours(kind, workers, nbytes // 4)]
        contenders.append(field.naive(kind, workers, nbytes // 4))
        if kind == "shm" and has_torch(sys.executable):
            contenders.append(field.binding(workers, nbytes // 4))
        if has_torch(options.torch_python):
            contenders.append(field.gloo(kind, workers, nbytes // 4))
        if kind == "shm":
            floor = adding_rate(nbytes)
            return compare_shm(
                race(contenders, floor, nbytes, options.rounds), label, workers, megabytes
            )
        floor = stack.enter_context(socket_rate(nbytes))
        rates = race(contenders, floor, nbytes, options.rounds)
        return compare_tcp(rates, label, workers, megabytes)


def has_torch(python: str) -> bool:
    found = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    return found.returncode == 0


@contextmanager
def cluster(aggregators: int = 1) -> Iterator[str]:
    """A whole system; its URL. It lives in a thread, the race in this one."""
    options = ClusterOptions(
        controllers=1,
        aggregators=aggregators,
        aggregator={"cpu_share": float(os.cpu_count() or 1)},
    )
    url: list[str] = []
    up, over = threading.Event(), threading.Event()

    async def live() -> None:
        try:
            async with EmbeddedCluster(options) as started:
                url.append(started.url)
                up.set()
                await asyncio.to_thread(over.wait)
        finally:
            up.set()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    up.wait()
    if not url:
        raise RuntimeError("the cluster did not start")
    try:
        yield url[0]
    finally:
        over.set()
        thread.join()


def main() -> None:
    if sys.argv[1:2] == ["--member"]:
        transport, url, job, rank, workers, elements = sys.argv[2:8]
        worker(transport, url, job, int(rank), int(workers), int(elements))
        return
    if sys.argv[1:2] == ["--torch-member"]:
        url, job, rank, workers, elements = sys.argv[2:7]
        torch_worker(url, job, int(rank), int(workers), int(elements))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 25, 100, 400])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with cluster(aggregators=2) as url:  # The binding's job has one of its own.
        for kind in options.transports:
            for workers in options.workers:
                for megabytes in options.megabytes:
                    got = run_one(
                        lambda stack: Field(url, options.torch_python, stack),
                        options, kind, workers, megabytes,
                    )  # fmt: skip
                    show(f"{kind}, {workers} workers, {megabytes} MB", got)
                    rows += got
    if options.json is not None:
        kinds = " ".join(options.transports)
        write_json(options.json, f"python benchmarks/aggregation.py --transports {kinds}", rows)


if __name__ == "__main__":
    main()
