"""`slackwater top` on a terminal of 80x24: what is on the screen, and how it is given back."""

import asyncio
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from slackwater.cli.top import ENTER, LEAVE
from slackwater.common.embedded import ClusterOptions, EmbeddedCluster
from slackwater.common.shell.client import connect
from slackwater.schemas.jobs import JobSpec

# A cluster takes seconds to start, on a busy machine many.
pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]
JOBS = 60


def readable(fd: int, within_s: float) -> bool:
    """Wait for something to read. A test process may have more descriptors than select() takes."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000.0))


class Terminal:
    """A command on a terminal of its own, and what it wrote there."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slackwater.cli.main", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
            env=environment | {"TERM": "xterm"},
        )  # fmt: skip
        self.theirs = theirs
        self.text = ""

    def until(self, seen: Callable[[str], bool], within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not seen(self.text):
            assert time.monotonic() < deadline_s, self.text
            if readable(self.ours, 0.2):
                self.text += os.read(self.ours, 65536).decode()

    def ended(self) -> int:
        """The exit code; what was written until then is read."""
        self.until(lambda _: self.process.poll() is not None)
        while readable(self.ours, 0.1):
            self.text += os.read(self.ours, 65536).decode()
        assert self.process.returncode is not None
        return self.process.returncode


@contextmanager
def on_terminal(*words: str) -> Iterator[Terminal]:
    terminal = Terminal(*words)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
            terminal.process.wait()
        os.close(terminal.ours)
        os.close(terminal.theirs)


def rows(text: str) -> list[str]:
    """Return the rows of the screen that was drawn last."""
    drawn = text.rpartition("\x1b[H")[2].partition("\x1b[J")[0]
    return [line.replace("\x1b[K", "") for line in drawn.split("\r\n")]


async def test_top_gives_the_terminal_back_however_it_ends() -> None:
    """Sixty jobs that wait: a screen of 24 rows holds both parts. Then each of the ways out."""
    options = ClusterOptions(controllers=1, aggregators=2)
    async with EmbeddedCluster(options) as cluster, connect(cluster.url) as client:
        for number in range(JOBS):
            await client.submit(JobSpec(id=f"j{number}"))
        for _ in range(600):  # The first heartbeats may be on their way.
            if len(await client.aggregators()) == 2:
                break
            await asyncio.sleep(0.05)
        ways: list[tuple[Callable[[Terminal], object], int]] = [
            (lambda t: os.write(t.ours, b"q"), 0),
            (lambda t: os.write(t.ours, b"\x03"), 0),
            (lambda t: t.process.send_signal(signal.SIGINT), 0),
            (lambda t: t.process.send_signal(signal.SIGTERM), 130),
            (lambda t: t.process.send_signal(signal.SIGHUP), 130),
        ]
        for way, code in ways:
            with on_terminal("top", "--plain", "--url", cluster.url) as terminal:
                terminal.until(lambda text: "\x1b[J" in text)
                shown = rows(terminal.text)
                way(terminal)
                assert terminal.ended() == code, terminal.text
                assert len(shown) <= 24
                assert all(len(row) <= 80 for row in shown), shown
                assert any(row.startswith("JOB") for row in shown)
                assert any(row.startswith("a2 ") for row in shown), shown
                assert any(row.startswith("and ") and row.endswith(" more") for row in shown)
                assert terminal.text.index(ENTER) < terminal.text.index(LEAVE)
                behind = terminal.text.rpartition(LEAVE)[2].strip()
                assert behind == ("" if code == 0 else "interrupted")
                assert termios.tcgetattr(terminal.theirs) == terminal.before


async def test_the_full_screen_gives_the_terminal_back_however_it_ends() -> None:
    """Takes some seconds: a cluster, and the application started five times."""
    async with EmbeddedCluster(ClusterOptions(controllers=1, aggregators=1)) as cluster:
        ways: list[tuple[Callable[[Terminal], object], int]] = [
            (lambda t: os.write(t.ours, b"q"), 0),
            (lambda t: os.write(t.ours, b"\x03"), 0),
            (lambda t: t.process.send_signal(signal.SIGINT), 0),
            (lambda t: t.process.send_signal(signal.SIGTERM), 130),
            (lambda t: t.process.send_signal(signal.SIGHUP), 130),
        ]
        for way, code in ways:
            with on_terminal("top", "--url", cluster.url) as terminal:
                terminal.until(lambda text: "GPUs" in text and "filter" in text)
                way(terminal)
                assert terminal.ended() == code, terminal.text[-2000:]
                assert "\x1b[?1049l" in terminal.text, "the other screen is left"
                assert termios.tcgetattr(terminal.theirs) == terminal.before
