"""Memory workloads: what they ask for, how it is timed, and that a wrong page ends the play."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slackwater.common.base.errors import ConfigRejected
from slackwater.loadgen.memory.checker import PAGE_BYTES, WrongPage
from slackwater.loadgen.memory.latency import Latencies
from slackwater.loadgen.memory.play import PlayOptions, play_array, rates
from slackwater.loadgen.memory.report import lines, table, write_report
from slackwater.loadgen.memory.workloads import STRIDE, WORKLOADS, Items, workload

PAGES = 1000


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_workload_is_a_function_of_its_seed_and_stays_inside(name: str) -> None:
    one, same, other = (workload(name, PAGES, seed) for seed in (1, 1, 2))
    first, again, another = (each.batch(5000) for each in (one, same, other))
    assert np.array_equal(first.first, again.first)
    assert np.array_equal(first.write, again.write)
    assert not np.array_equal(first.write, another.write)
    assert first.first.min() >= 0
    assert (first.first + first.count).max() <= PAGES


def test_sequential_goes_on_where_it_ended() -> None:
    stream = workload("sequential", 10, 0)
    assert stream.batch(7).first.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert stream.batch(5).first.tolist() == [7, 8, 9, 0, 1]


def test_strided_steps_by_the_stride_and_reaches_every_page() -> None:
    stream = workload("strided", 700, 0)
    first = stream.batch(100).first
    assert set(np.diff(first).tolist()) == {STRIDE}
    everything = np.concatenate([first, stream.batch(600).first])
    assert sorted(everything.tolist()) == list(range(700))


def test_zipf_prefers_few_pages_and_random_none() -> None:
    """The most popular of 1,000 pages has 13 % of the requests at exponent 0.99."""
    popular = np.bincount(workload("zipf", PAGES, 3).batch(50_000).first).max() / 50_000
    assert 0.11 < popular < 0.15
    even = np.bincount(workload("random", PAGES, 3).batch(50_000).first).max() / 50_000
    assert even < 0.003


@pytest.mark.parametrize(("name", "sets", "mean_bytes"), [("etc", 0.05, 484), ("sys", 0.25, 1006)])
def test_the_published_mixes(name: str, sets: float, mean_bytes: float) -> None:
    """Shares of SETs, and item sizes: 16 + 0.9 * 264 + 0.1 * 2304 for ETC; for SYS keys of 0.4 *
    18 + 0.6 * 32.5 and values of 0.8 * 410 + 0.08 * 168 + 0.12 * 5250 bytes."""
    stream = workload(name, 20_000, 5)
    assert isinstance(stream, Items)
    asked = stream.batch(100_000)
    assert asked.write.mean() == pytest.approx(sets, abs=0.005)
    assert 20_000 * PAGE_BYTES / stream.items == pytest.approx(mean_bytes, rel=0.03)
    assert asked.count.max() <= 4


def test_an_unknown_workload_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigRejected, match="sequential, strided, random, zipf, etc, sys"):
        workload("facebook", 10, 0)


def test_percentiles_are_right_to_two_per_cent() -> None:
    found = Latencies()
    for micros in range(1, 1001):
        found.add(micros * 1000)
    assert len(found) == 1000
    for percent in (50, 95, 99):
        assert found.percentile_us(percent) == pytest.approx(percent * 10, rel=0.02)
    assert Latencies().percentile_us(50) == 0.0


# Arrays -------------------------------------------------------------------------------------------


class Plain:
    """Memory that is all here; `damage` changes a page behind the player's back."""

    def __init__(self, pages: int) -> None:
        self._rows = np.zeros((pages, PAGE_BYTES), np.uint8)
        self.looks = 0
        self.damage = False

    @property
    def array(self) -> NDArray[np.uint8]:
        return self._rows

    def figures(self) -> dict[str, int]:
        self.looks += 1
        if self.damage:
            self._rows[:, 100] ^= 1
        return {"faults": 10 * self.looks, "resident": 5}


def test_an_array_is_played_checked_and_reported(tmp_path: Path) -> None:
    options = PlayOptions(workload="etc", pages=50, seconds=0.1, check=True)
    result = play_array(Plain(50), options)
    assert result.requests > 100
    assert result.checked_pages > 0
    assert result.counted == {"faults": 10}
    assert sum(result.by_second) == result.requests
    assert result.rates["local"] == 1.0 - 10 / result.pages_moved
    write_report(tmp_path, result)
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.json", "seconds.csv", "seconds.png", "latency.png", "index.html", "results.json",
    }  # fmt: skip
    assert table(result).row_count == 2
    assert any("read and right" in line for line in lines(result))


def test_a_damaged_page_ends_the_play() -> None:
    plain = Plain(20)
    plain.damage = True
    options = PlayOptions(workload="random", pages=20, seconds=5.0, check=True)
    with pytest.raises(WrongPage):
        play_array(plain, options)


def test_hit_rates_follow_from_what_was_counted() -> None:
    counted = {"read_pages": 100, "read_remote_pages": 75, "accesses": 10, "hits": 9}
    assert rates(counted, 200) == {"remote": 0.75, "prefetch": 0.9}
