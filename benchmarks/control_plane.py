"""The control plane against the bare engine: requests per second of a service's endpoints against a
bare NATS responder, and job submissions made durable per second against bare key-value puts.

`get` goes through the master's core, `health` is answered by the shell alone. The bare responder
answers each with bytes as many as theirs. Both use the same nats-server (`sync_interval: always`),
the same client library and loop, and processes of their own; 64 requests are in flight. The ratio
of the CPU seconds that each process spends a request has no such noise as a rate has. Goals: 0.8 of
the bare responder's rate for `get`, 0.7 for `health` and a median latency of at most 1 / 0.7; 0.8
of the bare puts.

    python benchmarks/control_plane.py [--seconds 1] [--rounds 5]
"""

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import nats
import psutil
import uvloop
from figures import Figure, paired, show, this_command, write_json

from slackwater.common.base import codec
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.client import connect
from slackwater.schemas import subjects
from slackwater.schemas.job_requests import GetJob, SubmitJob
from slackwater.schemas.jobs import JobRecord, JobSpec
from slackwater.schemas.service import GetHealth

IN_FLIGHT = 64
Call = Callable[[int], Awaitable[object]]

BARE_RESPONDER = """
import asyncio, sys, nats, uvloop
answers = {}
async def main():
    nc = await nats.connect(sys.argv[1])
    async def answer(message):
        await message.respond(answers[message.subject])
    async def keep(message):
        answers[message.subject.replace(".keep.", ".bare.")] = message.data
        await message.respond(b"")
    await nc.subscribe("bench.bare.*", cb=answer)
    await nc.subscribe("bench.keep.*", cb=keep)
    await nc.flush()
    print("ready", flush=True)
    await asyncio.sleep(3600)
uvloop.run(main())
"""


@dataclass(frozen=True)
class Measured:
    """One round of one call."""

    rate: float
    """Calls a second."""
    median_s: float
    cpu_s: float
    """CPU seconds of the answering process, a call."""


async def rate(
    call: Call, answering: psutil.Process, seconds: float, in_flight: int = IN_FLIGHT
) -> Measured:
    """Run `in_flight` callers for `seconds`."""
    took: list[float] = []
    before = sum(answering.cpu_times()[:2])
    begin = time.perf_counter()
    end = begin + seconds
    numbers = iter(range(10**9))

    async def caller() -> None:
        while (begin := time.perf_counter()) < end:
            await call(next(numbers))
            took.append(time.perf_counter() - begin)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    passed_s = time.perf_counter() - begin
    cpu_s = sum(answering.cpu_times()[:2]) - before
    return Measured(len(took) / passed_s, statistics.median(took), cpu_s / len(took))


async def compare(
    url: str, master: psutil.Process, bare: psutil.Process, seconds: float, rounds: int
) -> list[Figure]:
    nc = await nats.connect(url)
    js = nc.jetstream()
    kv = await js.create_key_value(bucket="bench")
    spec = JobSpec(id="x", program=("python", "-c", "pass"), model="vgg19")
    record = codec.encode_record(JobRecord(spec=spec), epoch=1)
    stamp = time.monotonic_ns()
    submissions = itertools.count()
    asked = {"get": codec.encode(GetJob(job=f"b{stamp}")), "health": codec.encode(GetHealth())}

    async def ask(subject: str, payload: bytes) -> bytes:
        answer: bytes = (await nc.request(subject, payload, timeout=30)).data
        return answer

    def of_master(verb: str) -> str:
        return subjects.command("master", subjects.MASTER, verb)

    async def submit(_: int) -> None:
        job = JobSpec(id=f"b{stamp}-{next(submissions)}")
        await ask(of_master("submit"), codec.encode(SubmitJob(spec=job)))

    async def put(number: int) -> None:
        await kv.put(f"b{stamp}-{number}", record)

    calls: dict[str, tuple[Call, psutil.Process]] = {}
    async with connect(url, "bench") as client:
        await client.jobs()
        await ask(of_master("submit"), codec.encode(SubmitJob(spec=JobSpec(id=f"b{stamp}"))))
        for verb, payload in asked.items():
            answer = await ask(of_master(verb), payload)
            await ask(f"bench.keep.{verb}", answer)
            calls[verb] = (partial(_ask, ask, of_master(verb), payload), master)
            calls[f"bare {verb}"] = (partial(_ask, ask, f"bench.bare.{verb}", payload), bare)
        alone = {
            name: [await rate(*call, seconds, 1) for _ in range(3)] for name, call in calls.items()
        }
        calls |= {"submit": (submit, master), "put": (put, bare)}
        seen: dict[str, list[Measured]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                seen[name].append(await rate(*call, seconds))
    await nc.close()
    return [*_of_endpoints(seen, alone), _of_submissions(seen)]


async def _ask(ask: Callable[[str, bytes], Awaitable[bytes]], to: str, what: bytes, _: int) -> None:
    await ask(to, what)


def _of_endpoints(
    seen: dict[str, list[Measured]], alone: dict[str, list[Measured]]
) -> Iterator[Figure]:
    for verb, goal in (("get", 0.8), ("health", 0.7)):
        ours, peer = seen[verb], seen[f"bare {verb}"]
        yield paired(
            f"{verb}, {IN_FLIGHT} in flight",
            [each.rate for each in ours],
            [each.rate for each in peer],
            "1/s",
            "bare responder",
            goal,
        )
        yield paired(
            f"{verb}: CPU of the service",
            [each.cpu_s * 1e6 for each in ours],
            [each.cpu_s * 1e6 for each in peer],
            "us a request",
            "bare responder",
            lower_is_better=True,
        )
        yield paired(f"{verb} p50, one at a time", [each.median_s * 1e6 for each in alone[verb]],
                     [each.median_s * 1e6 for each in alone[f"bare {verb}"]], "us",
                     "bare responder", 1 / 0.7, lower_is_better=True)  # fmt: skip


def _of_submissions(seen: dict[str, list[Measured]]) -> Figure:
    return paired(f"durable submissions, {IN_FLIGHT} in flight",
                  [each.rate for each in seen["submit"]], [each.rate for each in seen["put"]],
                  "1/s", "bare key-value puts", 0.8)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slackwater-bench-") as folder:
        server = NatsServer(Path(folder) / "nats")
        server.start()
        config = Path(folder) / "master.toml"
        config.write_text(f'id = "main"\nurl = "{server.url}"\n')
        master = subprocess.Popen(
            [sys.executable, "-m", "slackwater.services.master", "--config", str(config)]
        )
        bare = subprocess.Popen(
            [sys.executable, "-c", BARE_RESPONDER, server.url], stdout=subprocess.PIPE
        )
        try:
            assert bare.stdout is not None
            bare.stdout.readline()
            processes = psutil.Process(master.pid), psutil.Process(bare.pid)
            figures = uvloop.run(compare(server.url, *processes, options.seconds, options.rounds))
        finally:
            for process in (master, bare):
                process.terminate()
                process.wait(20)
            server.stop()
    show("control plane", figures)
    if options.json is not None:
        write_json(options.json, this_command(), figures)


if __name__ == "__main__":
    main()
