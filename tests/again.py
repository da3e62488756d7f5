"""Run tests of real processes that failed beside others once more, alone, and say which.

`make test` and `make thorough` run three tests at a time on as few as two cores; a wait of seconds
can be too short then. A test that fails again, alone, has failed. So has one that does not depend
on time, and so have all, if they are many: these are not run again. Whoever passes only alone is
named at the end, as a defect that is still to be found; `make nightly` gives nothing a second look.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MANY: Final = 4
"""So many that fail do not fail by chance."""
TIMED: Final = ("tests/integration/", "tests/faults/", "tests/chaos/", "tests/lab/")
"""Folders of tests that wait for real processes."""
FAILED: Final = Path(".pytest_cache/v/cache/lastfailed")


def verdict(failed: Sequence[str]) -> str:
    """Say why these tests have failed for good; empty: they are to be run again."""
    if not failed:
        return "no test is on record as failed"
    if len(failed) >= MANY:
        return f"{len(failed)} tests failed, which is not by chance"
    others = [test for test in failed if not test.startswith(TIMED)]
    return f"{others[0]} does not depend on time" if others else ""


def main() -> int:
    """Return the exit code of the target."""
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if why := verdict(failed):
        sys.stderr.write(f"not run again: {why}\n")
        return 1
    sys.stderr.write(f"run again, alone: {', '.join(failed)}\n")
    code = subprocess.call([sys.executable, "-m", "pytest", "-q", *failed])
    if code == 0:
        sys.stderr.write(
            f"PASSED ONLY ALONE, {len(failed)}: {', '.join(failed)}. Each is a defect of the test, "
            "or of the program beside a busy core: see its failure above.\n"
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
