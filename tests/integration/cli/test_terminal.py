"""`launch --pty`: a person at the terminal of a program on a node, through kills of services.

Each of these takes some seconds: commands are processes, and so is every service.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest
from tests.integration.cli.test_logs_and_events import COMMAND, Site, site
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(180)]
__all__ = ["site"]


@contextmanager
def sitting(
    site: Site, *words: str, command: tuple[str, ...] = ("bash", "--norc")
) -> Iterator[Any]:
    environment = {**site.environment, "TERM": "dumb", "PS1": "$ ", "SHELL": "/bin/bash"}
    child = pexpect.spawn(
        sys.executable, [*COMMAND[1:], "launch", "--pty", *words, "--", *command],
        env=environment, dimensions=(30, 100), timeout=60, encoding="utf8",
    )  # fmt: skip
    child.delaybeforesend = None
    try:
        child.expect("beginning of a line ends it")
        yield child
    finally:
        child.close(force=True)


def ended(child: Any) -> int:
    child.expect(pexpect.EOF)
    child.close()
    code: int = child.exitstatus
    return code


def test_a_shell_has_the_window_the_keys_and_the_exit_code_of_ones_own(site: Site) -> None:
    with sitting(site, "--env", "PS1=at:") as child:
        child.expect("at:")
        child.sendline("stty size; echo $SLACKWATER_JOB-$((6*7)); tty")
        child.expect("30 100")
        child.expect("-42")
        child.expect("/dev/pts/")
        child.setwinsize(20, 70)
        child.sendline("while [ \"$(stty size)\" != '20 70' ]; do sleep 0.05; done; echo resized")
        child.expect("\nresized")
        child.sendline("echo a-$((1+1)); sleep 300")
        child.expect("a-2")
        child.sendcontrol("c")
        child.expect("at:")
        child.sendline("echo code $?")
        child.expect("code 130")
        child.sendline("exit 3")
        assert ended(child) == 3


def test_no_key_is_lost_or_doubled_where_the_worker_service_is_killed(site: Site) -> None:
    with sitting(
        site, command=("sh", "-c", "stty -echo; echo ready; read line; echo got $line")
    ) as child:
        child.expect("ready")
        child.send("before-")
        site.kill("services.worker")
        child.send("during-")
        child.send("after\r")
        child.expect("got (.*)\r\n")
        assert child.match[1].strip() == "before-during-after"
        assert ended(child) == 0


def test_a_long_paste_arrives_whole(site: Site) -> None:
    """It is larger than what a terminal, and what waits for it, holds for a slow program."""
    text = "".join(f"{n:06d}" for n in range(30_000))
    script = f"stty raw -echo; echo ready; sleep 1; head -c {len(text)} | sha256sum"
    with sitting(site, command=("sh", "-c", script)) as child:
        child.expect("ready")
        child.send(text)
        child.expect("([0-9a-f]{64})")
        expected = subprocess.run(
            ["sha256sum"], input=text.encode(), capture_output=True, check=True
        ).stdout[:64]
        assert child.match[1].encode() == expected


def test_one_leaves_by_tilde_and_point_and_the_job_is_cancelled(site: Site) -> None:
    with sitting(site, "--id", "left1") as child:
        child.sendline("sleep 300")
        child.expect("sleep 300")
        child.send("\r~.")
        child.expect("job left1 is cancelled")
        assert ended(child) == 130
    assert '"state": "cancelled"' in described(site, "left1")


def test_a_window_that_was_closed_is_opened_again(site: Site) -> None:
    """Its command is killed, as by the end of a connection; the shell goes on meanwhile."""
    with sitting(site, "--id", "again1") as child:
        child.sendline("kept=yes; echo set-$kept")
        child.expect("set-yes")
        os.kill(child.pid, signal.SIGKILL)
    with sitting(site, "--id", "again1") as child:
        child.sendline("echo still-$kept; stty size")
        child.expect("still-yes")
        child.sendline("exit")
        assert ended(child) == 0


def test_what_runs_no_terminal_is_typed_nothing(site: Site, tmp_path: Path) -> None:
    site.shell("plain1", "sleep 300")
    eventually(lambda: '"state": "running"' in described(site, "plain1"), "it runs")
    ask = (
        "import asyncio, slackwater\n"
        "from slackwater.common.base.errors import Rejected\n"
        "from slackwater.client.terminal import Keyboard\n"
        "async def ask():\n"
        "    async with slackwater.AsyncClient.connect() as client:\n"
        "        record = await client.job('plain1')\n"
        "        await Keyboard(client, record, lambda: (80, 24)).keep()\n"
        "try:\n    asyncio.run(ask())\n"
        "except Rejected as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask], env=site.environment, cwd=tmp_path, text=True,
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert re.search("runs no terminal of job plain1.*launch --pty", done.stdout), done
    site.run("cancel", "plain1")


def described(site: Site, job: str) -> str:
    return " ".join(site.run("job", job, "--json").stdout.split())
