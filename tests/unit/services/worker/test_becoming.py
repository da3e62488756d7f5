"""The environment that a job's program gets from the shell of its account, whichever that is."""

import shutil
import subprocess
from pathlib import Path

import pytest

from slackwater.services.worker.becoming import command, exported
from slackwater.services.worker.containment import CGROUP

GIVEN = {"PATH": "/usr/bin:/bin", "WORDS": 'it\'s "a"\n$HOME `b`', "EMPTY": "", "_1": "\udcff"}


def found(shell: str, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Let `shell`, as the sh of its machine, start a program; return what that finds."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell}")
    (folder / "sh").symlink_to(path)
    words = command(4711, str(folder))
    with exported(environment) as given:
        ended = subprocess.run(
            [folder / "sh", *words[words.index("/bin/sh") + 1 :], "env", "-0"],
            stdin=given, capture_output=True, check=False, env={}, timeout=30,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, b"")
    lines = ended.stdout.decode(errors="surrogateescape").split("\0")
    return dict(line.split("=", 1) for line in lines if line)


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize("name", ["", "UID", "PPID", "OPTIND", "SHELLOPTS", "RANDOM", "SECONDS"])
def test_a_program_gets_also_the_variables_that_a_shell_keeps_to_itself(
    shell: str, name: str, tmp_path: Path
) -> None:
    """Red before: with bash as sh the program of a job with `--env UID=1000` was not started."""
    given = GIVEN | ({name: "a b"} if name else {})
    there = found(shell, tmp_path, {**given, CGROUP: "/sys/fs/cgroup/x", "a.b": "1"})
    assert {name: there.get(name) for name in given} == given
    assert not there.keys() & {CGROUP, "a.b"}
