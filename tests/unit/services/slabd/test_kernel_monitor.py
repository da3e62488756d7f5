"""Memory as the kernel reports it: the machine's, a cgroup's around us, and who waits for it."""

from pathlib import Path

import pytest

from slackwater.services.slabd.monitor import KernelMonitor

GIB = 1024**3
KIB_IN_GIB = 1024**2


def machine(folder: Path, cgroup: str = "", pressure: float | None = None) -> tuple[Path, Path]:
    """(proc, cgroups) of a machine of 64 GiB with 48 available."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text(
        f"MemTotal: {64 * KIB_IN_GIB} kB\nMemFree: 1 kB\nMemAvailable: {48 * KIB_IN_GIB} kB\n"
    )
    if cgroup:
        (proc / "self" / "cgroup").write_text(cgroup)
    if pressure is not None:
        told(proc / "pressure" / "memory", pressure)
    return proc, cgroups


def told(path: Path, percent: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    line = f"avg10={percent:.2f} avg60=0.00 avg300=0.00 total=7\n"
    path.write_text(f"some {line}full {line}")


def group(folder: Path, limit: str, usage_gib: float, cache_gib: float = 0.0) -> Path:
    """A cgroup of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{int(usage_gib * GIB)}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {int(cache_gib * GIB)}\n")
    return folder


def test_the_machine_without_limits(tmp_path: Path) -> None:
    """Used is what is not available; our own slabs do not count; no pressure without PSI."""
    sampled = KernelMonitor(*machine(tmp_path)).sample(6 * GIB)
    assert (sampled.total_bytes, sampled.others_bytes) == (64 * GIB, 10 * GIB)
    assert sampled.pressure == 0.0


def test_our_cgroups_limit_is_the_machine(tmp_path: Path) -> None:
    """Page cache that could go does not count as used."""
    proc, cgroups = machine(tmp_path, "0::/lender\n")
    group(cgroups / "lender", str(16 * GIB), 9.0, 2.0)
    sampled = KernelMonitor(proc, cgroups).sample(3 * GIB)
    assert (sampled.total_bytes, sampled.others_bytes) == (16 * GIB, 4 * GIB)


@pytest.mark.parametrize("mount", ["", "unified"])
def test_a_limit_around_us_counts_if_it_leaves_less(tmp_path: Path, mount: str) -> None:
    """Ours has 10 GiB left, the slice around it two."""
    proc, cgroups = machine(tmp_path, "0::/slice/lender\n")
    root = cgroups / mount
    group(root / "slice", str(32 * GIB), 30.0)
    group(root / "slice" / "lender", str(16 * GIB), 6.0)
    sampled = KernelMonitor(proc, cgroups).sample(0)
    assert (sampled.total_bytes, sampled.others_bytes) == (32 * GIB, 30 * GIB)


def test_a_group_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/lender\n", pressure=1.0)
    told(group(cgroups / "lender", "max", 9.0) / "memory.pressure", 50.0)
    sampled = KernelMonitor(proc, cgroups).sample(0)
    assert (sampled.total_bytes, sampled.others_bytes) == (64 * GIB, 16 * GIB)
    assert sampled.pressure == pytest.approx(0.01)


def test_version_one_is_read_as_well(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "5:cpu:/x\n4:hugetlb,memory:/lender\n")
    folder = cgroups / "memory" / "lender"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(8 * GIB))
    (folder / "memory.usage_in_bytes").write_text(str(5 * GIB))
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB}\n")
    sampled = KernelMonitor(proc, cgroups).sample(0)
    assert (sampled.total_bytes, sampled.others_bytes) == (8 * GIB, 4 * GIB)


@pytest.mark.parametrize(("whole", "own", "worse"), [(12.0, 3.0, 0.12), (1.0, 30.0, 0.30)])
def test_the_worse_pressure_counts(tmp_path: Path, whole: float, own: float, worse: float) -> None:
    """Pressure is that of the machine or of the cgroup that limits us, whichever is worse."""
    proc, cgroups = machine(tmp_path, "0::/lender\n", pressure=whole)
    told(group(cgroups / "lender", str(16 * GIB), 1.0) / "memory.pressure", own)
    assert KernelMonitor(proc, cgroups).sample(0).pressure == pytest.approx(worse)


def test_this_machine_can_be_read() -> None:
    sampled = KernelMonitor().sample(0)
    assert 0 < sampled.others_bytes < sampled.total_bytes
    assert 0.0 <= sampled.pressure <= 1.0
