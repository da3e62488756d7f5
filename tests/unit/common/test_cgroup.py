"""The memory that a process may have, and kills for want of it, told from other kills."""

import asyncio
import os
from pathlib import Path

import pytest

from slackwater.common.base import limits
from slackwater.common.base.errors import ConfigRejected
from slackwater.common.embedded import ClusterOptions, UnitSpec
from slackwater.common.embedded.cluster import memory_budget, service_stages
from slackwater.common.embedded.unit import Unit
from slackwater.common.native.cgroup import LOOK_S, MemoryKills, memory_bytes

GIB = 1024**3
V1 = "4:memory:/jobs/one\n1:cpu:/\n0::/\n"


def machine(folder: Path, cgroup: str, kills: str = "") -> tuple[Path, Path]:
    """(proc, cgroups) of a machine of 64 GiB."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    if kills:
        (proc / "vmstat").write_text(kills)
    return proc, cgroups


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return folder


def test_memory_is_the_machines_where_nothing_limits_it(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n")
    assert memory_bytes(proc, cgroups) == 64 * GIB


@pytest.mark.parametrize("around", [False, True])
def test_a_cgroups_limit_is_the_memory_also_one_around_ours(tmp_path: Path, around: bool) -> None:
    proc, cgroups = machine(tmp_path, "0::/slice/unit\n")
    ours, outer = "max\n", f"{4 * GIB}\n"
    group(cgroups / "slice", max=outer if around else ours)
    group(cgroups / "slice" / "unit", max=ours if around else outer)
    assert memory_bytes(proc, cgroups) == 4 * GIB


def test_version_1_limits_too(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, V1)
    group(cgroups / "memory" / "jobs" / "one", limit_in_bytes=f"{3 * GIB}\n")
    group(cgroups / "memory", limit_in_bytes="9223372036854771712\n")
    assert memory_bytes(proc, cgroups) == 3 * GIB


def test_aggregators_of_one_machine_share_its_memory() -> None:
    """Ten of them promised five times the memory when each took half of it."""
    own = ClusterOptions(aggregators=10)
    stages = service_stages(own, 0.1, "secret")
    told = [fields for kind, _, fields in stages[0] if kind == "aggregator"]
    assert len(told) == 10
    budgets = {fields["node_memory_bytes_max"] for fields in told}
    assert budgets == {memory_bytes() // 2}, "one for all of them together"
    assert memory_budget(64 * 1024**2) == 64 * 1024**2
    with pytest.raises(ConfigRejected, match="give 1048576 or more"):
        memory_budget(1)
    own = ClusterOptions(aggregators=2, aggregator={"device": "fake"})
    for kind, _, fields in service_stages(own, 0.1, "secret")[0]:
        assert kind != "aggregator" or "memory_bytes_max" not in fields


@pytest.mark.parametrize(
    ("cgroup", "folder", "file"),
    [("0::/unit\n", "unit", "events"), (V1, "memory/jobs/one", "oom_control")],
)
def test_kills_are_counted_by_the_cgroup(
    tmp_path: Path, cgroup: str, folder: str, file: str
) -> None:
    proc, cgroups = machine(tmp_path, cgroup, "nr_free 5\noom_kill 70\n")
    limit = "max" if file == "events" else "limit_in_bytes"
    where = group(cgroups / folder, **{limit: "max\n", file: "low 0\noom 3\noom_kill 2\n"})
    kills = MemoryKills(proc, cgroups)
    assert kills.count() == 2
    assert not kills.rose()
    (where / f"memory.{file}").write_text("oom 4\noom_kill 3\n")
    assert kills.rose()


def test_the_machines_count_stands_in_and_none_is_none(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n", "oom_kill 7\n")
    assert MemoryKills(proc, cgroups).count() == 7
    (proc / "vmstat").unlink()
    assert MemoryKills(proc, cgroups).count() == 0
    assert not MemoryKills(proc, cgroups).rose()


def test_a_kill_of_long_ago_explains_nothing(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n", "oom_kill 7\n")
    kills = MemoryKills(proc, cgroups)
    kills.look(100.0)
    (proc / "vmstat").write_text("oom_kill 8\n")
    kills.look(100.0 + LOOK_S)
    assert kills.rose(), "the look came between the kill and its news"
    kills.look(100.0 + 1.5 * LOOK_S)
    assert kills.rose()
    kills.look(100.0 + 2 * LOOK_S)
    assert not kills.rose()


async def _reason(folder: Path, script: str, kills: MemoryKills) -> str:
    """Why a unit that runs the script is not started again."""
    spec = UnitSpec(name="u", command=("/bin/sh", "-c", script), restart_wait_s=0.01)
    unit = Unit(spec, folder, {}, kills)
    unit.start()
    async with asyncio.timeout(60):
        await unit.ended.wait()
    unit.abandon()
    return unit.reason


async def test_a_unit_killed_for_memory_says_so(tmp_path: Path) -> None:
    """The same signal means another thing when the kernel's count rose with it."""
    proc, cgroups = machine(tmp_path, "0::/\n", "oom_kill 7\n")
    kills = MemoryKills(proc, cgroups)
    by_hand = await _reason(tmp_path, "kill -9 $$", kills)
    assert by_hand == "ended 3 times within 60 s, the last time with signal 9"
    script = f"echo oom_kill 8 > {proc}/vmstat; kill -9 $$"
    assert (
        await _reason(tmp_path, script, kills)
    ) == f"{by_hand} (killed by the kernel for memory)"


async def test_a_unit_is_a_preferred_victim_where_its_spec_says_so(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("")
    for score in (0, limits.OOM_SCORE_AGGREGATOR):
        spec = UnitSpec(
            name=f"u{score}",
            command=("/bin/sh", "-c", f"cat /proc/self/oom_score_adj > {tmp_path}/{score}; exit 0"),
            oom_score_adj=score,
        )
        unit = Unit(spec, tmp_path, {})
        unit.start()
        async with asyncio.timeout(60):
            await unit.ended.wait()
        unit.abandon()
    own = _own_score()
    assert (tmp_path / "0").read_text().strip() == str(own)
    given = int((tmp_path / str(limits.OOM_SCORE_AGGREGATOR)).read_text())
    assert given == limits.OOM_SCORE_AGGREGATOR
    assert 0 < limits.OOM_SCORE_AGGREGATOR < limits.OOM_SCORE_JOB <= 1000


def _own_score() -> int:
    return int(Path(f"/proc/{os.getpid()}/oom_score_adj").read_text())
