"""Pollux asks for machines, and a hook starts and stops worker services on this host.

Real processes throughout: master, workers, the hook, the jobs' programs. It takes some twenty
seconds: Pollux averages five rounds before it buys.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import Retryable
from slackwater.common.bus.server import NatsServer
from slackwater.common.shell.client import Client, connect
from slackwater.schemas.base import AggregatorId, ClusterId, Ok
from slackwater.schemas.cluster import (
    AggregatorsAllocated,
    AllocateAggregators,
    DeallocateAggregators,
)
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.scheduling import GetPolicy, PolicyInfo
from slackwater.services.master.autoscaling import CallHook
from slackwater.services.master.hook import call

pytestmark = pytest.mark.live

HOOK = """#!{python}
import os, signal, subprocess, sys
from pathlib import Path
folder = Path({folder!r})
verb, id, *rest = sys.argv[1:]
with (folder / "calls").open("a") as calls:
    print(verb, id, *rest, file=calls)
if (folder / id).exists():
    sys.exit(0)  # It was carried out before its answer was lost.
if verb.startswith("add"):
    for _ in range(int(rest[0])):
        name = f"{prefix}{{len(list(folder.glob('{prefix}*.toml'))) + 1}}"
        config = folder / f"{{name}}.toml"
        config.write_text({worker!r}.replace("NAME", name))
        words = [sys.executable, "-m", "slackwater.services.{service}", "--config", str(config)]
        worker = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL)
        (folder / f"{{name}}.pid").write_text(str(worker.pid))
else:
    for name in rest:
        os.kill(int((folder / f"{{name}}.pid").read_text()), signal.SIGTERM)
(folder / id).touch()
"""
WORKER = """
id = "NAME"
url = "{url}"
state_dir = "{folder}/NAME"
gpus = 1
warm = "off"
cgroups = false
"""
MASTER = """
url = "{url}"
gpu_policy = "pollux"
autoscale_hook = "{folder}/hook"
autoscale_nodes_max = 2
autoscale_period_s = 3.0
autoscale_node_hour_cost = 1.5
node_silent_s = 8.0
[gpu_policy_settings]
scale = "true"
round_s = "1"
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slw-", ignore_cleanup_errors=True) as made:
        path = Path(made)
        yield path
        for file in path.glob("*.pid"):
            with suppress(ProcessLookupError):  # It was returned.
                os.kill(int(file.read_text()), signal.SIGKILL)


def begin(service: str, config: Path) -> None:
    words = [sys.executable, "-m", f"slackwater.services.{service}", "--config", str(config)]
    with (config.parent / "log").open("ab") as log:
        pid = os.posix_spawn(
            sys.executable, words, os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, log.fileno(), fd) for fd in (1, 2)],
        )  # fmt: skip
    (config.parent / f"{config.stem}.pid").write_text(str(pid))


async def ready(client: Client) -> set[str]:
    return {info.heartbeat.node for info in await client.nodes() if info.alive}


async def until(what: str, holds: Callable[[], Awaitable[bool]], within_s: float = 90.0) -> None:
    end_s = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < end_s, f"never: {what}"
        await asyncio.sleep(0.2)


async def test_machines_come_when_jobs_wait_and_go_when_none_is_left(
    own_nats_server: NatsServer, folder: Path
) -> None:
    url = own_nats_server.url
    worker = WORKER.format(url=url, folder=folder)
    hook = folder / "hook"
    hook.write_text(
        HOOK.format(
            python=sys.executable, folder=str(folder), worker=worker, prefix="w", service="worker"
        )
    )
    hook.chmod(0o755)
    (folder / "w1.toml").write_text(worker.replace("NAME", "w1"))
    (folder / "master.toml").write_text(MASTER.format(url=url, folder=folder))
    begin("master", folder / "master.toml")
    begin("worker", folder / "w1.toml")
    async with connect(url, "test") as found:
        client = Client(found.bus, found.clock, budget_s=limits.RETRY_BUDGET_S)

        async def first() -> bool:
            return await ready(client) == {"w1"}

        async def grown() -> bool:
            infos = [(await client.job_info(id)).job for id in ("a", "b")]
            return all(job.state == "running" for job in infos)

        async def shrunk() -> bool:
            return len(await ready(client)) == 1

        await until("the first machine is heard", first)
        for id in ("a", "b"):
            await client.submit(JobSpec(id=id, gpus=1, program=("sleep", "600")))
        await until("a machine was added, and both jobs run", grown)
        info = await client.master("policy", GetPolicy(), PolicyInfo)
        assert info.machines.startswith("2 machines of 1 to 2, 2 wanted, 3 an hour")
        for id in ("a", "b"):
            await client.cancel(id)
        await until("a machine was returned", shrunk)
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    assert calls[0][::2] == ["add", "1"]
    assert calls[-1][0] == "return"
    assert len({words[1] for words in calls}) == len(calls), "each order has an id of its own"


async def test_aggregators_come_when_a_request_lacks_them_and_go_when_they_are_free(
    own_nats_server: NatsServer, folder: Path
) -> None:
    """A real master and real aggregators, which the hook starts and ends."""
    url, hook = own_nats_server.url, folder / "hook"
    aggregator = f'id = "NAME"\nurl = "{url}"\nstate_dir = "{folder}/NAME"\n'
    hook.write_text(
        HOOK.format(
            python=sys.executable, folder=str(folder), worker=aggregator, prefix="a",
            service="aggregator",
        )
    )  # fmt: skip
    hook.chmod(0o755)
    (folder / "master.toml").write_text(
        f'url = "{url}"\nautoscale_hook = "{hook}"\nautoscale_aggregators_max = 3\n'
        "autoscale_period_s = 3.0\nnode_silent_s = 1.0\n"
    )
    begin("master", folder / "master.toml")
    async with connect(url, "test") as found:
        client = Client(found.bus, found.clock, budget_s=limits.RETRY_BUDGET_S)
        cluster = ClusterId("c1")
        given: list[AggregatorId] = []

        async def granted() -> bool:
            ask = AllocateAggregators(request="r1", cluster=cluster, count=2)
            with suppress(Retryable):
                answer = await client.master("allocate", ask, AggregatorsAllocated)
                given.extend(answer.aggregators)
            return bool(given)

        async def gone() -> bool:
            return not any(info.alive for info in await client.aggregators())

        await until("two aggregators were started, and given", granted)
        assert given == ["a1", "a2"]
        for name in given:
            assert (Path("/proc") / (folder / f"{name}.pid").read_text()).exists()
        back = DeallocateAggregators(cluster=cluster, aggregators=tuple(given))
        await client.master("deallocate", back, Ok)
        await until("they were stopped", gone)
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    assert [words[0] for words in calls] == ["add-aggregators", "return-aggregators"]
    assert calls[1][2:] == ["a2", "a1"]


async def test_a_hook_that_refuses_hangs_or_is_not_there_says_so(folder: Path) -> None:
    def order(hook: str, within_s: float = 20.0) -> CallHook:
        return CallHook(hook, "gpus-1-1", "add", ("2",), within_s)

    refuses = folder / "refuses"
    refuses.write_text("#!/bin/sh\necho first >&2\necho no quota for $1 $3 >&2\nexit 3\n")
    refuses.chmod(0o755)
    failure = (await call(order(str(refuses)))).failure
    assert failure == "autoscale_hook ended with 3: no quota for add 2"
    assert (await call(order("true"))).failure == ""
    assert "name a program" in (await call(order(str(folder / "none")))).failure
    assert "did not end within 0.2 s" in (await call(order("sh -c 'sleep 60'", 0.2))).failure
    assert (
        "autoscale_hook http://127.0.0.1:9/" in (await call(order("http://127.0.0.1:9/"))).failure
    )


async def test_a_webhook_is_posted_the_order_and_takes_it_by_its_status() -> None:
    heard: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split()[0])
        heard.append(json.loads(await reader.readexactly(length)))
        status = "204 No Content" if len(heard) < 3 else "409 Conflict"
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        where = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/scale"
        added = await call(CallHook(where, "gpus-1-1", "add", ("2",), 20.0))
        gone = await call(CallHook(where, "gpus-2-9", "return", ("w1", "w2"), 20.0))
        refused = await call(CallHook(where, "gpus-3-9", "add", ("1",), 20.0))
        await call(CallHook(where, "aggregators-1-9", "return-aggregators", ("a1",), 20.0))
    assert (added.failure, gone.failure) == ("", "")
    assert "409" in refused.failure
    assert heard[:2] == [
        {"id": "gpus-1-1", "order": "add", "count": 2},
        {"id": "gpus-2-9", "order": "return", "machines": ["w1", "w2"]},
    ]
    assert heard[3] == {
        "id": "aggregators-1-9", "order": "return-aggregators", "aggregators": ["a1"],
    }  # fmt: skip
