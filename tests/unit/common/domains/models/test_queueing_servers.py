"""Servers of unequal load, against the Markov chain of the fork and the join, solved exactly."""

import numpy as np
import pytest

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.queueing import StepTimes, solve, throughputs
from slackwater.common.domains.models.queueing_servers import longest_s

State = tuple[frozenset[int], ...]
"""Mini-batches at the servers in the order they came, each with the servers it still waits for."""


def _chain(worker_s: float, means_s: list[float], workers: int) -> float:
    """Throughput from the balance equations: first come, first served, exponential times."""
    everyone = frozenset(range(len(means_s)))
    index: dict[State, int] = {(): 0}
    flows: list[tuple[int, int, float]] = []
    left: list[State] = [()]
    while left:
        state = left.pop()
        after: list[tuple[float, State]] = []
        if len(state) < workers:
            after.append(((workers - len(state)) / worker_s, (*state, everyone)))
        for server, mean_s in enumerate(means_s):
            served = next((k for k, waits in enumerate(state) if server in waits), None)
            if served is not None:
                rest = state[served] - {server}
                kept = (rest,) if rest else ()
                after.append((1 / mean_s, (*state[:served], *kept, *state[served + 1 :])))
        for rate, other in after:
            if other not in index:
                index[other] = len(index)
                left.append(other)
            flows.append((index[state], index[other], rate))
    balance = np.zeros((len(index) + 1, len(index)))
    for here, there, rate in flows:
        balance[there, here] += rate
        balance[here, here] -= rate
    balance[-1] = 1.0
    part = np.linalg.lstsq(balance, np.eye(len(index) + 1)[-1], rcond=None)[0]
    computing = sum(part[i] * (workers - len(state)) for state, i in index.items())
    return float(computing) / worker_s


CASES = [
    ((1.0, 1.0), (0.5, 0.5), 4), ((1.0, 3.0), (0.7, 0.3), 4), ((0.3, 1.0), (0.8, 0.2), 4),
    ((1.0, 3.0), (2 / 3, 1 / 6, 1 / 6), 3), ((1.0, 1.0), (1 / 3, 1 / 3, 1 / 3), 3),
]  # fmt: skip


@pytest.mark.parametrize(("times", "shares", "workers"), CASES)
def test_unequal_servers_are_near_the_exact_chain(
    times: tuple[float, float], shares: tuple[float, ...], workers: int
) -> None:
    worker_s, server_s = times
    x = throughputs(StepTimes(worker_s, server_s), workers, shares=shares)
    for n in range(1, workers + 1):
        exact = _chain(worker_s, [server_s * share for share in shares], n)
        assert x[n] == pytest.approx(exact, rel=0.015)


def test_an_even_split_overestimates_where_one_server_holds_four_times_as_much() -> None:
    """VGG16 on three servers was measured so (section VII)."""
    step, shares = StepTimes(1.0, 3.0), (2 / 3, 1 / 6, 1 / 6)
    exact = _chain(1.0, [2.0, 0.5, 0.5], 3)
    assert throughputs(step, 3, servers=3)[3] / exact > 1.9
    assert throughputs(step, 3, shares=shares)[3] / exact == pytest.approx(1.0, abs=0.015)


@pytest.mark.parametrize("method", ["exact", "fcfs", "hybrid"])
def test_one_share_is_one_server(method: str) -> None:
    step = StepTimes(0.05, 0.02, 0.07, 0.03)
    assert throughputs(step, 8, method, shares=(1.0,)) == pytest.approx(
        throughputs(step, 8, method)
    )  # type: ignore[arg-type]


def test_a_solution_says_that_it_estimates_the_join() -> None:
    found = solve([StepTimes(1.0, 3.0)] * 3, shares=(0.7, 0.3))
    assert found.solver == "fork-join"
    assert "join of several servers" in found.approximation
    assert found.utilization["server"] == pytest.approx(found.throughput * 2.1)
    with pytest.raises(Rejected, match="workers differ and servers too"):
        solve([StepTimes(1.0, 3.0), StepTimes(2.0, 3.0)], shares=(0.7, 0.3))


def test_the_longest_of_exponential_times() -> None:
    assert longest_s([2.0]) == 2.0
    assert longest_s([1.0, 1.0, 1.0]) == pytest.approx(1 + 1 / 2 + 1 / 3)
    assert longest_s([3.0, 0.0]) == 3.0


@pytest.mark.parametrize(
    ("shares", "servers", "words"),
    [((0.5, 0.4), 1, "sum to 1"), ((1.5, -0.5), 1, "sum to 1"), ((0.5, 0.5), 2, "leave it out"),
     ((1 / 13,) * 13, 1, "give 1 to 12")],
)  # fmt: skip
def test_shares_that_cannot_be_are_refused(
    shares: tuple[float, ...], servers: int, words: str
) -> None:
    with pytest.raises(Rejected, match=words):
        throughputs(StepTimes(1.0, 1.0), 2, shares=shares, servers=servers)
