"""Build what a machine without a network installs: Slackwater's wheel, and those of all that it
needs, which are fetched by the hashes of requirements.lock. Some of them are built here, of sources
with those hashes: the file wheels.lock beside them has the hash of every wheel as it is.

    python deploy/wheelhouse.py wheelhouse.tar

Run it with the Python version of the machines, on a machine of their kind.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"


def build(target: Path) -> int:
    """Write the tar; return pip's exit code."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # Modules that were removed since are in it.
    with tempfile.TemporaryDirectory(prefix="slackwater-wheels-") as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        for words in (
            [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", name, str(ROOT)],
            [*pip, "wheel", "--quiet", "--require-hashes", "-w", name, "-r", str(LOCK)],
        ):
            if code := subprocess.call(words):
                return code
        wheels = sorted(folder.glob("*.whl"))
        lines = [_pinned(wheel) for wheel in wheels]
        (folder / "wheels.lock").write_text("\n".join(lines) + "\n")
        files = [*wheels, folder / "wheels.lock"]
        draft = target.with_name(f"{target.name}.new")
        with tarfile.open(draft, "w") as tar:
            for path in files:
                tar.add(path, path.name, filter=_plain)
        draft.replace(target)
    size = target.stat().st_size / 2**20
    sys.stdout.write(f"{target}: {len(wheels)} wheels, {size:.0f} MiB\n")
    return 0


def _pinned(wheel: Path) -> str:
    """Return the line of a requirements file for this wheel and no other."""
    name, version, *_ = wheel.name.split("-")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{name}=={version} --hash=sha256:{digest}"


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out what differs from build to build."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
