"""From the first line of a command to its first answer: what is loaded, what Ctrl-C does meanwhile,
and how a shell completes it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.cli.commands import ALL

HEAVY = ("numpy", "scipy", "numba", "matplotlib")
LIGHT = [words[1:] for words, _ in ALL if words[0] == "slackwater"]
MOMENTS = 8
PROGRAM = f"""
import contextlib, io, os, sys
from slackwater.cli.main import main
for line in sys.argv[1:]:
    sys.argv = ["slackwater", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    if loaded:
        sys.exit(f"{{line}}: {{loaded}}")
"""


SERVICES = ("aggregator", "controller", "master", "profiler", "slabd", "worker")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_loads_neither_a_compiler_nor_an_optimiser(service: str) -> None:
    """They double a process that answers questions: its collections and caches pay for them."""
    program = (
        f"import sys, slackwater.services.{service}.shell\n"
        "print(*{'numba', 'scipy', 'matplotlib'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []


def test_help_and_jobs_load_no_library_of_numbers(tmp_path: Path) -> None:
    """They cost a second and more on a cold machine. One process asks for all: a library that any
    of them loads stays loaded."""
    lines = [" ".join((*words, "--help")) for words in LIGHT]
    lines += ["jobs", "jobs --url nats://127.0.0.1:9", "submit --id a -- true", "--version"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines],
        capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("module", "words"), [("cli.main", ["--help"]), ("loadgen.cli.main", ["audit", "-h"])]
)
def test_ctrl_c_at_any_moment_says_one_word(module: str, words: list[str]) -> None:
    """Some moments of the start, by how long the start takes here: eight starts, seconds on a busy
    machine. One that comes before the first line of ours is the interpreter's own, as for any
    program in Python: it is seen by what stands in the traceback."""
    command = [sys.executable, "-m", f"slackwater.{module}", *words]
    began_s = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60, check=True)
    whole_s = time.monotonic() - began_s
    interrupted = 0
    for part in range(MOMENTS):
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        time.sleep(whole_s * part / MOMENTS)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        if "slackwater/cli" in said or process.returncode not in (1, -signal.SIGINT):
            assert (process.returncode, said) in ((130, "interrupted\n"), (0, ""))
            interrupted += process.returncode == 130
    assert interrupted > 1


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    """In a real bash, with the script that `slackwater completion bash` prints."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = tmp_path / "slackwater"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m slackwater.cli.main "$@"\n')
    program.chmod(0o755)
    script = """
source <(slackwater completion bash)
complete_line() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _slackwater_completion slackwater
    printf '%s ' "${COMPREPLY[@]}"; echo
}
complete_line slackwater sub
complete_line slackwater submit --it
complete_line slackwater submit --consistency s
complete_line slackwater memory d
"""
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        capture_output=True, text=True, timeout=60,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["submit"], ["--iterations"], ["synchronous", "stale-synchronous"], ["drain"],
    ]  # fmt: skip


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_their_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slackwater.cli.main", "completion", shell],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert f"_SLACKWATER_COMPLETE=complete_{shell}" in done.stdout
