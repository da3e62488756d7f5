"""Users' mistakes: one line that names the field, the value and the remedy, an exit code for
scripts, and nothing half-done left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.loadgen.samples import PHILLY

pytestmark = pytest.mark.live


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as its user types it, in an environment that knows no cluster."""
    program, *arguments = words
    module = {"slackwater": "cli.main", "loadgen": "loadgen.cli.main"}[program]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLACKWATER_")}
    return subprocess.run(
        [sys.executable, "-m", f"slackwater.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=env | {"COLUMNS": "200"} | environment,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "--id", "a.b"], "id 'a.b': give letters, digits, - and _"),
        (["export", "--node", "a/b"], "node 'a/b': give letters, digits, - and _"),
        (["export", "--socket", "/no/where"], "socket /no/where: folder /no does not exist; name"),
        (["export", "--socket", __file__], "exists and is not a socket: name another path"),
        (["export", "--size", "5000"], "size 5000: give a multiple of 4096"),
        (["export", "--size", "0"], "size 0: give a multiple of 4096"),
        (["export", "--slab-size", "1000"], "slab size 1000: give what the lenders have"),
        (["export", "--slab-size", "100000"], "slab size 100000: give what the lenders have"),
        (["export", "--hot", "nan"], "hot nan: give page I/O per second"),
        (["export", "--cold", "30"], "cold 30: give less than hot, which is 20"),
        (["export", "--prefetch", "100"], "prefetch 100: give 0 to 64"),
        (["map", "a b"], "device 'a b': a name has letters, digits, - and _"),
        (["evict", "a.b", "--count", "1"], "lender 'a.b': a name has letters, digits, - and _"),
        (["evict", "s1", "zzz"], "slab 'zzz': a slab's name is 12 hexadecimal digits"),
        (["drain", "a.b"], "lender 'a.b': a name has letters, digits, - and _"),
    ],
    ids=lambda words: "".join(words[:2]) if isinstance(words, list) else "",
)
def test_memory_commands_name_what_cannot_be(
    words: list[str], said: str, tmp_path: Path, bus: str
) -> None:
    command, *rest = words
    given = []
    if command == "export":
        for option, value in (("--socket", str(tmp_path / "nbd")), ("--size", "4M")):
            given += [option, value] if option not in rest else []
    done = run("slackwater", "memory", command, *given, *rest, "--url", bus)
    assert done.returncode == (78 if command == "export" else 2)
    assert said in one_line(done)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["map", "nosuch"], "device 'nosuch' does not answer: see `slackwater memory top`"),
        (["evict", "nosuch", "--count", "1"], "lender 'nosuch' does not answer"),
        (["drain", "nosuch"], "lender 'nosuch' does not answer"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_lenders_and_devices_that_nobody_knows(words: list[str], said: str, bus: str) -> None:
    done = run("slackwater", "memory", *words, "--url", bus)
    assert done.returncode == 69
    assert said in one_line(done)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "0"], "--size '0': give at least a page"),
        (["--size", "4M", "--device", "a.b"], "--device 'a.b': give a name"),
        (["--size", "4M", "--seed=-1"], "--seed '-1': give a whole number from 0"),
    ],
)
def test_memory_workloads_that_cannot_be_played(words: list[str], said: str) -> None:
    done = run("loadgen", "memory", "zipf", "--socket", "nowhere", *words)
    assert done.returncode == 2
    assert said in one_line(done)


def test_two_devices_of_one_name(bus: str, tmp_path: Path) -> None:
    """They would depose each other from their slab map for ever. Once the first has gone its name
    is free."""
    command = [
        "memory", "export", "--size", "4M", "--slab-size", "1M", "--metrics-port=-1", "--url", bus,
    ]  # fmt: skip
    first = subprocess.Popen(
        [
            sys.executable, "-m", "slackwater.cli.main", *command, "--socket",
            str(tmp_path / "first"), "--json",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"{\n"
        while True:  # Clients may connect before the bus knows it.
            done = run("slackwater", "memory", "map", "d1", "--url", bus)
            if done.returncode == 0:
                break
        done = run("slackwater", *command, "--socket", str(tmp_path / "second"))
        assert done.returncode == 78
        assert "id 'd1': a device of this name is served already; give another" in one_line(done)
        assert not (tmp_path / "second.backup").exists()
    finally:
        first.terminate()
        assert first.wait(20) == 0
        first.stdout.close()  # type: ignore[union-attr]


def test_malformed_trace_row_names_file_line_column_and_value(tmp_path: Path) -> None:
    trace = tmp_path / "bad.csv"
    trace.write_text("job_id,submission_time,duration,num_gpu\n1,0,10,2\n2,5,soon,4\n")
    done = run("loadgen", "replay", str(trace), "--report", str(tmp_path / "report"))
    line = one_line(done)
    assert done.returncode == 65
    for part in ("bad.csv", "3", "duration", "soon"):
        assert part in line
    assert not (tmp_path / "report").exists()


def test_a_report_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for command in (("demo",), ("experiment", "sharing"), ("replay", str(PHILLY))):
        done = run("loadgen", *command, "--report", str(taken / "report"))
        assert done.returncode == 65
        assert "Not a directory; name another" in done.stderr.splitlines()[-1]
