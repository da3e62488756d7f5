"""The program that keeps a terminal, as a process: what is typed arrives once, and it ends well.

Each of these starts an interpreter and a shell, which takes half a second."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tests.waiting import eventually

from slackwater.common.base import codec
from slackwater.schemas.terminals import SOCKET, Typed, TypeIn, in_terminal, keeps_terminal


class Kept:
    """A command in a terminal. `show`: what it has shown so far."""

    def __init__(self, folder: Path, *command: str, alone_s: float = 60.0) -> None:
        self.path, self._log = folder / "terminal", folder / "log"
        words = in_terminal(command, (90, 33), alone_s)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, SOCKET: str(self.path)},
            )  # fmt: skip

    @property
    def shown(self) -> str:
        return self._log.read_bytes().decode()

    def type(self, place: int, text: str, columns: int = 0, rows: int = 0, seat: str = "s1") -> int:
        """Return the place that is expected next."""
        eventually(self.path.exists, "it listens", 30.0)
        asked = TypeIn(
            job="j", rank=0, seat=seat, attempt=3, place=place, data=text.encode(),
            columns=columns, rows=rows,
        )  # fmt: skip
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(self.path))
            sock.sendall(codec.encode(asked))
            sock.shutdown(socket.SHUT_WR)
            typed = codec.decode(sock.recv(4096), Typed)
        assert (typed.job, typed.rank, typed.attempt) == ("j", 0, 3)
        return typed.place

    def shows(self, text: str) -> None:
        eventually(lambda: text in self.shown, f"it shows {text!r}", 30.0)

    def ends(self) -> int:
        return self.process.wait(30)


class Keep(Protocol):
    def __call__(self, *command: str, alone_s: float = 60.0) -> Kept: ...


@pytest.fixture
def keep() -> Iterator[Keep]:
    """Put a command in a terminal; what still runs is killed afterwards."""
    made: list[Kept] = []

    def start(*command: str, alone_s: float = 60.0) -> Kept:
        made.append(Kept(Path(name), *command, alone_s=alone_s))
        return made[-1]

    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        yield start
        for kept in made:
            kept.process.kill()
            kept.process.wait()


def test_what_is_typed_twice_under_one_place_arrives_once(keep: Keep) -> None:
    kept = keep("cat")
    assert kept.type(0, "abc") == 3
    assert kept.type(0, "abc") == 3, "the answer was lost, and it is sent again"
    assert kept.type(1, "bcde") == 5, "some of it had arrived"
    assert kept.type(9, "later") == 5, "bytes between are missing"
    assert kept.type(5, "\n") == 6
    kept.shows("abcde\r\nabcde\r\n")
    assert "later" not in kept.shown
    assert kept.type(6, "\x04") == 7
    assert kept.ends() == 0
    assert not kept.path.exists()


def test_two_people_at_one_terminal_do_not_swallow_each_others_keys(keep: Keep) -> None:
    kept = keep("cat")
    assert kept.type(0, "abc") == 3
    assert kept.type(0, "DEF", seat="s2") == 3
    assert kept.type(3, "\n") == 4
    kept.shows("abcDEF\r\nabcDEF\r\n")
    for other in range(100):
        assert kept.type(0, "", seat=f"o{other}") == 0
    assert kept.type(0, "", seat="s1") == 0, "one who has not been there for long begins anew"


def test_the_window_has_the_size_of_the_one_in_which_somebody_sits(keep: Keep) -> None:
    kept = keep("sh", "-c", "stty size; trap 'stty size' WINCH; while :; do sleep 0.1; done")
    kept.shows("33 90")
    kept.type(0, "", columns=120, rows=40)
    kept.shows("40 120")
    kept.type(0, "\x03")
    assert kept.ends() == 128 + signal.SIGINT, "Ctrl-C is a key, and the terminal's signal"


def test_all_that_was_shown_before_the_end_is_there(keep: Keep) -> None:
    kept = keep("sh", "-c", "seq 20000; exit 5")
    assert kept.ends() == 5
    assert kept.shown.split() == [str(n) for n in range(1, 20001)]


def test_a_process_left_behind_that_prints_for_ever_does_not_keep_it(keep: Keep) -> None:
    kept = keep("bash", "-c", "trap '' HUP; (sleep 0.2; timeout 20 yes) & sleep 0.5; exit 4")
    assert kept.ends() == 4


def test_where_nobody_sits_it_hangs_up(keep: Keep) -> None:
    kept = keep("sh", "-c", "trap 'echo hung up; exit 7' HUP; while :; do sleep 0.1; done",
                alone_s=1.0)  # fmt: skip
    assert kept.ends() == 7
    assert "nobody sat here for 1 s" in kept.shown
    assert "hung up" in kept.shown


def test_told_to_end_it_hangs_up_and_then_kills(keep: Keep) -> None:
    """Takes the five seconds that a command has to end by itself."""
    kept = keep("sh", "-c", "trap '' HUP; echo up; while :; do sleep 0.1; done")
    kept.shows("up")
    kept.process.send_signal(signal.SIGTERM)
    assert kept.ends() == 128 + signal.SIGKILL


def test_a_command_that_is_not_there_is_named(keep: Keep) -> None:
    kept = keep("no-such-program")
    assert kept.ends() == 127
    assert "no-such-program: No such file or directory" in kept.shown


def test_a_program_in_a_terminal_is_known_by_its_words() -> None:
    assert keeps_terminal(in_terminal(("bash",), (80, 24), 120.0))
    assert not keeps_terminal(("python", "train.py"))
