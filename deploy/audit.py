"""Look the pinned packages up in a database of known vulnerabilities, and write the bill of
materials.

    python deploy/audit.py .venv-audit/bin requirements.lock reports/sbom.json

Exit codes: 0 where nothing is known against any package that could be looked up, 1 where something
is, 69 with `--required` where the database cannot be reached. Without `--required` a machine that
has no network gets its bill of materials, and is told that nothing was looked up.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

UNAVAILABLE = 69
TIME_LIMIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description="look up pinned packages, write their list")
    parser.add_argument("tools", type=Path, help="folder of pip-audit and cyclonedx-py")
    parser.add_argument("lock", type=Path)
    parser.add_argument("bill", type=Path, help="the file to write, in CycloneDX's format")
    parser.add_argument("--required", action="store_true", help="fail where nothing is looked up")
    options = parser.parse_args()
    options.bill.parent.mkdir(parents=True, exist_ok=True)
    if code := write_bill(options.tools, options.lock, options.bill):
        return code
    count = len(json.loads(options.bill.read_text())["components"])
    print(f"{options.bill}: {count} packages, by version and hash")
    found = look_up(options.tools, options.lock)
    lines, code = judged(found, options.required)
    print("\n".join(lines))
    return code


def write_bill(tools: Path, lock: Path, bill: Path) -> int:
    command = [
        tools / "cyclonedx-py", "requirements", lock, "--pyproject", "pyproject.toml",
        "--output-reproducible", "--validate", "-o", bill,
    ]  # fmt: skip
    made = subprocess.run(
        command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    if made.returncode:
        print(made.stderr, file=sys.stderr)
    return made.returncode


def look_up(tools: Path, lock: Path) -> dict[str, Any]:
    """Return pip-audit's report; an empty one where it could not be made."""
    command = [
        tools / "pip-audit", "-r", lock, "--disable-pip", "--no-deps", "--format", "json",
        "--progress-spinner", "off", "--timeout", "15",
    ]  # fmt: skip
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
        report: dict[str, Any] = json.loads(made.stdout)
    except (json.JSONDecodeError, subprocess.TimeoutExpired) as error:
        print(f"pip-audit made no report: {error}", file=sys.stderr)
        return {"dependencies": []}
    return report


def judged(report: dict[str, Any], required: bool) -> tuple[list[str], int]:
    """Return what to say of a report, and the exit code."""
    packages = report["dependencies"]
    known = [each for each in packages if "skip_reason" not in each]
    lines = []
    for each in known:
        for flaw in each["vulns"]:
            mended = ", ".join(flaw.get("fix_versions", ())) or "no version yet"
            lines.append(f"{each['name']} {each['version']}: {flaw['id']}; mended in {mended}")
    if lines:
        return lines, 1
    if not known:
        said = "the database of vulnerabilities cannot be reached from here: nothing was looked up"
        return [said], UNAVAILABLE if required else 0
    left = len(packages) - len(known)
    more = f"; {left} are not in the database" if left else ""
    return [f"{len(known)} packages looked up, nothing is known against them{more}"], 0


if __name__ == "__main__":
    sys.exit(main())
