"""The control plane against the bare engine: requests per second of a service's endpoint against a
bare NATS responder, and job submissions made durable per second against bare key-value puts.

Both peers use the same nats-server (`sync_interval: always`), the same client library and loop, and
processes of their own; 64 requests are in flight. Goals: 0.7 of the bare responder's rate and its
median latency at most 1 / 0.7; 0.8 of the bare puts.

    python benchmarks/control_plane.py [--seconds 1] [--rounds 5]
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
import uvloop
from figures import Figure, show

from slackwater.common import codec
from slackwater.common.client import connect
from slackwater.common.natsserver import NatsServer
from slackwater.schemas import subjects
from slackwater.schemas.jobs import JobRecord, JobSpec, SubmitJob
from slackwater.schemas.service import GetHealth

IN_FLIGHT = 64
BARE = "bench.bare"
Call = Callable[[int], Awaitable[object]]

BARE_RESPONDER = """
import asyncio, sys, nats, uvloop
async def main():
    nc = await nats.connect(sys.argv[1])
    async def answer(message):
        await message.respond(message.data)
    await nc.subscribe("bench.bare", cb=answer)
    await nc.flush()
    print("ready", flush=True)
    await asyncio.sleep(3600)
uvloop.run(main())
"""


async def rate(call: Call, seconds: float, in_flight: int = IN_FLIGHT) -> tuple[float, float]:
    """(calls per second, median seconds of one) with `in_flight` callers for `seconds`."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    numbers = iter(range(10**9))

    async def caller() -> None:
        while (begin := time.perf_counter()) < end:
            await call(next(numbers))
            took.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return len(took) / (time.perf_counter() - begin), statistics.median(took)


async def compare(url: str, seconds: float, rounds: int) -> list[Figure]:
    nc = await nats.connect(url)
    js = nc.jetstream()
    kv = await js.create_key_value(bucket="bench")
    payload = codec.encode(GetHealth())
    health = subjects.command("master", subjects.MASTER, "health")
    spec = JobSpec(id="x", program=("python", "-c", "pass"), model="vgg19")
    record = codec.encode_record(JobRecord(spec=spec), epoch=1)
    stamp = time.monotonic_ns()
    seen: dict[str, list[tuple[float, float]]] = {}
    async with connect(url, "bench") as client:

        async def endpoint(_: int) -> None:
            await nc.request(health, payload, timeout=30)

        async def bare(_: int) -> None:
            await nc.request(BARE, payload, timeout=30)

        async def submit(number: int) -> None:
            job = JobSpec(id=f"b{stamp}-{len(seen.get('submit', []))}-{number}")
            await nc.request(
                subjects.command("master", subjects.MASTER, "submit"),
                codec.encode(SubmitJob(spec=job)),
                timeout=30,
            )

        async def put(number: int) -> None:
            await kv.put(f"b{stamp}-{number}", record)

        calls: dict[str, Call] = {
            "endpoint": endpoint, "bare": bare, "submit": submit, "put": put,
        }  # fmt: skip
        await client.jobs()
        for _ in range(rounds):
            for name, call in calls.items():
                seen.setdefault(name, []).append(await rate(call, seconds))
        alone = {name: await rate(calls[name], seconds, 1) for name in ("endpoint", "bare")}
    await nc.close()
    rates = {name: statistics.median(r for r, _ in rounds_) for name, rounds_ in seen.items()}
    return [
        Figure("endpoint requests, 64 in flight", rates["endpoint"], rates["bare"], "1/s",
               "bare responder", 0.7),
        Figure("endpoint p50, one at a time", alone["endpoint"][1] * 1e6, alone["bare"][1] * 1e6,
               "us", "bare responder", 1 / 0.7, lower_is_better=True),
        Figure("durable submissions, 64 in flight", rates["submit"], rates["put"], "1/s",
               "bare key-value puts", 0.8),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
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
            figures = uvloop.run(compare(server.url, options.seconds, options.rounds))
        finally:
            for process in (master, bare):
                process.terminate()
                process.wait(20)
            server.stop()
    show("control plane", figures)


if __name__ == "__main__":
    main()
