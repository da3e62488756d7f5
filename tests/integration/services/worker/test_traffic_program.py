"""Jobs that nobody adapted are watched by what they really send over loopback: parameter servers by
calls and by packets' pauses, DDP by gloo's headers. The truth is what their programs say. A test
lasts for 20 iterations of a tenth of a second, and the import of torch."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slackwater.common.native.sockets import ports
from slackwater.services.worker.traffic_talk import Able, Finding, Orders, Target

JOBS = Path(__file__).with_name("traffic_jobs.py")
SIZES = [8_220_836, 1_342_176, 327_680, *[188_740] * 4, 94_368, 47_184, *[20_000] * 3]
"""Bytes, skewed as VGG19's tensors are."""
SKEW = max(SIZES) / sum(SIZES)
WAIT_S = 90.0
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="packets and calls need root")


class Program:
    """The watching process, as its worker service has it."""

    def __init__(self, without: str = "") -> None:
        # A class that cannot be opened stands in for a privilege that lacks.
        told = f"import slackwater.services.worker.traffic_program as p\n{without}\np.main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", told], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.able = msgspec.json.decode(self._line(), type=Able)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def watch(self, pid: int, workers: int) -> None:
        target = Target("job", frozenset([pid]), frozenset(ports([pid])), workers)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Orders((target,))) + b"\n")
        self._process.stdin.flush()

    def finding(self) -> Finding:
        return msgspec.json.decode(self._line(), type=Finding)

    def uid(self) -> int:
        return os.stat(f"/proc/{self._process.pid}").st_uid

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(WAIT_S) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


NO_CALLS = "def no(): raise p.Unavailable('no calls')\np.SendCalls = no"
NO_PACKETS = "def no(): raise p.Unavailable('no packets')\np.PacketRing = no"


@contextlib.contextmanager
def watching(without: str = "") -> Iterator[Program]:
    program = Program(without)
    try:
        yield program
    finally:
        program.close()


@contextlib.contextmanager
def processes(*commands: list[str], env: list[dict[str, str]] | None = None) -> Iterator[list[int]]:
    started = [
        subprocess.Popen(
            [sys.executable, str(JOBS), *command], stderr=subprocess.DEVNULL,
            env={**os.environ, **(env[number] if env else {})},
        )
        for number, command in enumerate(commands)
    ]  # fmt: skip
    try:
        yield [each.pid for each in started]
    finally:
        for each in started:
            each.send_signal(signal.SIGKILL)
            each.wait()


@contextlib.contextmanager
def parameter_servers(folder: Path) -> Iterator[int]:
    """Two workers, two servers; yield the first worker's process once it trains."""
    sizes = ",".join(map(str, SIZES))
    common = [f"{folder}/address", sizes, "2"]
    roles = [("worker", "0"), ("worker", "1"), ("server", "0"), ("server", "1")]
    commands = [[role, *common, number, "2", "100000"] for role, number in roles]
    with processes(*commands) as pids:
        until_s = time.monotonic() + WAIT_S
        while len(ports(pids[:1])) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.1)
        yield pids[0]


def test_calls_say_every_tensor(tmp_path: Path) -> None:
    with parameter_servers(tmp_path) as worker, watching() as program:
        assert program.able == Able()
        program.watch(worker, 2)
        traffic = program.finding().traffic
        assert program.uid() == 65534
    assert (traffic.by, traffic.kind) == ("calls", "tensors")
    assert list(traffic.sizes_bytes) == sorted(SIZES, reverse=True)
    assert traffic.bytes_per_iteration == sum(SIZES)
    assert traffic.skew == pytest.approx(SKEW, abs=0.005)
    assert traffic.iterations >= 20
    assert traffic.iteration_s > 0.1


def test_pauses_say_iterations_bytes_and_skew(tmp_path: Path) -> None:
    with parameter_servers(tmp_path) as worker, watching(NO_CALLS) as program:
        assert program.able == Able(calls="no calls")
        program.watch(worker, 2)
        traffic = program.finding().traffic
    assert (traffic.by, traffic.kind) == ("pauses", "messages")
    assert traffic.bytes_per_iteration == pytest.approx(sum(SIZES), rel=1e-3)
    assert SKEW - 0.08 <= traffic.skew <= SKEW + 0.005
    assert not traffic.windows
    assert traffic.dropped == 0


def test_calls_do_without_packets(tmp_path: Path) -> None:
    with parameter_servers(tmp_path) as worker, watching(NO_PACKETS) as program:
        assert program.able == Able(packets="no packets")
        program.watch(worker, 2)
        traffic = program.finding().traffic
    assert (traffic.by, list(traffic.sizes_bytes)) == ("calls", sorted(SIZES, reverse=True))


def test_a_program_that_may_watch_nothing_says_why_and_ends() -> None:
    with watching(f"{NO_CALLS}\n{NO_PACKETS}") as program:
        assert program.able == Able("no packets", "no calls")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_buckets_of_ddp_are_those_that_it_reduces(tmp_path: Path, workers: int) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes, out = ",".join(map(str, SIZES)), tmp_path / "ddp.json"
    environments = [
        {
            "RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        for rank in range(workers)
    ]  # fmt: skip
    command = ["ddp", sizes, "100000", str(out)]
    with processes(*[command] * workers, env=environments) as pids, watching() as program:
        until_s = time.monotonic() + WAIT_S
        while not out.exists() or len(json.loads(out.read_text())["began"]) < 3:
            assert time.monotonic() < until_s
            time.sleep(0.2)
        program.watch(pids[0], workers)
        traffic = program.finding().traffic
        buckets = json.loads(out.read_text())["buckets"]
    assert (traffic.by, traffic.kind) == ("gloo", "buckets")
    exact = 0 if workers == 2 else 4 * workers
    assert list(traffic.sizes_bytes) == pytest.approx(sorted(buckets, reverse=True), abs=exact)
    assert traffic.skew == pytest.approx(max(buckets) / sum(buckets), abs=1e-4)
    assert traffic.bytes_per_iteration == pytest.approx(sum(SIZES), rel=1e-3)
    assert traffic.iterations >= 20
