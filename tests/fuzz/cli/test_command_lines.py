"""Command lines that nobody would type, by the thousand: each ends with a documented exit code, and
none with a traceback.

A line is drawn from the tree of commands itself: a command, options of it with values from a list
of what has broken programs, words too many, options of others. Nothing listens where they lead, and
what would run for long or change the machine is left out (`LEFT_OUT`).
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.commands import ALL, LEAVES, PROGRAMS

from slackwater.common.base import limits
from slackwater.common.base.errors import Unavailable
from slackwater.common.embedded import EmbeddedCluster
from slackwater.console.program import answered
from slackwater.loadgen.replay import calibrate

CLOSED = "nats://127.0.0.1:9"
CODES = {0, 1, 2, 3, 65, 69, 75, 78, 130}
LEFT_OUT = {
    ("slackwater", "compile"), ("slackwater", "run"), ("slackwater", "memory", "export"),
    ("loadgen", "memory"), ("loadgen", "simulate"),
}  # fmt: skip
"""These are drawn with an option that they do not have: they end before they begin."""
STARTING = {
    ("slackwater", "up"), ("loadgen", "demo"), ("loadgen", "experiment"), ("loadgen", "replay"),
}  # fmt: skip
"""Commands that would start servers or load in a process of their own."""
TEXTS = [
    "", " ", "a", "a b", "a.b", "-", "--", "-1", "0", "1", "2", "64", "65", "nan", "inf", "-inf",
    "1e400", "1e-400", "9" * 23, "9" * 5000, "0x10", "1_000", "1,5", "١", "½", "true", "None",
    "null", "NaN", "[]", "{}", "ünï", "日本", "\U0001f600", "\u202eabc", "a\nb", "a\tb", "\x07",
    "\x1b[31m", "a\0b", "b\udce9", "x" * 64, "x" * 100_000, "../../etc", "/", ".", "..", "~",
    "/dev/null", "/proc/self/mem", "missing", "folder", "unreadable", "junk.json", "junk.toml",
    "deep.json", "good.json", "good.toml", "good.csv", "[bold]", "[/]", "%s", "{0}", "$HOME",
    "*", ">", "sw.v1.evt.>", "a=b", "=", "1x", "3x.001:1e9", "0x.1:1", "64M", "1e9G",
    "9" * 400 + "G",
    "8+2", "shm", "vgg19", "cyclic", "master", "bash", "synchronous", "completed", "json",
    "nats://", "nats://[", "tls://127.0.0.1:9", "http://127.0.0.1:9", "nats://a:b@127.0.0.1:9",
    "127.0.0.1:9", "not a url", "nats://127.0.0.1:99999", "nats://127.0.0.1:-1", CLOSED,
]  # fmt: skip


@pytest.fixture
def anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of files that are wrong in their own ways, and a client that gives up at once."""
    (tmp_path / "folder").mkdir()
    files = {
        "junk.json": b"\xff\x00{", "junk.toml": b"= [", "deep.json": b"[" * 100_000,
        "good.json": b'{"id": "a", "program": ["true"]}', "good.toml": b'id = "a"\n',
        "good.csv": b"job_id,submission_time,duration,num_gpu\n1,0,10,2\n",
        "unreadable": b"x",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "unreadable").chmod(0)
    for name in os.environ:
        if name.startswith(("SLACKWATER_", "NATS_")):
            monkeypatch.delenv(name)
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(limits, "BUS_CONNECT_S", 0.02)
    monkeypatch.setattr(limits, "REQUEST_TIMEOUT_S", 0.02)
    monkeypatch.setattr(EmbeddedCluster, "__aenter__", _not_here)
    monkeypatch.setattr(calibrate, "bytes_scale", lambda *_: 0.1)
    monkeypatch.setattr(calibrate, "charge", _no_charge)
    with chdir(tmp_path):
        yield tmp_path
    (tmp_path / "unreadable").chmod(0o600)


async def _not_here(self: EmbeddedCluster) -> EmbeddedCluster:
    raise Unavailable("no cluster is started here")


def _no_charge(*_: Any) -> None:
    raise Unavailable("nothing is measured here")


def line(rng: random.Random) -> list[str]:
    """One command line, the program's name first."""
    words, command = rng.choice(ALL if rng.random() < 0.1 else LEAVES)
    if words in LEFT_OUT:
        return [*words, "--nosuch", *rng.choices(TEXTS, k=rng.randrange(4))]
    drawn = list(words)
    if rng.random() < 0.05:
        drawn[-1] = rng.choice(TEXTS)
    if rng.random() < 0.1:
        drawn.insert(1, rng.choice(["--user", "--token", "--creds", "--version", "-h", "--no"]))
    for param in command.params:
        required = param.required and rng.random() < 0.9
        if required or rng.random() < 0.25:
            drawn += _given(param, rng)
    if rng.random() < 0.2:
        drawn.insert(rng.randrange(1, len(drawn) + 1), rng.choice([*TEXTS, "--json", "--help"]))
    if rng.random() < 0.1:
        drawn += ["--", *rng.choices(TEXTS, k=rng.randrange(3))]
    return drawn


def _given(param: Any, rng: random.Random) -> list[str]:
    value = _value(param, rng)
    if param.param_type_name == "argument":
        return [_value(param, rng) for _ in range(rng.choice([1, 1, 1, 2]))]
    option = rng.choice(param.opts)
    if param.is_flag:
        return [option] if rng.random() < 0.95 else [f"{option}={value}"]
    return [f"{option}={value}"] if rng.random() < 0.5 else [option, value]


def _value(param: Any, rng: random.Random) -> str:
    kind = param.type_descriptor
    if kind.choices and rng.random() < 0.7:
        return str(rng.choice(kind.choices))
    if param.name == "url" and rng.random() < 0.7:
        return CLOSED
    if "int" in str(kind.annotation) and rng.random() < 0.5:
        return str(rng.choice([-1, 0, 1, 3, 2**31, 2**63, 2**64, -(2**63)]))
    return rng.choice(TEXTS)


def play(seed: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(count):
        drawn = line(random.Random(f"{seed}/{number}"))
        program, *words = drawn
        told = f"line {number} of seed {seed}: {ascii(drawn)[:2000]}"
        try:
            code = answered(PROGRAMS.get(program, PROGRAMS["slackwater"]), words, program)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException as error:
            error.add_note(told)
            raise
        assert code in CODES, told
        said = capsys.readouterr()
        assert "Traceback" not in said.err, told
        explained = "error: " in said.err or '"faults"' in said.out
        assert code in (0, 1, 3) or explained, told


def test_no_line_ends_in_a_traceback(anywhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Six hundred lines take some seconds: each is answered as a command is."""
    play(seed=1, count=600, capsys=capsys)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(2, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 12)),
    ],
)
def test_ten_thousand_lines(seed: int, anywhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(seed, count=1000, capsys=capsys)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(0, 30, marks=pytest.mark.slow),
        pytest.param(1, 200, marks=pytest.mark.nightly),
    ],
)
def test_lines_as_processes(seed: int, count: int, anywhere: Path) -> None:
    """Some of them as a shell would start them: arguments that the kernel takes."""
    rng = random.Random(seed)
    for _ in range(count):
        program, *words = line(rng)
        if any((program, word) in STARTING for word in words):
            continue
        words = [word for word in words if "\0" not in word]
        module = "loadgen.cli.main" if program == "loadgen" else "cli.main"
        done = subprocess.run(
            [sys.executable, "-m", f"slackwater.{module}",
             *(word.encode("utf-8", "surrogateescape") for word in words)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
        )  # fmt: skip
        assert done.returncode in CODES, (program, words, done.stderr)
        assert b"Traceback" not in done.stderr, (program, words, done.stderr)
