"""Install pinned packages into a virtual environment, and say how far it is.

    python deploy/install.py .venv/bin/python requirements.lock

Only the standard library: nothing is installed yet. pip's own lines are kept for the case that it
fails; its exit code is this program's.
"""

import re
import subprocess
import sys
from collections import deque
from pathlib import Path

KEPT = 40
"""Lines of pip's that are shown when it fails."""
PACKAGE = re.compile(
    r"(?:Collecting |Requirement already satisfied: |Processing \S*/)"
    r"([A-Za-z0-9_.]+(?:-[A-Za-z]\w*)*)"
)
"""The line of pip's that begins a package: of an index, there already, or a file."""
PLAIN_EVERY = 10
"""Off a terminal: a line for so many packages."""


def install(python: str, lock: Path) -> int:
    total = len(re.findall(r"^[\w.-]+==", lock.read_text(), re.MULTILINE))
    shown = sys.stderr.isatty()
    into = Path(python).parent.parent.name
    print(f"installing {total} pinned packages ({lock.name}) into {into}", file=sys.stderr)
    pip = subprocess.Popen(
        [
            python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off",
            "--require-hashes", "-r", str(lock),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert pip.stdout is not None
    done, last = 0, deque[str](maxlen=KEPT)
    for line in pip.stdout:
        last.append(line)
        found = PACKAGE.match(line)
        if found:
            done += 1
            if shown:
                say(f"  {done}/{total} {found[1]}")
            elif done % PLAIN_EVERY == 0:
                print(f"  {done} of {total} fetched", file=sys.stderr)
        elif line.startswith("Installing collected packages"):
            text = "  all fetched, unpacking"
            say(text) if shown else print(text, file=sys.stderr)
    if shown:
        say("")
    if code := pip.wait():
        print(f"pip ended with code {code}; its last lines:", *last, sep="\n", file=sys.stderr)
    return code


def say(text: str) -> None:
    """Replace the terminal's current line."""
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(install(sys.argv[1], Path(sys.argv[2])))
