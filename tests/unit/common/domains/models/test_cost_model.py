"""Cruise's cost model: closed form against every configuration, the programme against every role
and share, the 5 % rule, and noise."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from slackwater.common.base.errors import Rejected
from slackwater.common.domains.models.cost import (
    Machine,
    Training,
    epoch_s,
    even_configuration,
    even_epoch_s,
    even_optimum,
    link_matrix,
    pays,
)
from slackwater.common.domains.models.cost_fit import Measured, fitted
from slackwater.common.domains.models.cost_kinds import kinds_optimum
from slackwater.common.domains.models.cost_programme import different_optimum

EXAMPLE = Training(instances=1e6, batch=1000, model_bytes=0.25e9)
MACHINE = Machine(1e-3, 1e9)


def with_ratio(x: float) -> Training:
    """x = M / (b B c)."""
    return Training(instances=1e6, batch=1000, model_bytes=x * 1e9)


def test_the_worked_example() -> None:
    best = even_optimum(EXAMPLE, MACHINE, 32)
    assert (best.worker_count, best.server_count) == (21, 11)
    assert best.epoch_s == pytest.approx(70.346, abs=5e-4)
    assert even_epoch_s(EXAMPLE, MACHINE, 32, 22) == pytest.approx(70.455, abs=5e-4)


@pytest.mark.parametrize(("x", "workers"), [(0.153, 23), (0.0343, 27), (0.605, 18), (0.36, 20)])
def test_table_3_4(x: float, workers: int) -> None:
    assert even_optimum(with_ratio(x), MACHINE, 32).worker_count == workers


@settings(max_examples=200)
@given(x=st.floats(1e-4, 1e3), machines=st.integers(2, 120))
def test_the_closed_form_is_the_best_of_all(x: float, machines: int) -> None:
    training = with_ratio(x)
    best_s = min(even_epoch_s(training, MACHINE, machines, w) for w in range(1, machines))
    found = even_optimum(training, MACHINE, machines)
    assert found.epoch_s == pytest.approx(best_s, rel=1e-12)
    assert found.epoch_s == pytest.approx(
        epoch_s(training, [MACHINE] * machines, found.workers, found.instances, found.model_bytes)
    )
    assert sum(found.instances) == pytest.approx(training.instances)
    assert sum(found.model_bytes) == pytest.approx(training.model_bytes)


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in shares(total - first, parts - 1):
            yield (first, *rest)


def brute_force_s(training: Training, machines: list[Machine], blocks: int) -> float:
    """Every set of workers, every share of the data; the model's shares by linear programming."""
    links, best_s = link_matrix(machines), float("inf")
    everyone = range(len(machines))
    for mask in range(1, 2 ** len(machines) - 1):
        working = [i for i in everyone if mask >> i & 1]
        serving = [j for j in everyone if not mask >> j & 1]
        for counts in shares(blocks, len(working)):
            rows, right = [], []
            for i, count in zip(working, counts, strict=True):
                if not count:
                    continue
                data = count * training.instances / blocks
                scale = data / training.batch * training.model_bytes
                for at, j in enumerate(serving):
                    row = [0.0] * len(serving)
                    row[at] = scale * len(working) / links[i, j]
                    rows.append([*row, -1.0])
                    right.append(-machines[i].instance_s * data)
                rows.append([*(scale / links[i, j] for j in serving), -1.0])
                right.append(-machines[i].instance_s * data)
            whole = [[1.0] * len(serving) + [0.0]]
            cost = [0.0] * len(serving) + [1.0]
            found = linprog(cost, A_ub=rows, b_ub=right, A_eq=whole, b_eq=[1.0])
            best_s = min(best_s, found.fun)
    return best_s


@pytest.mark.parametrize(
    ("seed", "machines", "blocks"), [(0, 2, 8), (1, 3, 6), (2, 3, 6), (3, 4, 4), (4, 4, 4)]
)
def test_the_programme_is_the_best_of_all(seed: int, machines: int, blocks: int) -> None:
    check_programme(seed, machines, blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "machines", "blocks"), [(5, 5, 4), (6, 6, 3)])
def test_the_programme_is_the_best_of_all_up_to_six(seed: int, machines: int, blocks: int) -> None:
    check_programme(seed, machines, blocks)


def check_programme(seed: int, machines: int, blocks: int) -> None:
    rng = Random(seed)
    cluster = [
        Machine(rng.choice([0.5e-3, 1e-3, 2e-3]), rng.choice([0.5e9, 1e9, 4e9]))
        for _ in range(machines)
    ]
    training = Training(instances=1e5, batch=1000, model_bytes=rng.uniform(0.1e9, 1e9))
    found = different_optimum(training, cluster, blocks=blocks, gap=1e-7, whole_blocks=True)
    assert found.proven
    assert found.epoch_s == pytest.approx(brute_force_s(training, cluster, blocks), rel=1e-5)
    assert sum(found.instances) == pytest.approx(training.instances)
    assert sum(found.model_bytes) == pytest.approx(training.model_bytes)


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_shares_finer_than_blocks_are_no_worse_than_any_of_a_finer_grain(seed: int) -> None:
    """Three machines, found with 24 blocks and smoothed, against brute force with 48."""
    rng = Random(seed)
    cluster = [Machine(rng.uniform(0.5e-3, 2e-3), rng.uniform(0.5e9, 4e9)) for _ in range(3)]
    training = Training(instances=1e5, batch=1000, model_bytes=rng.uniform(0.1e9, 1e9))
    found = different_optimum(training, cluster, blocks=24, gap=1e-7)
    assert found.epoch_s <= brute_force_s(training, cluster, 48) * (1 + 1e-9)
    assert found.epoch_s == pytest.approx(
        epoch_s(training, cluster, found.workers, found.instances, found.model_bytes)
    )
    assert sum(found.instances) == pytest.approx(training.instances)
    assert sum(found.model_bytes) == pytest.approx(training.model_bytes)


def test_machines_alike_get_the_closed_form_from_the_programme_too() -> None:
    """With a block for each of many shares, the programme's even split is the analytic one."""
    found = different_optimum(EXAMPLE, [MACHINE] * 6, blocks=60)
    assert found.worker_count == even_optimum(EXAMPLE, MACHINE, 6).worker_count
    assert found.epoch_s == pytest.approx(even_optimum(EXAMPLE, MACHINE, 6).epoch_s, rel=1e-6)


@pytest.mark.parametrize("x", [0.153, 0.0343, 0.605, 0.36])
def test_noise_of_a_tenth_costs_little(x: float) -> None:
    """Computing and link times are each off by up to 10 %; the paper loses 6.5 % at most."""
    rng = Random(3)
    training = with_ratio(x)
    best_s = even_optimum(training, MACHINE, 32).epoch_s
    for _ in range(500):
        seen = Machine(1e-3 * rng.uniform(0.9, 1.1), 1e9 * rng.uniform(0.9, 1.1))
        workers = even_optimum(training, seen, 32).worker_count
        assert even_epoch_s(training, MACHINE, 32, workers) <= 1.065 * best_s


def test_a_change_must_gain_five_percent() -> None:
    best_s = even_optimum(EXAMPLE, MACHINE, 32).epoch_s
    assert pays(even_configuration(EXAMPLE, MACHINE, 32, 27).epoch_s, best_s)
    assert not pays(even_configuration(EXAMPLE, MACHINE, 32, 22).epoch_s, best_s)
    assert pays(100.0, 95.0)
    assert not pays(100.0, 95.01)


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(Rejected, match="machines is 1"):
        even_optimum(EXAMPLE, MACHINE, 1)
    with pytest.raises(Rejected, match="bytes_per_s"):
        even_optimum(EXAMPLE, Machine(1e-3, 0.0), 4)
    with pytest.raises(Rejected, match="batch"):
        different_optimum(Training(instances=1, batch=0, model_bytes=1), [MACHINE] * 3)
    with pytest.raises(Rejected, match="both roles"):
        even_configuration(EXAMPLE, MACHINE, 4, 4)


def two_kinds(rng: Random, machines: int) -> list[Machine]:
    kinds = [
        Machine(rng.choice([0.2e-3, 1e-3, 2e-3]), rng.choice([0.5e9, 1e9, 4e9])) for _ in range(2)
    ]
    return [rng.choice(kinds) for _ in range(machines)]


@pytest.mark.parametrize("seed", range(8))
def test_two_kinds_are_no_worse_than_the_programme(seed: int) -> None:
    rng = Random(seed)
    cluster = two_kinds(rng, rng.randint(3, 7))
    training = Training(instances=1e5, batch=1000, model_bytes=rng.uniform(0.05e9, 1e9))
    ours = kinds_optimum(training, cluster)
    programme = different_optimum(training, cluster, blocks=40)
    assert ours.epoch_s <= programme.epoch_s * (1 + 1e-9)
    assert sum(ours.instances) == pytest.approx(training.instances)
    assert sum(ours.model_bytes) == pytest.approx(training.model_bytes)
    assert ours.epoch_s == pytest.approx(
        epoch_s(training, cluster, ours.workers, ours.instances, ours.model_bytes)
    )


@pytest.mark.parametrize("seed", range(4))
def test_two_kinds_are_as_good_as_any_role_and_share(seed: int) -> None:
    """Brute force over blocks of data: never better, and near where there are many blocks."""
    rng = Random(100 + seed)
    cluster = two_kinds(rng, 3)
    training = Training(instances=1e5, batch=1000, model_bytes=rng.uniform(0.1e9, 1e9))
    ours_s, brute_s = kinds_optimum(training, cluster).epoch_s, brute_force_s(training, cluster, 24)
    assert brute_s * 0.9 <= ours_s <= brute_s * (1 + 1e-9)


def papers_machines(x: float, faster: float) -> tuple[Training, list[Machine]]:
    """NMF on 28 machines and 4 with four times the bandwidth (Lee 2020, section 3.4.5)."""
    slow, fast = Machine(6e-4, 1.25e9 / 8), Machine(6e-4 / faster, 5e9 / 8)
    model_bytes = x * slow.bytes_per_s * 1e4 * slow.instance_s
    return Training(instances=1.9e6, batch=1e4, model_bytes=model_bytes), [slow] * 28 + [fast] * 4


def test_15_and_4_machines_that_work_are_better_than_the_programmes_16_and_4() -> None:
    found = kinds_optimum(*papers_machines(0.303, 2.4))
    assert (sum(found.workers[:28]), sum(found.workers[28:])) == (15, 4)
    assert found.epoch_s == pytest.approx(75.748, abs=1e-3)


def test_machines_of_one_kind_are_as_by_the_closed_form() -> None:
    for x in (0.02, 0.25, 2.0):
        alike = kinds_optimum(with_ratio(x), [MACHINE] * 32)
        assert alike.epoch_s == pytest.approx(even_optimum(with_ratio(x), MACHINE, 32).epoch_s)


def test_more_kinds_and_whole_batches_are_refused() -> None:
    three = [Machine(1e-3 * n, 1e9) for n in (1, 2, 3)]
    with pytest.raises(Rejected, match="3 kinds"):
        kinds_optimum(EXAMPLE, three)
    whole = Training(instances=1e6, batch=1000, model_bytes=1e8, whole_batches=True)
    with pytest.raises(Rejected, match="whole_batches"):
        kinds_optimum(whole, [MACHINE] * 4)
    with pytest.raises(Rejected, match="two kinds"):
        different_optimum(whole, three)
    with pytest.raises(Rejected, match="server_s"):
        even_optimum(Training(instances=1, batch=1, model_bytes=1, server_s=-1.0), MACHINE, 4)


def test_a_last_mini_batch_takes_as_long_as_a_full_one() -> None:
    """Eq. 3.4: 1,000 instances of 3 workers are 4 mini-batches of 100 for each, not 3.3."""
    whole = Training(instances=1000, batch=100, model_bytes=1e9, whole_batches=True)
    part = Training(instances=1000, batch=100, model_bytes=1e9)
    assert even_epoch_s(whole, MACHINE, 6, 3) == pytest.approx(1000 / 3 * 1e-3 + 4 * 1.0)
    assert even_epoch_s(part, MACHINE, 6, 3) == pytest.approx(1000 / 3 * 1e-3 + 1000 / 300)
    even = Training(instances=1200, batch=100, model_bytes=1e9, whole_batches=True)
    assert even_epoch_s(even, MACHINE, 6, 3) == pytest.approx(0.4 + 4 * 1.0)
    assert even.batches(0.1 * 3 * 1000) == 3  # 300.00000000000006 instances.


@settings(max_examples=50)
@given(
    x=st.floats(1e-2, 10), server_s=st.floats(0, 0.5), machines=st.integers(2, 60),
    whole=st.booleans(),
)  # fmt: skip
def test_with_a_cost_of_servers_the_best_of_all_is_found(
    x: float, server_s: float, machines: int, whole: bool
) -> None:
    training = Training(
        instances=1e6, batch=1000, model_bytes=x * 1e9, server_s=server_s, whole_batches=whole
    )
    found = even_optimum(training, MACHINE, machines)
    assert found.epoch_s == min(
        even_epoch_s(training, MACHINE, machines, w) for w in range(1, machines)
    )
    assert found.epoch_s == pytest.approx(
        epoch_s(training, [MACHINE] * machines, found.workers, found.instances, found.model_bytes)
    )


MODEL_BYTES = 0.25e9


def as_measured(workers: int, servers: int, server_s: float = 0.0, noise: float = 1.0) -> Measured:
    transfer_s = max(1.0, workers / servers) * MODEL_BYTES / 1e9 + server_s * servers
    return Measured(workers, servers, 1000.0, 1.0, transfer_s * noise)


def test_parameters_are_fitted_to_what_was_measured() -> None:
    seen = [as_measured(w, 32 - w, 0.01) for w in (18, 23, 27)]
    fit = fitted(MODEL_BYTES, seen)
    assert fit.machine.instance_s == pytest.approx(1e-3)
    assert fit.machine.bytes_per_s == pytest.approx(1e9)
    assert fit.server_s == pytest.approx(0.01)
    assert fit.worst < 1e-9
    alone = fitted(MODEL_BYTES, seen[:1])
    assert alone.server_s == 0.0
    assert alone.worst < 1e-9


def test_transfers_that_do_not_grow_with_workers_are_a_cost_of_servers() -> None:
    """The least squares would have a link whose bytes take less than no time."""
    seen = [Measured(w, 1, 24 / w, 1.0, took_s) for w, took_s in ((1, 0.5), (4, 0.48), (8, 0.46))]
    fit = fitted(1.0, seen)
    assert fit.machine.bytes_per_s > 1e6
    assert fit.server_s == pytest.approx(0.48, abs=0.01)
    assert fit.batch_s(1.0, 8, 1, 0.0) == pytest.approx(0.48, abs=0.01)


@given(st.lists(st.tuples(st.integers(1, 31), st.floats(0.8, 1.25)), min_size=1, max_size=8))
def test_a_fit_is_finite_and_from_0_on_whatever_was_measured(seen: list[tuple[int, float]]) -> None:
    fit = fitted(MODEL_BYTES, [as_measured(w, 32 - w, noise=noise) for w, noise in seen])
    assert fit.machine.bytes_per_s > 0.0
    assert fit.server_s >= 0.0
    assert fit.worst < 0.6


def test_measurements_without_time_are_refused() -> None:
    with pytest.raises(Rejected, match="at least one"):
        fitted(1.0, [])
    with pytest.raises(Rejected, match="took some time"):
        fitted(1.0, [Measured(1, 1, 10.0, 1.0, 0.0)])
