"""How exactly jobs that nobody adapted are understood by watching them, beside what they know.

Two workers and two parameter servers on plain sockets, and two ranks of DistributedDataParallel
over gloo, on loopback, while every core is kept busy by others. In each run iterations and bytes
are compared with the program's own, the share of the largest tensor by send calls and by pauses
between packets, and DDP's buckets by gloo's headers. Models are skewed as VGG19 is, and even as
ResNet50 is, in turns.

    python benchmarks/watched_jobs.py [--runs 10] [--json FILE]            (as root; torch)
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from figures import Figure, show, this_command, write_json

from slackwater.common.domains.traffic.estimate import estimate
from slackwater.common.domains.traffic.gloo import GlooStream, all_reduced
from slackwater.common.domains.traffic.recurring import Recurrence, flow_of, recurrence
from slackwater.common.domains.traffic.repeated import repeated
from slackwater.common.native.packet_ring import HEADERS_BYTES, WHOLE_BYTES, PacketRing
from slackwater.common.native.send_calls import SendCalls, mount_tracefs
from slackwater.common.native.sockets import ports
from slackwater.schemas.traffic import SIZES_MAX
from slackwater.services.master.scheduling.policies.placement import PACK_LIMIT

JOBS = Path(__file__).parents[1] / "tests/integration/services/worker/traffic_jobs.py"
MODELS = {
    "skewed": [20_552_088, 3_355_440, 819_200, *[471_856] * 8, 235_928, 117_964, 58_980],
    "even": [*[471_856] * 3, *[209_714] * 30, *[52_428] * 20],
}
ITERATIONS, WARM, REDUCED = 16, 4, 12
"""Iterations that are watched, after the first, and those in which gloo's headers are read."""
LONGEST_S = 90.0
BUSY = "while True: pass"


class Truth:
    """Reads how a job describes itself."""

    def __init__(self, out: Path, sizes: list[int]) -> None:
        self._out = out
        self.total, self.skew = sum(sizes), max(sizes) / sum(sizes)

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._out.read_text()) if self._out.exists() else {}
        return found

    def began(self) -> list[float]:
        return list(self.read().get("began", ()))


def until(ready: Callable[[], bool], each: Callable[[], object]) -> None:
    """Do `each` until it is ready."""
    deadline_s = time.monotonic() + LONGEST_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not done within {LONGEST_S:g} s")
        each()


@contextmanager
def started(commands: list[list[str]], envs: list[dict[str, str]]) -> Iterator[list[int]]:
    with ExitStack() as stack:
        found = []
        for command, env in zip(commands, envs, strict=True):
            process = subprocess.Popen(command, env=os.environ | env, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append(process.pid)
        yield found


def recurring(ring: PacketRing, own: set[int], begin_s: float, end_s: float) -> list[Recurrence]:
    """Find the flows' iterations between two instants of the monotonic clock."""
    ahead_s = time.clock_gettime(time.CLOCK_REALTIME) - time.monotonic()
    begin_ns, end_ns = (int((at_s + ahead_s) * 1e9) for at_s in (begin_s, end_s))
    bursts, found = ring.bursts(), []
    within = bursts[(bursts[:, 0] >= begin_ns) & (bursts[:, 1] < end_ns)]
    for number, ends in ring.flows().items():
        rows = within[within[:, 2] == number]
        if ends.source_port in own and len(rows) and (one := recurrence(flow_of(rows))):
            found.append(one)
    return found


def parameter_servers(ring: PacketRing, calls: SendCalls, sizes: list[int]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="slw-") as folder:
        address, script = f"{folder}/address", [sys.executable, str(JOBS)]
        common = [address, ",".join(map(str, sizes)), "2"]
        last = ["2", str(WARM + ITERATIONS)]
        commands = [
            [*script, role, *common, number, *last]
            for role in ("worker", "server")
            for number in "01"
        ]
        truth = Truth(Path(f"{address}.worker0"), sizes)
        sent: dict[int, list[int]] = defaultdict(list)

        def look() -> None:
            ring.read(0.05)
            for call in calls.read():
                if call.pid == pids[0]:
                    sent[call.socket].append(call.nbytes)

        with started(commands, [{}] * 4) as pids:
            until(lambda: len(ports(pids[:1])) == 2, lambda: time.sleep(0.01))
            own = ports(pids[:1])
            ring.clear()
            ring.choose(HEADERS_BYTES, sorted(own))
            calls.enable()
            until(lambda: bool(truth.began()), look)
            ring.read(0.2)
            calls.disable()
            ring.choose(0, ())
        began = truth.began()
    flows = recurring(ring, own, began[WARM], began[-1])
    packets, by_calls = estimate(flows, {}, ()), estimate(flows, sent, ())
    assert packets is not None
    assert by_calls is not None
    counted = by_calls.sizes == len(sizes)
    counted &= list(by_calls.sizes_bytes) == sorted(sizes, reverse=True)[:SIZES_MAX]
    return {
        "iterations": max(abs(flow.iterations - ITERATIONS) for flow in flows),
        "bytes": abs(packets.bytes_per_iteration / truth.total - 1),
        "skew by calls": abs(by_calls.skew - truth.skew) if by_calls.by == "calls" else 1.0,
        "tensors by calls": float(not counted or by_calls.by != "calls"),
        "skew by pauses": abs(packets.skew - truth.skew),
        "side of PackLimit": float((packets.skew > PACK_LIMIT) != (truth.skew > PACK_LIMIT)),
    }


def ddp(ring: PacketRing, sizes: list[int]) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="slw-") as folder:
        truth = Truth(Path(folder) / "ddp.json", sizes)
        command = [sys.executable, str(JOBS), "ddp", ",".join(map(str, sizes)), "10000"]
        envs = [
            {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            for rank in range(2)
        ]  # fmt: skip
        with started([[*command, str(Path(folder) / "ddp.json")]] * 2, envs) as pids:
            until(lambda: len(truth.began()) >= WARM, lambda: time.sleep(0.02))
            own = ports(pids[:1])
            ring.clear()
            ring.choose(HEADERS_BYTES, sorted(own))
            first = len(truth.began()) + 1
            until(lambda: len(truth.began()) > first + ITERATIONS, lambda: ring.read(0.05))
            began = truth.began()
            flows = recurring(ring, own, began[first], began[first + ITERATIONS])
            streams: dict[Any, GlooStream] = defaultdict(GlooStream)

            def take() -> None:
                for each in ring.segments(0.05):
                    streams[each.endpoints].feed(each.ns, each.seq, each.payload)

            ring.choose(WHOLE_BYTES, sorted(own))
            last = len(truth.began()) + REDUCED
            until(lambda: len(truth.began()) > last, take)
            ring.choose(0, ())
            buckets = truth.read()["buckets"]
    messages = [each for stream in streams.values() for each in stream.messages]
    reduced = repeated(all_reduced(messages, 2))
    largest = max(flows, key=lambda flow: flow.nbytes)
    equal = reduced is not None and Counter(reduced.sizes) == Counter(buckets)
    return {
        "iterations": abs(largest.iterations - ITERATIONS),
        "bytes": abs(largest.nbytes / truth.total - 1),
        "buckets": float(not equal),
        "taken for a parameter server": float(not largest.both_ways),
    }


GOALS = {
    "iterations": (0.01, "off"), "bytes": (1e-3, "off"), "skew by calls": (0.005, "off"),
    "tensors by calls": (0.0, "runs not equal"), "skew by pauses": (0.08, "off"),
    "side of PackLimit": (0.0, "runs wrong"), "buckets": (0.0, "runs not equal"),
    "taken for a parameter server": (0.0, "runs"),
}  # fmt: skip


def figures(job: str, runs: list[dict[str, float]]) -> Iterator[Figure]:
    for name in runs[0]:
        goal, unit = GOALS[name]
        values = [run[name] for run in runs]
        counted = unit.startswith("runs")
        found = sum(values) if counted else max(values)
        text = (
            f"{job}, {name}: the worst of {len(runs)} runs (median {statistics.median(values):.2g})"
        )
        if counted:
            text = f"{job}, {name}: of {len(runs)} runs"
        # A limit of 0 has no ratio: half of one run stands in for it.
        limit = goal or 0.5
        yield Figure(text, found, limit, unit, "limit", 1.0, lower_is_better=True)


def measure(runs: int) -> list[Figure]:
    mount_tracefs()
    ring, calls = PacketRing(socket.if_nametoindex("lo")), SendCalls()
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    cores = len(os.sched_getaffinity(0))
    busy = [["/usr/bin/nice", "-n", "5", sys.executable, "-c", BUSY]] * cores
    with started(busy, [{}] * cores):
        for run in range(runs):
            sizes = list(MODELS.values())[run % len(MODELS)]
            found["parameter servers"].append(parameter_servers(ring, calls, sizes))
            found["DDP"].append(ddp(ring, sizes))
            print(run, {job: one[-1] for job, one in found.items()}, flush=True)
    print(f"{ring.count_dropped()} packets dropped, {calls.lost} calls lost")
    return [figure for job, one in found.items() for figure in figures(job, one)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if os.geteuid():
        print("packets and send calls need root", file=sys.stderr)
        return 1
    found = measure(options.runs)
    show("Jobs understood by watching", found)
    if options.json:
        write_json(options.json, this_command(), found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
