"""The scripts that rerun Lin et al., Harmony and Cruise: the claims on a small scale, and pages."""

from pathlib import Path
from random import Random

import pytest

from slackwater.loadgen.reproduce import cruise, harmony, lin
from slackwater.loadgen.reproduce.page import stated


def test_figures_of_the_throughput_model() -> None:
    rows = {row.what: float(row.ours) for row in lin.model_rows("command")}
    assert rows["AlexNet on one node, days"] == pytest.approx(11.82, abs=0.01)
    assert rows["AlexNet's limit speed-up"] == pytest.approx(4.86, abs=0.01)


def test_arrivals_find_who_is_still_there() -> None:
    assert lin._found([0.0, 1.0, 2.0, 3.0], [1.5, 10.0, 2.5, 11.0]) == [0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("method", lin.METHODS)
def test_what_lin_et_al_say_holds_on_a_small_scale(method: str) -> None:
    """Ratios of equal jobs: HELL is near KNEE at low load and below it at high load, moldable KNEE
    below moldable HELL, and HELL below chunks."""
    jobs, seeds = 300, 3

    def days(policy: str, mode: str, at: float, **knobs: float) -> float:
        return lin.simulate(policy, mode, at, method, jobs, seeds, knobs).response_days

    for load in (0.1, 0.3):
        assert days("hell", "malleable", load) <= 1.05 * days("knee", "malleable", load)
    assert days("hell", "malleable", 0.7) < days("knee", "malleable", 0.7)
    assert days("knee", "moldable", 0.7, load=0.7) < days("hell", "moldable", 0.7)
    assert days("hell", "malleable", 0.2) < min(
        days("jsq-chunk", "chunks", 0.2, chunk=chunk) for chunk in (20, 25, 33)
    )


@pytest.mark.slow
def test_srpt_is_overloaded_from_a_fifth() -> None:
    cells = [lin.simulate("srpt", "malleable", load, "exact", 2000, 5) for load in (0.1, 0.2)]
    assert [cell.stable for cell in cells] == [True, False]


def test_cruise_s_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cruise.md"
    monkeypatch.setattr("sys.argv", ["cruise", "--draws", "20", "--out", str(out)])
    monkeypatch.setattr(cruise, "heterogeneous_rows", list)
    cruise.main()
    rows = {row.what: row for row in stated(out.read_text())}
    for name, (_, published, _, _) in cruise.APPLICATIONS.items():
        found = rows[f"{name}: closed form against the grid of the same model, workers of 32"]
        assert (found.ours, found.met) == (str(published), "yes")


def test_cruise_s_model_misses_most_measured_epochs() -> None:
    """x was not fitted to these: LDA's epoch of 27 workers fits, MLR's 2.29 is beyond eq. 3.5."""
    rows = {row.what: row for row in cruise.model_rows()}
    assert rows["LDA: epoch of 27 workers over that of 18, of 32"].met == "yes"
    assert rows["MLR: epoch of 18 workers over that of 27, of 32"].met == "**no**"
    lasso = rows["Lasso: epoch shortened from 23 workers"]
    assert (lasso.ours, lasso.met) == ("0 % (4.2 % does not pay)", "**no**")


def test_lin_s_claims_name_the_loads_at_which_they_fail() -> None:
    days = {"jsq-chunk": 2.0, "hell": 1.8, "knee": 1.9, "equal-share": 1.7, "srpt": 9.0}

    def cell(policy: str, mode: str, load: float, mean: float) -> lin.Cell:
        return lin.Cell(policy, mode, load, "hybrid", mean, 0.01, 2.0)

    cells = {
        (policy, mode, load): cell(policy, mode, load, mean)
        for policy, mean in days.items()
        for mode in ("malleable", "moldable", "chunks")
        for load in lin.LOADS
    }
    for load in (0.1, 0.7):
        cells["hell", "moldable", load] = cell("hell", "moldable", load, 2.5)
    rows = {row.what: row for row in lin.claims(cells, "four (figure 12a), hybrid model", "c")}
    row = rows["four, hybrid: hell moldable / jsq-chunk chunks, loads 0.1 to 0.7"]
    assert row.met == "**no**"
    assert row.ours == "1.250 at load 0.1; above 1 at 0.1, 0.7"
    assert rows["four, hybrid: knee moldable / jsq-chunk chunks, loads 0.1 to 0.7"].met == "yes"


def test_cruise_s_choice_under_noise_on_every_report() -> None:
    """At most the published 6.5 % off the optimum from wherever it starts, as the optimiser
    averages what its workers report; a single report in place of the average loses more."""

    def worst(averaged: bool) -> float:
        noise = cruise.NOISES["normal, deviation 10 %"]
        return max(
            loss
            for name, (x, _, _, _) in cruise.APPLICATIONS.items()
            for start in range(1, cruise.MACHINES)
            for loss in cruise.losses(x, start, noise, 40, Random(name), averaged=averaged)
        )

    assert worst(averaged=True) <= 0.065 < worst(averaged=False)


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_harmony_s_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "harmony.md"
    monkeypatch.setattr("sys.argv", ["harmony", "--seeds", "1", "--out", str(out)])
    harmony.main()
    rows = {row.what: row for row in stated(out.read_text())}
    assert rows["harmony: JCT, times the speed of isolated"].goal == "at least 2.11 (published)"
    left = rows["gain that is left with profiles off by up to 5.0%, JCT and makespan"]
    assert min(map(float, left.ours.split(" and "))) > 0.75, "of one seed; the page has five"
    mean = rows["naive, mean: JCT, times the speed of isolated"]
    assert 1.0 < float(mean.ours.split()[0]) < 1.2
