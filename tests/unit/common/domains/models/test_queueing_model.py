"""Lin et al.'s queueing model: the worked numbers, and the network itself, solved and simulated.

References share no code with the model: balance equations of the Markov chain, and a simulation of
every task with exponential times.
"""

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models import queueing_classes
from slackwater.common.domains.models.queueing import (
    EQ_4,
    WORKERS_EXACT_MAX,
    StepTimes,
    method_sharing,
    sharing_above,
    solve,
    throughputs,
)

MB_8 = StepTimes(0.029, 0.018, 0.072, 0.072)
"""Section III-B: the 8 MB model on the paper's CPU cluster."""

seconds = st.floats(0.01, 1.0)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("exact", [9.694, 10.643, 11.253, 11.672]),
        ("fcfs", [11.576, 12.922, 13.536, 13.774]),
        ("hybrid", [11.576, 12.516, 12.326, 12.659]),
    ],
)
def test_the_8_mb_model(method: str, expected: list[float]) -> None:
    assert throughputs(MB_8, 6, method)[3:] == pytest.approx(expected, abs=5e-4)  # type: ignore[arg-type]


def test_alexnet_takes_twelve_days_and_gains_less_than_five_times() -> None:
    step = StepTimes(5.696, 0.0, 1.992, 1.992)
    x = throughputs(step, 20_000)
    assert 105_469 / x[1] / 86_400 == pytest.approx(11.82, abs=0.005)
    assert x[-1] / x[1] == pytest.approx(4.86, abs=0.005)


def test_a_slow_worker_among_three() -> None:
    steps = [StepTimes(w, 0.018, 0.072, 0.072) for w in (0.029, 0.029, 0.2)]
    found = solve(steps)
    assert found.throughput == pytest.approx(9.12576, abs=5e-6)
    assert found.solver == "mva-classes"
    assert found.worker_throughput[0] == pytest.approx(found.worker_throughput[1])
    assert found.worker_throughput[0] > found.worker_throughput[2]


@pytest.mark.parametrize("method", ["exact", "fcfs", "hybrid"])
@settings(max_examples=20)
@given(times=st.tuples(seconds, seconds, seconds, seconds), workers=st.integers(2, 7))
def test_subsets_of_alike_workers_are_the_plain_recursion(
    method: str, times: tuple[float, float, float, float], workers: int
) -> None:
    step = StepTimes(*times)
    visits_s = np.array([[step.uplink_s, step.downlink_s, step.server_s]] * workers)
    each = queueing_classes.by_subsets(
        np.full(workers, step.worker_s), visits_s, method_sharing(method)  # type: ignore[arg-type]
    )  # fmt: skip
    assert each.sum() == pytest.approx(throughputs(step, workers, method)[-1], rel=1e-9)  # type: ignore[arg-type]


def chain_throughput(step: StepTimes, workers: int) -> float:
    """From the balance equations over (at workers, uplink, server, downlink)."""
    means = (step.worker_s, step.uplink_s, step.server_s, step.downlink_s)
    states = [s for s in product(range(workers + 1), repeat=4) if sum(s) == workers]
    index = {state: i for i, state in enumerate(states)}
    flow = np.zeros((len(states), len(states)))
    for state, i in index.items():
        for station in range(4):
            if state[station]:
                rate = (state[0] if station == 0 else 1) / means[station]
                after = list(state)
                after[station] -= 1
                after[(station + 1) % 4] += 1
                flow[i, index[tuple(after)]] += rate
                flow[i, i] -= rate
    equations = np.vstack([flow.T, np.ones(len(states))])
    right = np.append(np.zeros(len(states)), 1.0)
    part = np.linalg.lstsq(equations, right, rcond=None)[0]
    busy = sum(part[i] for state, i in index.items() if state[2])
    return float(busy) / step.server_s


@settings(max_examples=20)
@given(times=st.tuples(seconds, seconds, seconds, seconds), workers=st.integers(1, 5))
def test_exact_is_the_markov_chain(times: tuple[float, float, float, float], workers: int) -> None:
    step = StepTimes(*times)
    assert throughputs(step, workers)[-1] == pytest.approx(
        chain_throughput(step, workers), rel=1e-6
    )


def simulate(steps: list[StepTimes], rng: Random, events: int) -> float:
    """Mini-batches per second: every task on its way, all times exponential, links shared
    equally, the server in order of arrival."""
    places = ["worker"] * len(steps)
    queue: list[int] = []
    now_s, done, began_s = 0.0, 0, 0.0
    for event in range(events):
        rates = []
        for k, step in enumerate(steps):
            place = places[k]
            if place == "worker":
                rates.append(1 / step.worker_s)
            elif place == "server":
                rates.append(1 / step.server_s if queue[0] == k else 0.0)
            else:
                mean_s = step.uplink_s if place == "uplink" else step.downlink_s
                rates.append(1 / mean_s / places.count(place))
        now_s += rng.expovariate(sum(rates))
        k = rng.choices(range(len(steps)), weights=rates)[0]
        following = {"worker": "uplink", "uplink": "server", "server": "downlink"}
        if places[k] == "server":
            queue.pop(0)
            done += 1
        places[k] = following.get(places[k], "worker")
        if places[k] == "server":
            queue.append(k)
        if event == events // 10:
            done, began_s = 0, now_s
    return done / (now_s - began_s)


@settings(max_examples=6, derandomize=True)
@given(
    workers_s=st.lists(seconds, min_size=2, max_size=5),
    server_s=seconds,
    links_s=st.lists(st.tuples(seconds, seconds), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
def test_exact_is_what_a_simulation_of_the_network_shows(
    workers_s: list[float],
    server_s: float,
    links_s: list[tuple[float, float]],
    seed: int,
) -> None:
    """Different workers and links; the server is alike for all (or no product form exists)."""
    steps = [
        StepTimes(w, server_s, up, down)
        for w, (up, down) in zip(workers_s, links_s, strict=False)
    ]  # fmt: skip
    shown = simulate(steps, Random(seed), 40_000)
    found = solve(steps)
    assert found.approximation == ""
    assert found.throughput == pytest.approx(shown, rel=0.05)


@pytest.mark.parametrize(
    "server_s", [(0.02, 0.02, 0.3), (0.05, 0.05, 0.2), (0.01, 0.1, 0.5), (0.3, 0.3, 0.02, 0.02)]
)
def test_different_times_at_the_server_are_near_and_said_to_be_an_approximation(
    server_s: tuple[float, ...],
) -> None:
    """First come, first served has no product form for them: by S (1 + N) they came out up to 68 %
    above what a simulation shows."""
    steps = [StepTimes(0.05, one_s, 0.03, 0.03) for one_s in server_s]
    found = solve(steps)
    assert found.throughput == pytest.approx(simulate(steps, Random(1), 60_000), rel=0.1)
    assert found.solver == "mva-classes"
    assert found.approximation.startswith("times at the server differ")


def test_methods_that_follow_measurements_are_not_called_exact() -> None:
    assert solve([MB_8] * 3).approximation == ""
    assert solve([MB_8] * 3, "hybrid").approximation.startswith("method hybrid")


@settings(max_examples=20)
@given(times=st.tuples(seconds, seconds, seconds, seconds), workers=st.integers(2, 60))
def test_more_workers_never_slow_an_equally_shared_network(
    times: tuple[float, float, float, float], workers: int
) -> None:
    step = StepTimes(*times)
    x = throughputs(step, workers)
    assert (np.diff(x) > -1e-12).all()
    slowest = max(step.uplink_s, step.downlink_s, step.server_s)
    assert x[-1] <= min(workers / step.total_s, 1 / slowest) * (1 + 1e-9)


def test_beyond_sixteen_different_workers_it_says_that_it_estimates() -> None:
    steps = [StepTimes(0.03 + 0.01 * i, 0.018, 0.072, 0.072) for i in range(17)]
    assert solve(steps[:WORKERS_EXACT_MAX]).solver == "mva-classes"
    many = solve(steps)
    assert many.solver == "bard-schweitzer"
    assert many.throughput <= 1 / 0.072
    assert solve([steps[0]] * 500).solver == "mva"


@pytest.mark.parametrize("method", ["exact", "fcfs", "hybrid"])
def test_the_estimate_is_near_the_exact_solution(method: str) -> None:
    rng = Random(7)
    for _ in range(5):
        workers_s = np.array([rng.uniform(0.02, 1.0) for _ in range(10)])
        visits_s = np.array([[0.07, 0.05, 0.02]] * 10)
        gamma = method_sharing(method)  # type: ignore[arg-type]
        exact = queueing_classes.by_subsets(workers_s, visits_s, gamma).sum()
        estimate = queueing_classes.bard_schweitzer(workers_s, visits_s, gamma).sum()
        assert estimate == pytest.approx(exact, rel=0.1)


def test_g_is_pluggable_and_clipped() -> None:
    def always(utilization: np.ndarray) -> np.ndarray:
        return np.full_like(utilization, 7.0)

    assert throughputs(MB_8, 6, "hybrid", sharing=always) == pytest.approx(throughputs(MB_8, 6))
    never = sharing_above(0.999999)
    fcfs = throughputs(MB_8, 4, "fcfs")
    assert throughputs(MB_8, 4, "hybrid", sharing=never) == pytest.approx(fcfs)
    assert EQ_4(np.array([0.8, 0.9, 1.0])) == pytest.approx([0.0, 0.5, 1.0])


def test_servers_divide_the_times_at_links_and_server() -> None:
    half = StepTimes(0.029, 0.009, 0.036, 0.036)
    assert throughputs(MB_8, 8, "hybrid", servers=2) == pytest.approx(
        throughputs(half, 8, "hybrid")
    )
    assert solve([MB_8] * 8, servers=2).throughput == pytest.approx(throughputs(half, 8)[-1])


def test_utilisation_is_throughput_times_service() -> None:
    found = solve([MB_8] * 4)
    assert found.utilization["server"] == pytest.approx(found.throughput * 0.018)
    assert found.utilization["uplink"] == pytest.approx(found.throughput * 0.072)
    assert found.utilization["worker"] == pytest.approx(found.throughput * 0.029 / 4)


@pytest.mark.parametrize(
    ("steps", "options", "word"),
    [
        ([], {}, "workers"),
        ([StepTimes(-1.0)], {}, "worker_s"),
        ([StepTimes(0.1, uplink_s=float("nan"))], {}, "uplink_s"),
        ([StepTimes(0.0)], {}, "no time"),
        ([StepTimes(0.1)], {"method": "magic"}, "method"),
        ([StepTimes(0.1)], {"servers": 0}, "servers"),
    ],
)
def test_nonsense_is_refused_by_name(
    steps: list[StepTimes], options: dict[str, object], word: str
) -> None:
    with pytest.raises(Rejected, match=word):
        solve(steps, **options)  # type: ignore[arg-type]
