"""The goals of speed in one go: runs the benchmarks of simulator, models and Pollux's search, and
writes what they print to docs/reproduction/speed.md.

    python benchmarks/speed.py [--check]

`--check` also repeats the 100,000 jobs with the program that re-sorts at every instant (minutes).
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "reproduction" / "speed.md"


def main() -> int:
    scripts = {"simulator.py": sys.argv[1:], "models.py": [], "pollux.py": []}
    lines = ["# Speed", "", "One core. Made by `python benchmarks/speed.py`.", ""]
    for script, arguments in scripts.items():
        done = subprocess.run(
            [sys.executable, HERE / script, *arguments],
            capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "110"},
        )  # fmt: skip
        command = " ".join(["python", f"benchmarks/{script}", *arguments])
        printed = [line.rstrip() for line in done.stdout.strip().splitlines()]
        lines += [f"## `{command}`", "", "```text", *printed, "```", ""]
        sys.stdout.write("\n".join(printed) + "\n")
    PAGE.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
