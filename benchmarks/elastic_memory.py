"""An elastic program whose data are twice its memory, beside the kernel's swap (Qiao 2021, 4.8).

    sudo python benchmarks/elastic_memory.py [--partitions 48] [--mb 8] [--passes 4] [--rounds 3]

Mini-batch k-means; a task reads all of its partition. The same program runs in a memory cgroup of
the same limit, whose disk does 3,000 requests and 160 MB a second, as the volumes of the paper's
machines: once it is told the limit, and puts executors aside; once it is not, and a swap file
takes what does not fit. A third and a fourth run have all the memory: what a limit costs that is
far away. Times are of the passes after the first. Needs root, cgroups of version 1 and room for a
swap file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from figures import Figure, Row, Skipped, show, this_command, write_json

PROGRAM: Final = """
import json, os, resource, sys, time
import numpy as np
from slackwater import elastic
from slackwater.elastic import Bsp, Table

PARTITIONS, MB, PASSES = (int(os.environ[name]) for name in ("PARTITIONS", "MB", "PASSES"))
WIDTH, CENTRES = 64, 16
times = []

class Timed(Bsp):
    def done(self, run, executor, task, result):
        super().done(run, executor, task, result)
        if task == len(times) and min(self._completed) > task:
            times.append(time.perf_counter())

class KMeans(elastic.App):
    executors = PARTITIONS
    tables = {"centres": Table(CENTRES, WIDTH, init=lambda: np.random.default_rng(99).normal(
        size=(CENTRES, WIDTH)))}
    driver = Timed(PASSES)

    class Executor(elastic.Executor):
        def load(self, part):
            self.x = np.random.default_rng(part).standard_normal(
                ((MB << 20) // (4 * WIDTH), WIDTH), np.float32)

        def run(self, ctx, task):
            centres = ctx.get("centres")
            some = self.x[:: max(1, len(self.x) // 400)]
            labels = np.argmax(some @ centres.T - (centres * centres).sum(1) / 2, axis=1)
            moved = np.zeros_like(centres)
            np.add.at(moved, labels, 0.01 * (some - centres[labels]) / len(some))
            ctx.update("centres", moved)
            return float(self.x[:, 0].sum())

    def finish(self, tables, result):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open(os.environ["RESULT"], "w") as file:
            json.dump({"took_s": times[-1] - times[0], "peak_kib": peak,
                       "sum": float(tables["centres"].sum())}, file)

elastic.launch(KMeans())
"""
GROUP: Final = "slackwater-elastic-memory"
RATE_BYTES_S, REQUESTS_S = 160 << 20, 3000
BASE_MB: Final = 130
"""Memory of the program without its data."""
RUN_S: Final = 900.0
ROOT: Final = Path("/sys/fs/cgroup")


def missing() -> str:
    """Say what keeps this machine from the measurement."""
    if os.geteuid():
        return "root is needed"
    if not all((ROOT / name / "tasks").exists() for name in ("memory", "blkio")):
        return "cgroups of version 1 with memory and blkio are needed"
    return ""


@contextmanager
def groups(folder: Path, limit_bytes: int) -> Iterator[list[Path]]:
    """Make the cgroups, and take them away."""
    made = [ROOT / name / GROUP for name in ("memory", "blkio")]
    device = f"{os.major(folder.stat().st_dev)}:0"
    try:
        for path in made:
            path.mkdir(exist_ok=True)
        (made[0] / "memory.limit_in_bytes").write_text(str(limit_bytes))
        for kind in ("read", "write"):
            for what, value in (("bps", RATE_BYTES_S), ("iops", REQUESTS_S)):
                (made[1] / f"blkio.throttle.{kind}_{what}_device").write_text(f"{device} {value}")
        yield made
    finally:
        for path in made:
            with suppress(FileNotFoundError):
                path.rmdir()


@contextmanager
def swap(file: Path, nbytes: int) -> Iterator[None]:
    """Have a swap file."""
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={file}", "bs=1M", f"count={nbytes >> 20}", "status=none"],
        check=True,
    )
    file.chmod(0o600)
    subprocess.run(["mkswap", "-q", file], check=True)
    subprocess.run(["swapon", file], check=True)
    try:
        yield
    finally:
        subprocess.run(["swapoff", file], check=True)
        file.unlink()


def run(folder: Path, options: Any, within: list[Path], limit_bytes: int) -> dict[str, float]:
    """Run the program, told its limit unless that is 0, and return what it says."""
    program, result = folder / "program.py", folder / "result.json"
    program.write_text(PROGRAM)
    told = {"SLACKWATER_MEMORY_BYTES": str(limit_bytes)} if limit_bytes else {}
    enter = "".join(f"echo $$ > {path}/cgroup.procs; " for path in within)
    subprocess.run(
        ["sh", "-c", f"{enter}exec {sys.executable} {program}"],
        check=True, stdout=subprocess.DEVNULL, timeout=RUN_S,
        env={
            **os.environ, **told, "PARTITIONS": str(options.partitions), "MB": str(options.mb),
            "PASSES": str(options.passes), "RESULT": str(result), "OPENBLAS_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "131072", "TMPDIR": str(folder),
        },
    )  # fmt: skip
    found: dict[str, float] = json.loads(result.read_text())
    return found


def measure(folder: Path, options: Any) -> list[Row]:
    data_bytes = options.partitions * options.mb << 20
    limit_bytes = (BASE_MB << 20) + data_bytes // 2
    plenty_bytes = 4 * ((BASE_MB << 20) + data_bytes)
    took: dict[str, list[float]] = {name: [] for name in ("put aside", "swap", "far", "none")}
    for _ in range(options.rounds):
        with groups(folder, limit_bytes) as made:
            aside = run(folder, options, made, limit_bytes)
            with swap(folder / "swap", data_bytes + (256 << 20)):
                swapped = run(folder, options, made, 0)
        far, none = (run(folder, options, [], limit) for limit in (plenty_bytes, 0))
        for name, found in zip(took, (aside, swapped, far, none), strict=True):
            took[name].append(found["took_s"])
    passes = options.passes - 1
    what = f"{data_bytes >> 20} MB in {limit_bytes >> 20} MB, {passes} passes"
    middle = {name: statistics.median(each) for name, each in took.items()}
    return [
        Figure(
            what, middle["put aside"], middle["swap"], "s", "the kernel's swap", 0.2,
            lower_is_better=True, floor=passes * data_bytes / 2 / RATE_BYTES_S,
            ratios=tuple(a / b for a, b in zip(took["put aside"], took["swap"], strict=True)),
        ),
        Figure(
            "the same in memory, with a limit that is far", middle["far"], middle["none"], "s",
            "no limit", 1.02, lower_is_better=True,
            ratios=tuple(a / b for a, b in zip(took["far"], took["none"], strict=True)),
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("partitions", 48), ("mb", 8), ("passes", 4), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", default="/var/tmp", help="where the disk is")
    parser.add_argument("--json", type=Path)
    options: Any = parser.parse_args()
    if why := missing():
        rows: list[Row] = [Skipped("data larger than memory", why)]
    else:
        with tempfile.TemporaryDirectory(prefix="sw-", dir=options.folder) as folder:
            rows = measure(Path(folder), options)
    show("data larger than memory", rows)
    if options.json is not None:
        write_json(options.json, this_command(), rows)


if __name__ == "__main__":
    main()
