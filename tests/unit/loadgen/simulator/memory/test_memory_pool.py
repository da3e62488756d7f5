"""Remote memory under the event heap: who is placed, what pages do, what the cores make of it."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slackwater.common.base.errors import ConfigRejected, Rejected
from slackwater.loadgen.cli.simulate_memory import settings_for, simulate_memory
from slackwater.loadgen.simulator.memory.containers import (
    APPLICATIONS,
    GIB,
    Application,
    Container,
    place,
    wanted_bytes,
)
from slackwater.loadgen.simulator.memory.eviction import Point, found_light
from slackwater.loadgen.simulator.memory.paging import PAGE_BYTES, Paging, Swap
from slackwater.loadgen.simulator.memory.run import MemoryOutcome, MemoryRun, MemorySettings
from slackwater.loadgen.simulator.memory.summary import summarize
from slackwater.loadgen.simulator.options import Options
from slackwater.services.slabd.eviction import light_probability

SHORT = MemorySettings(seconds=240)


def run(policy: str, settings: MemorySettings = SHORT, machines: int = 6) -> MemoryOutcome:
    return MemoryRun(policy, machines, settings, seed=1).run()


# Containers ---------------------------------------------------------------------------------------


def test_ninety_containers_are_the_published_mix() -> None:
    """The same number of each application; of its 18, nine hold all, five 75 %, four 50 %."""
    placed = place(32, 90, 64 * GIB, 0, random.Random(1))
    for application in APPLICATIONS:
        shares = [c.share for c in placed if c.application is application]
        assert (shares.count(1.0), shares.count(0.75), shares.count(0.5)) == (9, 5, 4)


def test_limits_never_exceed_a_machine() -> None:
    placed = place(8, 30, 64 * GIB, 3 * GIB, random.Random(2))
    for machine in range(8):
        assert sum(c.limit_bytes for c in placed if c.machine == machine) <= 61 * GIB


def test_what_fits_nowhere_is_refused_with_the_remedy() -> None:
    with pytest.raises(Rejected, match="take more --nodes"):
        place(2, 30, 64 * GIB, 0, random.Random(1))


def test_memory_grows_to_the_peak_and_no_further() -> None:
    containers = [Container(application, 1.0, 0) for application in APPLICATIONS]
    peaks = [application.peak_gib * GIB for application in APPLICATIONS]
    seen = np.array([wanted_bytes(containers, float(t), 1300.0) for t in range(0, 1301, 50)])
    assert (np.diff(seen, axis=0) >= 0).all()
    assert seen[-1] == pytest.approx(peaks)


# Pages --------------------------------------------------------------------------------------------


def paging(share: float, spans: int, touches: float = 15_000.0) -> Paging:
    app = Application("a", 1.0, 10.0, 1.0, 0.3)
    swap = Swap(1, spans, GIB // 4 // PAGE_BYTES)
    return Paging([Container(app, share, 0)], 1, swap, 100.0, touches)


def test_every_page_is_somewhere_and_slots_hold_what_they_should() -> None:
    """In swap is what is there only and what has a copy there, whatever was read and changed."""
    found = paging(0.5, 8)
    for second in range(1, 101):
        found.step(float(second))
        pages = found.dirty + found.clean + found.swapped
        wanted = min(second / 10.0, 1.0) * GIB / PAGE_BYTES
        assert pages == pytest.approx([wanted])
        in_swap = float((found.clean + found.swapped).sum())
        assert float(found.swap.used.sum()) == pytest.approx(in_swap, abs=1e-3)
        assert float((found.dirty + found.clean).sum()) <= 0.5 * GIB / PAGE_BYTES + 1e-6


def test_without_a_limit_nothing_is_paged() -> None:
    found = paging(1.0, 8)
    for second in range(1, 50):
        happened = found.step(float(second))
        assert happened.read.sum() == happened.written.sum() == 0.0


def test_a_full_swap_leaves_pages_in_memory_and_says_so() -> None:
    found = paging(0.25, 1)
    for second in range(1, 50):
        found.step(float(second))
    assert found.swap.used.max() <= found.swap.span_pages + 1e-6
    assert found.over_limit_pages() * PAGE_BYTES == pytest.approx(GIB / 2, rel=1e-3)


def test_only_pages_written_after_mapping_are_remote() -> None:
    swap = Swap(1, 2, 100)
    swap.write(np.array([60.0]))
    swap.map(0, 0)
    swap.write(np.array([20.0]))
    assert swap.remote[0, 0] == 20.0
    swap.unmap(0, 0)
    assert swap.remote.sum() == 0.0
    assert swap.used[0, 0] == 80.0


# Runs ---------------------------------------------------------------------------------------------


def test_remote_memory_raises_what_is_used_and_evens_it_out() -> None:
    baseline, ours = run("disk"), run("weighted")
    summary = summarize(ours, SHORT.seconds, baseline)
    assert summary.gain > 1.05
    assert summary.mapped > 10
    assert summary.max_to_min < summarize(baseline, SHORT.seconds, baseline).max_to_min
    assert [row.own for row in ours.rows] == [row.own for row in baseline.rows]


def test_a_run_is_a_function_of_its_seed() -> None:
    one, other = run("weighted"), run("weighted")
    one.wall_s = other.wall_s = 0.0
    assert msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


def test_lenders_retreat_before_their_own_containers() -> None:
    """Small machines fill up with containers and with slabs: at the end slabs and HeadRoom fit
    beside the containers, or there is no slab."""
    settings = MemorySettings(seconds=240, memory_gib=24.0, headroom_gib=3.0, slab_gib=0.25)
    found = MemoryRun("weighted", 8, settings, seed=3, containers=12)
    outcome = found.run()
    assert found.world is not None
    assert found.world.facts["slab evicted"] > 0
    one = 0.25 / 24.0
    for row in outcome.rows:
        assert row.slabs_end == 0 or row.used_end <= 21.0 / 24.0 + one


def test_drained_lenders_have_nothing_left() -> None:
    settings = msgspec.structs.replace(SHORT, drain_s=200.0)
    found = MemoryRun("weighted", 6, settings, seed=1)
    found.run()
    assert found.world is not None
    assert found.world.facts["slab evicted"] > 0
    assert not found.world.machines[0].lender.slabs
    assert all(machine.lender.slabs for machine in found.world.machines[1:])


def test_the_command_writes_its_report(tmp_path: Path) -> None:
    options = Options(
        trace="generate:infiniswap,containers=6",
        policies=("infiniswap",),
        nodes=3,
        settings=("memory.seconds=30",),
    )
    runs, points = simulate_memory(options, tmp_path, processes=1)
    assert [outcome.policy for outcome, _ in runs] == ["disk", "infiniswap"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.json", "machines.csv", "seconds.csv", "eviction.csv", "manifest.json",
        "utilization.png", "machines.png", "eviction.png", "index.html", "results.json",
    }  # fmt: skip
    assert len((tmp_path / "machines.csv").read_text().splitlines()) == 1 + 2 * 3
    assert max(point.deviation for point in points) < 4.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policies": ("best",)}, "knows disk, infiniswap, weighted"),
        ({"trace": "philly.json"}, "one workload, generate:infiniswap"),
        ({"trace": "generate:infiniswap,machines=3"}, "containers=NUMBER"),
        ({"settings": ("memory.slabs=3",)}, "options are memory_gib"),
        ({"settings": ("edf.seconds=3",)}, "memory.NAME=VALUE"),
    ],
    ids=["policy", "workload", "option", "setting", "owner"],
)
def test_bad_options_are_refused_with_what_is_right(change: dict[str, object], said: str) -> None:
    plain = Options(trace="generate:infiniswap", policies=("weighted",), nodes=3)
    with pytest.raises(ConfigRejected, match=said):
        simulate_memory(msgspec.structs.replace(plain, **change), processes=1)


def test_a_policys_own_settings_win() -> None:
    options = Options(
        trace="generate:infiniswap",
        policies=("weighted",),
        settings=("weighted.slab_gib=2", "memory.slab_gib=0.5"),
    )
    assert settings_for(options, "weighted").slab_gib == 2.0
    assert settings_for(options, "disk").slab_gib == 0.5


# Batch eviction -----------------------------------------------------------------------------------


def test_batch_eviction_finds_light_slabs_as_often_as_the_formula_says() -> None:
    """Within four standard errors of 400 draws, by the daemon's own choice of slabs."""
    formula = light_probability(10, 5, 0.3)
    found = found_light(10, 5, 0.3, 400, random.Random(1))
    assert abs(found - formula) <= 4.0 * (formula * (1.0 - formula) / 400) ** 0.5


def test_a_point_knows_how_far_it_is_from_the_formula() -> None:
    assert Point(0, 0.5, 0.5, 0.5).deviation == 0.0
    assert Point(0, 0.5, 0.5, 0.5 + 2 * (0.25 / 1000) ** 0.5).deviation == pytest.approx(2.0)
