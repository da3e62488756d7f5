"""Figures that benchmarks print of their measurements, and that the pages say the same."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


figures = load("figures")
pages = load("pages")
revisions = load("revisions")


def test_the_pages_show_what_was_measured() -> None:
    marked = 0
    for page in pages.PAGES.glob("*.md"):
        text = page.read_text()
        for found in pages.MARKED.finditer(text):
            remedy = f"{page.name}: run python benchmarks/pages.py"
            assert found[0] == found[1] + pages.measured(found[2].split()) + found[3], remedy
            marked += 1
    assert marked


@pytest.mark.parametrize(
    ("count", "expected"), [(5, None), (6, (0, 5)), (10, (1, 8)), (20, (5, 14)), (100, (39, 60))]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(
    count: int, expected: tuple[int, int] | None
) -> None:
    """Tabulated: of 20 values the 6th and the 15th, of 100 the 40th and the 61st."""
    assert figures.median_interval(list(range(count))[::-1]) == expected


@pytest.mark.parametrize(
    ("ratio", "goal", "lower", "met"),
    [
        (1.00, 0.90, False, True), (1.00, 0.99, False, None), (1.00, 1.10, False, False),
        (1.00, 1.10, True, True), (1.00, 1.01, True, None), (1.00, 0.90, True, False),
        (1.00, None, True, None),
    ],
)  # fmt: skip
def test_a_goal_within_the_interval_is_neither_met_nor_missed(
    ratio: float, goal: float | None, lower: bool, met: bool | None
) -> None:
    """Ten pairs, whose ratios are within 5 % of one another; the peer halves its speed meanwhile,
    which is in both of a pair."""
    peers = [100.0 / (1 + n / 10) for n in range(10)]
    ours = [ratio * peer * (0.95 + n % 5 * 0.025) for n, peer in enumerate(peers)]
    figure = figures.paired("f", ours, peers, "1/s", "peer", goal, lower)
    low, high = figure.interval
    assert 0.94 < low < ratio < high < 1.06
    assert figure.met is met
    [verdict] = [pages.cells(figures.as_dict(figure), "c")[4]]
    expected = {True: "yes", False: "**no**", None: "**not shown**" if goal else "reported"}
    assert verdict == expected[met]


@pytest.mark.parametrize(
    ("hits", "prefetched", "accuracy"), [(0, 0, 0.0), (3, 4, 0.75), (4, 4, 1.0), (2, 1, 1.0)]
)
def test_no_more_of_the_fetched_pages_are_hit_than_there_are(
    hits: int, prefetched: int, accuracy: float
) -> None:
    """Regression: random reads, which fetch next to nothing, were said to be 200 % accurate."""
    assert figures.accuracy(hits, prefetched) == accuracy


def test_what_cannot_be_compared_has_no_verdict_and_says_why() -> None:
    """The paper's pause is of a copy between hosts; over shm no byte is copied."""
    figure = figures.Figure(
        "pause", 3.1, 13.6, "ms", "paper", None, True, unlike="over shm nothing is copied"
    )
    row = pages.cells(figures.as_dict(figure), "run it")
    assert row[1] == "13.6 ms (paper): over shm nothing is copied"
    assert row[4] == "not comparable"
    slower = figures.Figure("evict", 1.1, 0.363, "ms", "paper", 1.0, lower_is_better=True)
    assert pages.cells(figures.as_dict(slower), "run it")[4] == "**no**"


def _rows(*ratios: float, bound: str = "at least") -> list[list[dict[str, object]]]:
    return [[{"name": "reads", "peer_name": "it", "ratio": r, "bound": bound}] for r in ratios]


def test_a_figure_fell_where_each_median_lies_outside_the_other_s_runs() -> None:
    old, within, below = _rows(0.9, 1.0, 1.1), _rows(0.5, 0.91, 0.99), _rows(0.5, 0.89, 0.99)
    assert [one.fell for one in revisions.compared(old, within)] == [False]
    assert [one.fell for one in revisions.compared(old, below)] == [True]
    noisy = _rows(0.5, 0.89, 1.01)
    assert [one.fell for one in revisions.compared(old, noisy)] == [False]
    assert [one.name for one in revisions.compared(old, below)] == ["reads / it"]


def test_a_time_fell_where_it_is_longer() -> None:
    old = _rows(0.9, 1.0, 1.1, bound="at most")
    assert not revisions.compared(old, _rows(0.5, bound="at most"))[0].fell
    assert revisions.compared(old, _rows(1.2, bound="at most"))[0].fell


def test_a_figure_that_one_checkout_does_not_measure_is_not_compared() -> None:
    assert revisions.compared(_rows(1.0), [[]]) == []
