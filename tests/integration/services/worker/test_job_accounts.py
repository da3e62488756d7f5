"""Jobs of Agents under accounts of their own, on a cluster of real processes, which takes some
twenty seconds: each service and rank is a process."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytest_asyncio
from tests.faults.gpu_nodes import GpuNodes, gpu_nodes, hang_of

import slackwater
from slackwater.cli.workdir import packed, packed_venv
from slackwater.client.packs import Sent, store
from slackwater.common.base.accounts import account_ids
from slackwater.common.bus.server import find_server
from slackwater.schemas.job_requests import JobInfo
from slackwater.schemas.jobs import JobSpec
from slackwater.services.worker.processes import RankFiles

IDS = "60200-60209"
PATHS = os.pathsep.join((sysconfig.get_path("purelib"), str(Path(*slackwater.__path__).parent)))


def interpreter() -> str:
    """Return an interpreter that another account may run, with this one's packages; "": none."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return ""
    for python in (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"):
        uid = str(account_ids(IDS)[0])
        # By a shell: setpriv itself loses root's rights with the program that it becomes.
        script = f"exec {python} -c 'import slackwater'"
        words = ("setpriv", "--reuid", uid, "--clear-groups", "/bin/sh", "-c", script)
        environment = {**os.environ, "PYTHONPATH": PATHS}
        with tempfile.TemporaryFile() as nothing:
            code = subprocess.call(words, env=environment, stdout=nothing, stderr=nothing)
        if code == 0:
            return python
    return ""


PYTHON = interpreter()
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PYTHON, reason="not root, or no Python that another account can run"),
]

TRAIN = """
import json, os, pathlib, sys, time
forked = "numpy" in sys.modules
import numpy as np
from slackwater import Agent
import model

def where_it_stands():
    time.sleep(600)

with Agent(tensors={"w": (64,)}, deadline_s=60.0) as agent:
    for iteration in range(agent.iteration, int(sys.argv[1])):
        agent.step({"w": np.ones(64, np.float32)})
        if "hang" in sys.argv and iteration == 40 and agent.rank == 1:
            where_it_stands()
        time.sleep(0.02)
    said = {"uid": os.getuid(), "code": os.stat("model.py").st_uid, "value": model.value}
    pathlib.Path(os.environ["HOME"], "said").write_text(json.dumps(said | {"forked": forked}))
"""


IN_VENV = """
import json, os, pathlib, sys
own = os.environ["VIRTUAL_ENV"]
places = [own, *(os.path.join(own, each) for each in ("bin", "lib", "pyvenv.cfg"))]
said = {"uid": os.getuid(), "own": sys.prefix == own}
said["writable"] = any(os.access(place, os.W_OK) for place in places)
pathlib.Path(os.environ["HOME"], "said").write_text(json.dumps(said))
"""
LOOKS = """
import json, os, pathlib, stat, subprocess, sys
forked = "numpy" in sys.modules
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
names = ("Uid", "Gid", "Groups", "NoNewPrivs", "CapEff", "CapPrm", "CapInh", "CapAmb", "Umask")
find = "import os; from slackwater.common.bus.relay import find_ticket as f; print(f(os.environ))"
said = {
    "forked": forked, "code": os.stat("looks.py").st_uid, "uid": os.getuid(),
    "status": {name: status[name].split() for name in names},
    "home": [os.environ["HOME"], os.environ["USER"], os.access(os.environ["HOME"], os.W_OK)],
    "folder": stat.S_IMODE(os.stat(".").st_mode),
    "open": sorted(
        os.path.basename(os.readlink(path)).split(":")[0].split("(")[0]
        for each in os.listdir("/proc/self/fd") if os.path.exists(path := f"/proc/self/fd/{each}")
    ),
    "ticket": subprocess.run([sys.executable, "-c", find], capture_output=True, text=True).stdout,
}
pathlib.Path(os.environ["HOME"], "said").write_text(json.dumps(said))
"""
PEEK = """
import json, os, pathlib, sys
folder, found = sys.argv[1], []
for path in (folder, folder + "/model.py", folder + "/train.py", os.path.dirname(folder)):
    for look in (os.listdir, open, lambda path: open(path, "a"), os.unlink):
        try:
            look(path)
            found.append(path)
        except OSError:
            pass
said = {"uid": os.getuid(), "found": found}
pathlib.Path(os.environ["HOME"], "said").write_text(json.dumps(said))
"""


@dataclass
class Lab:
    nodes: GpuNodes
    folder: Path

    async def submit(
        self,
        id: str,
        *program: str,
        code: str = "",
        venv: str = "",
        workers: int = 2,
        gpus: int = 2,
    ) -> None:
        await self.nodes.client.submit(
            JobSpec(
                id=id, workers=workers, gpus=gpus, iterations=1000, program=program, code=code,
                venv=venv,
                folder="" if code else str(self.folder / "code"),
            )
        )  # fmt: skip

    async def send_code(self) -> str:
        """Return the digest by which the nodes get the code."""
        code = packed(self.folder / "code")
        await store(self.nodes.client, Sent(code))
        return code.digest

    async def until(self, id: str, *states: str) -> JobInfo:
        async with asyncio.timeout(100):
            while True:
                info = await self.nodes.client.job_info(id)
                if info.job.state in states:
                    return info
                await asyncio.sleep(0.1)

    async def said(self, id: str) -> list[dict[str, Any]]:
        """Return what each rank wrote at home, once the job is done."""
        info = await self.until(id, "completed", "failed")
        assert info.job.state == "completed", info.job.reason
        ranks = range(info.job.spec.workers)
        files = [RankFiles(self.nodes.state_dir("w1"), id, rank) for rank in ranks]
        return [json.loads((each.path("own") / "said").read_text()) for each in files]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="sw-acc-"))  # Pytest's own are closed to others.
    for each in (folder, folder / "state", folder / "code"):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    (folder / "code" / "train.py").write_text(TRAIN)
    (folder / "code" / "model.py").write_text("value = 42\n")
    (folder / "code" / "looks.py").write_text(LOOKS)
    (folder / "code" / "peek.py").write_text(PEEK)
    environment = {"PYTHONPATH": PATHS, "NATS_SERVER": find_server()}
    worker = {"accounts": IDS, "warm": "on", "warm_imports": "numpy", "environment": ["PYTHONPATH"]}
    with patch.object(sys, "executable", PYTHON), patch.dict(os.environ, environment):
        async with gpu_nodes(
            1, 2, state_dir=folder / "state", transport="shm",
            worker=worker, aggregator={"job_accounts": IDS},
        ) as nodes:  # fmt: skip
            yield Lab(nodes, folder)
    shutil.rmtree(folder)


def check(said: list[dict[str, Any]], code: int | None) -> None:
    """`code`: whose the code is; None: the job's own."""
    (uid,) = {each["uid"] for each in said}
    assert uid in account_ids(IDS)
    assert {each["code"] for each in said} == {uid if code is None else code}
    assert {each["value"] for each in said} == {42}


async def test_agents_reach_their_regions_in_memory(lab: Lab) -> None:
    await lab.submit("cold", "/usr/bin/env", PYTHON, "train.py", "30")
    said = await lab.said("cold")
    check(said, 0)
    assert not any(each["forked"] for each in said)


@pytest.mark.parametrize("way", ["in its folder", "sent"])
async def test_a_forked_rank_has_its_job_s_account(lab: Lab, way: str) -> None:
    """Code that was sent is its job's, in a fork too."""
    code = await lab.send_code() if way == "sent" else ""
    for number in range(8):  # The warm process is made while the cluster starts.
        id = f"warm-{len(way)}-{number}"
        await lab.submit(id, "python", "train.py", "30", code=code)
        said = await lab.said(id)
        check(said, None if code else 0)
        if all(each["forked"] for each in said):
            return
    raise AssertionError(said)


async def test_a_virtual_environment_is_every_job_s_and_nobody_may_write_to_it(lab: Lab) -> None:
    words = (PYTHON, "-m", "venv", "--without-pip", lab.folder / "venv")
    await asyncio.to_thread(subprocess.run, words, check=True)
    venv = packed_venv(lab.folder / "venv")
    await store(lab.nodes.client, Sent(None, venv))
    await lab.submit("venv", "python", "-c", IN_VENV, venv=venv.digest)
    for each in await lab.said("venv"):
        assert each["uid"] in account_ids(IDS)
        assert each["own"]
        assert not each["writable"]


async def test_a_forked_rank_has_no_more_rights_than_one_that_was_started_cold(lab: Lab) -> None:
    """Ids, groups, capabilities, open files, and the ticket that a launcher's child looks for."""
    code = await lab.send_code()
    ways = {"cold": ("/usr/bin/env", PYTHON), "warm": ("python",)}
    seen = {}
    for way, start in ways.items():
        await lab.submit(f"looks-{way}", *start, "looks.py", code=code, workers=1, gpus=1)
        (seen[way],) = await lab.said(f"looks-{way}")
    cold, warm = seen["cold"], seen["warm"]
    assert (cold.pop("forked"), warm.pop("forked")) == (False, True)
    for each in (cold, warm):
        uid = each.pop("uid")
        assert uid in account_ids(IDS)
        status = each["status"]
        assert status.pop("Uid") == status.pop("Gid") == [str(uid)] * 4
        assert each.pop("code") == uid
        assert each["home"][1] == f"job-{uid}"
        del each["home"][:2]
        assert {int(status[name][0], 16) for name in ("CapEff", "CapPrm", "CapAmb")} == {0}
        assert each["ticket"].startswith("the worker service")
    assert warm == cold


async def test_another_job_reads_nothing_of_code_that_was_sent(lab: Lab) -> None:
    """While the job runs, which holds its copy of the code open to itself."""
    code = await lab.send_code()
    await lab.submit("victim", "python", "train.py", "100000", code=code)
    await lab.until("victim", "running")
    state_dir = lab.nodes.state_dir("w1")
    (copy,) = [path.parent for path in (state_dir / "jobs" / "victim").rglob("model.py")]
    theirs = copy.stat().st_uid
    await lab.submit("thief", "python", "peek.py", str(copy), workers=1, gpus=0)
    (said,) = await lab.said("thief")
    assert said["uid"] != theirs
    assert said["found"] == []
    assert sorted(path.name for path in copy.iterdir() if path.suffix == ".py") == [
        "looks.py", "model.py", "peek.py", "train.py",
    ]  # fmt: skip
    await lab.nodes.client.cancel("victim")
    await lab.until("victim", "cancelled")


@pytest.mark.parametrize("way", ["cold", "forked-sent"])
async def test_where_a_hanging_rank_stands_is_read(lab: Lab, way: str) -> None:
    """Takes up to half a minute: a hang is one after ten seconds. Its stack is written by the
    account, into a file that is in a folder of the service."""
    start, code = ("/usr/bin/env", PYTHON), ""
    if way != "cold":
        start, code = ("python",), await lab.send_code()
    id = f"hangs-{way}"
    await lab.submit(id, *start, "train.py", "1000", "hang", code=code)
    hang = await hang_of(lab.nodes, id, 60.0)
    assert hang is not None
    assert hang.ranks[0].rank == 1
    assert "where_it_stands" in hang.ranks[0].look.stack
    account = RankFiles(lab.nodes.state_dir("w1"), id, 1).path("own").stat().st_uid
    stacks = RankFiles(lab.nodes.state_dir("w1"), id, 1).path("stacks").stat()
    assert (stacks.st_uid, stacks.st_mode & 0o777) == (account, 0o600)
    await lab.nodes.client.cancel(id)
    await lab.until(id, "cancelled")
